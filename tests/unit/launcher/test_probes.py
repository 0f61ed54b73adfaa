"""Probes ask real programs: an answer counts if it is a good one, in time, and of the program itself."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.effort import examples
from tests.unit.launcher.agent import spawn
from tests.waiting import WAIT_TIMEOUT
from unirun.launcher.environment import FRESH
from unirun.launcher.events import Worker
from unirun.launcher.probes import Output, Probing, Question, listeners_on, sockets_of
from unirun.spec.job import Probe
from unirun.values import WorkerId

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def worker(
    pid: int | None = None, ready: Probe | None = None, alive: Probe | None = None, **more: Any
) -> Worker:
    """A worker whose process is that of this test, unless another `pid` is given."""
    request = replace(spawn(1, "engine", 0, "program"), **{"env": {"PATH": os.environ["PATH"]}, **more})
    who = WorkerId("engine", 0, 0)
    return Worker(1, who, FRESH, request, pid=pid or os.getpid(), ready=ready, alive=alive)


async def ask(probe: Probe, pid: int | None = None, **more: Any) -> str:
    return await Question(worker(pid, **more), probe).ask()


@asynccontextmanager
async def server(
    answer: bytes, host: str = "127.0.0.1", *, hold: bool = False, reset: bool = False
) -> AsyncIterator[int]:
    """A server that sends `answer` after each request, and keeps the connection open (`hold`) or resets it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            if hold:
                await reader.read()
            if reset:
                await asyncio.sleep(0.02)  # the client reads the status first
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, host, 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1]


def asked(answer: bytes, path: str = "/health", timeout: float = 5.0, **more: bool) -> str:
    """The reason why a server that sends `answer` is not ready, without its address; empty if it is."""

    async def main() -> str:
        async with server(answer, **more) as port:  # type: ignore[arg-type]
            why = await ask(Probe("http", (f"http://127.0.0.1:{port}{path}",), timeout=timeout))
            return why.replace(f"http://127.0.0.1:{port}", "")

    return asyncio.run(main())


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class TestHttp:
    @pytest.mark.parametrize("status", ["200 OK", "204", "299 ", "200 Fine \xff"])
    def test_http_with_a_status_of_2xx_is_ready(self, status: str) -> None:
        assert asked(f"HTTP/1.0 {status}\r\n\r\n".encode("latin-1")) == ""

    @pytest.mark.parametrize("status", [199, 301, 404, 500, 503])
    def test_http_with_another_status_is_not(self, status: int) -> None:
        assert asked(b"HTTP/1.1 %d X\r\n\r\n" % status) == f"/health answers with status {status}"

    @pytest.mark.parametrize("answer", [b"220 smtp\r\n", b"\r\n", b"HTTP/1.1\r\n", b"SSH-2.0-x\n"])
    def test_http_of_another_protocol_is_not(self, answer: bytes) -> None:
        assert asked(answer) == "/health does not answer: it does not speak HTTP"

    @pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK"])
    def test_http_that_ends_before_its_status_is_not(self, answer: bytes) -> None:
        assert asked(answer).startswith("/health does not answer: ")

    def test_http_that_does_not_end_its_answer_is_ready_all_the_same(self) -> None:
        assert asked(OK, hold=True) == ""

    def test_http_that_is_reset_after_its_status_is_ready_all_the_same(self) -> None:
        assert asked(b"HTTP/1.1 200 OK\r\n", reset=True) == ""

    def test_http_that_does_not_answer_in_time_is_not(self) -> None:
        why = asked(b"", hold=True, timeout=0.05)
        assert why == "http /health was not answered within 0.05 s"

    def test_http_of_any_length_is_read_to_a_limit(self) -> None:
        assert asked(OK + b"x" * 10**6) == ""
        assert asked(b"H" * 10**6).startswith("/health does not answer: ")

    @pytest.mark.parametrize(
        ("rest", "target"),
        [("/v1/x?a=b", b"/v1/x?a=b"), ("", b"/"), ("?a=b", b"/?a=b"), ("//x#y", b"//x")],
    )
    def test_http_asks_for_the_path_and_query_of_its_url(self, rest: str, target: bytes) -> None:
        lines: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            lines.extend((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n"))
            writer.write(OK)
            writer.close()

        async def main() -> tuple[int, str]:
            async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
                port = listening.sockets[0].getsockname()[1]
                return port, await ask(Probe("http", (f"http://127.0.0.1:{port}{rest}",)))

        port, why = asyncio.run(main())
        assert why == ""
        assert lines[0] == b"GET " + target + b" HTTP/1.1"
        assert f"Host: 127.0.0.1:{port}".encode() in lines

    def test_http_of_ipv6_is_asked_in_brackets(self) -> None:
        async def main() -> str:
            async with server(OK, "::1") as port:
                return await ask(Probe("http", (f"http://[::1]:{port}",)))

        assert asyncio.run(main()) == ""

    @pytest.mark.parametrize("url", ["http://fd00::1:80/", "http://[::1/", "http://h:99999/"])
    def test_http_of_no_address_is_told_and_raises_nothing(self, url: str) -> None:
        assert asyncio.run(ask(Probe("http", (url,)))).startswith(f"http {url} cannot be asked: ")

    @examples(60)
    @given(st.binary(max_size=80) | st.binary(max_size=20).map(lambda rest: b"HTTP/1.1 " + rest + b"\n"))
    @example(b"HTTP/1.1 " + b"9" * 5000 + b"\n")
    @example(b"HTTP/1.1 2\xb200 OK\n")
    def test_http_of_any_bytes_has_an_answer(self, data: bytes) -> None:
        why = asked(data)
        assert (why == "") <= data.startswith(b"HTTP/")


class TestListeners:
    def test_listeners_of_no_process_are_waited_for(self) -> None:
        port = free_port()
        for probe in (Probe("http", (f"http://127.0.0.1:{port}/",)), Probe("tcp", (f"127.0.0.1:{port}",))):
            assert asyncio.run(ask(probe)) == f"nothing listens on port {port} yet"

    @pytest.mark.starts_processes
    def test_listeners_of_the_program_are_asked_and_those_of_another_process_are_not(self) -> None:
        async def main() -> tuple[str, str]:
            other = await asyncio.create_subprocess_exec("sleep", "60")
            try:
                async with server(OK) as port:
                    probe = Probe("http", (f"http://127.0.0.1:{port}/",))
                    assert listeners_on(port) <= sockets_of(os.getpid())
                    why = await ask(probe, other.pid)
                    return await ask(probe), why.replace(str(port), "PORT")
            finally:
                other.kill()
                await other.wait()

        assert asyncio.run(main()) == ("", "another process listens on port PORT")

    @pytest.mark.starts_processes
    def test_listeners_of_a_child_of_the_program_count(self) -> None:
        async def main() -> str:
            with socket.create_server(("127.0.0.1", 0)) as sock:
                port = sock.getsockname()[1]
                # A shell with a child: only the child has the listener.
                line = "exec 3<&0 0</dev/null; sleep 60 & exec 3<&-; wait"
                shell = await asyncio.create_subprocess_exec(
                    "sh", "-c", line, stdin=sock.fileno(), start_new_session=True
                )
                sock.close()
                try:
                    async with asyncio.timeout(WAIT_TIMEOUT):
                        while not (found := listeners_on(port)) & sockets_of(shell.pid):
                            await asyncio.sleep(0.01)
                    assert found
                    return await ask(Probe("tcp", (f"127.0.0.1:{port}",)), shell.pid)
                finally:
                    os.killpg(shell.pid, 9)
                    await shell.wait()

        assert asyncio.run(main()) == ""

    @pytest.mark.starts_processes
    def test_listeners_that_have_ended_do_not_count_for_who_comes_after_them(self) -> None:
        async def main() -> tuple[str, str]:
            sock = socket.create_server(("127.0.0.1", 0))
            port = sock.getsockname()[1]
            program = await asyncio.create_subprocess_exec("sleep", "60", stdin=sock.fileno())
            sock.close()
            question = Question(worker(program.pid), Probe("tcp", (f"127.0.0.1:{port}",)))
            first = await question.ask()
            program.kill()
            await program.wait()
            with socket.create_server(("127.0.0.1", port)):
                return first, (await question.ask()).replace(str(port), "PORT")

        assert asyncio.run(main()) == ("", "another process listens on port PORT")

    def test_listeners_of_tcp_need_say_nothing(self) -> None:
        async def main() -> str:
            async with server(b"", hold=True) as port:
                return await ask(Probe("tcp", (f"127.0.0.1:{port}",)))

        assert asyncio.run(main()) == ""


class TestOutput:
    def test_output_is_searched_line_by_line_and_each_line_once(self, tmp_path: Path) -> None:
        request = replace(spawn(1, "engine", 0), logs=str(tmp_path), folder="engine")
        output = Output(request)
        assert not output.has("ready")
        (tmp_path / "engine").mkdir()
        out, err = tmp_path / "engine/stdout.log", tmp_path / "engine/stderr.log"
        out.write_text("loading\nrea")
        assert not output.has("^ready$")
        with out.open("a") as file:
            file.write("dy")
        assert output.has("^ready$")
        err.write_bytes(b"\xff\xfe startup complete\n")
        assert output.has("startup (is )?complete")
        assert not output.has("startup")

    def test_output_of_both_streams_makes_a_program_ready(self, tmp_path: Path) -> None:
        (tmp_path / "stderr.log").write_text("port open\n")
        more: dict[str, Any] = {"logs": str(tmp_path), "folder": ""}
        assert asyncio.run(ask(Probe("log", ("open$",)), **more)) == ""
        why = asyncio.run(ask(Probe("log", ("^open",)), **more))
        assert why == "no line of its output matches '^open' yet"


class TestFilesAndCommands:
    def test_files_are_searched_in_the_directory_of_the_program(self, tmp_path: Path) -> None:
        more: dict[str, Any] = {"cwd": str(tmp_path)}
        assert asyncio.run(ask(Probe("file", ("up",)), **more)) == "up does not exist yet"
        (tmp_path / "up").touch()
        assert asyncio.run(ask(Probe("file", ("up",)), **more)) == ""
        assert asyncio.run(ask(Probe("file", (str(tmp_path / "up"),)))) == ""

    @pytest.mark.starts_processes
    def test_commands_say_yes_with_0(self, tmp_path: Path) -> None:
        more: dict[str, Any] = {"cwd": str(tmp_path)}
        assert asyncio.run(ask(Probe("command", ("sh", "-c", "exit 0")), **more)) == ""
        why = asyncio.run(ask(Probe("command", ("sh", "-c", "exit 3")), **more))
        assert why == "sh ended with exit code 3"
        why = asyncio.run(ask(Probe("command", ("no-such-thing",)), **more))
        assert why == "no-such-thing cannot be executed: No such file or directory"

    @pytest.mark.starts_processes
    def test_commands_have_the_environment_and_the_directory_of_the_program(self, tmp_path: Path) -> None:
        env = {"PATH": os.environ["PATH"], "A": "b c"}
        line = f'test "$A" = "b c" && test "$PWD" = {tmp_path}'
        assert asyncio.run(ask(Probe("command", ("sh", "-c", line)), cwd=str(tmp_path), env=env)) == ""

    @pytest.mark.starts_processes
    def test_commands_that_take_too_long_are_killed_with_their_children(self, tmp_path: Path) -> None:
        probe = Probe("command", ("sh", "-c", "sleep 60 & echo $! > pid; wait"), timeout=0.3)

        async def main() -> str:
            why = await ask(probe, cwd=str(tmp_path))
            pid = int((tmp_path / "pid").read_text())
            async with asyncio.timeout(WAIT_TIMEOUT):
                while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
                    await asyncio.sleep(0.01)
            return why

        assert asyncio.run(main()).endswith("was not answered within 0.3 s")


class TestProbing:
    """Answers come until the program is ready, and those of `alive` from then on."""

    def run(self, steps: Callable[[Probing, asyncio.Queue[tuple[bool, str]]], Awaitable[None]]) -> None:
        async def main() -> None:
            said: asyncio.Queue[tuple[bool, str]] = asyncio.Queue()
            errors: list[BaseException] = []
            probing = Probing(lambda _, ok, why: said.put_nowait((ok, why)), errors.append)
            async with asyncio.timeout(WAIT_TIMEOUT):
                await steps(probing, said)
            probing.close()
            await asyncio.sleep(0)
            assert errors == []

        asyncio.run(main())

    def test_probing_asks_until_the_program_is_ready_and_then_whether_it_is_alive(
        self, tmp_path: Path
    ) -> None:
        file, other = tmp_path / "ready", tmp_path / "alive"
        watched = worker(ready=Probe("file", (str(file),)), alive=Probe("file", (str(other),), every=0.01))

        async def steps(probing: Probing, said: asyncio.Queue[tuple[bool, str]]) -> None:
            probing.watch(watched)
            assert await said.get() == (False, f"{file} does not exist yet")
            file.touch()
            while not (answer := await said.get())[0]:
                pass
            assert answer == (True, "")
            assert await said.get() == (False, f"{other} does not exist yet")
            other.touch()
            while not (await said.get())[0]:
                pass

        self.run(steps)

    def test_probing_without_alive_ends_when_the_program_is_ready(self, tmp_path: Path) -> None:
        async def steps(probing: Probing, said: asyncio.Queue[tuple[bool, str]]) -> None:
            probing.watch(worker(ready=Probe("file", (str(tmp_path),))))
            assert await said.get() == (True, "")
            await asyncio.sleep(0.1)
            assert said.empty()

        self.run(steps)

    def test_probing_asks_no_more_when_the_program_has_ended(self, tmp_path: Path) -> None:
        async def steps(probing: Probing, said: asyncio.Queue[tuple[bool, str]]) -> None:
            probing.watch(worker(ready=Probe("file", (str(tmp_path / "never"),))))
            await said.get()
            probing.forget(1)
            while not said.empty():
                said.get_nowait()
            await asyncio.sleep(0.1)
            assert said.empty()
            probing.forget(1)

        self.run(steps)
