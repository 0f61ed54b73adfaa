"""Programs beside ranks: addresses, order, readiness, restarts and the end of services, with a stub of a server."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.waiting import eventually

from .harness import Running, Unirun, alive, gone

STUB = Path(__file__).parents[1] / "testbed" / "engine.py"


def engine(*more: str, count: int = 1, **keys: Any) -> dict[str, Any]:
    """A role of stubs."""
    ready = "http://{addr}/health"
    args = [str(STUB), "--port", "{port}", *more]
    return {"program": sys.executable, "args": args, "count": count, "service": True, "ready": ready, **keys}


class Services:
    """A job of services and a primary role, which ends when it is told to."""

    def __init__(self, unirun: Unirun) -> None:
        self.unirun, self.go = unirun, unirun.root / "go"
        self.job: Running

    def start(self, roles: dict[str, Any], *options: str, **keys: Any) -> Running:
        """Start the job with these roles, after which the primary starts."""
        text = f"echo up $UNIRUN_ADDRS_ENGINE .; until [ -e {self.go} ]; do sleep 0.03; done; echo done"
        train = {"program": "bash", "args": ["-c", text], "after": [*roles], **keys.pop("train", {})}
        file = self.unirun.root / "job.yaml"
        file.write_text(yaml.safe_dump({"roles": {**roles, "train": train}, **keys}))
        self.job = self.unirun.start("--config", file, *options)
        return self.job

    def up(self) -> list[str]:
        """The addresses of the engines, once the primary runs."""
        return self.job.lines(r"up (\S*) \.$")[0].split(",")

    def end(self) -> None:
        """Let the primary end, and the job with it."""
        self.go.touch()
        assert self.job.end().code == 0

    def pid(self, who: str, incarnation: int = 0) -> int:
        """The pid of a worker once it is in this incarnation and ready."""

        def look() -> int | None:
            worker = self.unirun.workers()[who]
            ready = worker["incarnation"] == incarnation and worker["ready"]
            return int(worker["pid"]) if ready else None

        return eventually(look, f"{who} is ready in incarnation {incarnation}")


@pytest.fixture
def services(unirun: Unirun) -> Services:
    return Services(unirun)


def answer(address: str, path: str = "/health") -> int:
    """The status of the answer of a server."""
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as response:
        return int(response.status)


class TestAddresses:
    def test_each_rank_has_a_port_and_all_processes_know_the_addresses(self, services: Services) -> None:
        text = "echo file $(cat $UNIRUN_ADDRS_FILE); echo args $0 $1 $2"
        services.start(
            {"engine": engine(count=2)},
            train={
                "args": [
                    "-c",
                    f"{text}; echo env $A $RANK $OMP_NUM_THREADS; echo up $UNIRUN_ADDRS_ENGINE .",
                    "{roles.engine.addr}",
                    "{roles.engine.addrs}",
                    '{"url": "{roles.engine.host}"}',
                ],
                "env": {"A": "{roles.engine.port}"},
            },
        )
        first, second = services.up()
        assert first != second
        (args,) = services.job.lines(r"args (.*)$")
        assert args == f'{first} {first},{second} {{"url": "127.0.0.1"}}'
        assert services.job.lines(r"env(.*)$") == [f" {first.rpartition(':')[2]}"], "no RANK, no threads"
        (file,) = services.job.lines(r"file (.*)$")
        assert [(row["addr"], row["ready"]) for row in json.loads(file)["engine"]] == [
            (first, True),
            (second, True),
        ]
        assert services.job.end().code == 0

    def test_two_jobs_at_once_have_different_ports(self, services: Services, tmp_path: Path) -> None:
        other = Services(Unirun(tmp_path / "other"))
        other.unirun.root.mkdir()
        for each in (services, other):
            each.start({"engine": engine(count=4)}, port_range="21000-21040")
        addresses = [*services.up(), *other.up()]
        assert len(set(addresses)) == 8
        services.end()
        other.end()
        other.unirun.assert_nothing_left()

    def test_a_port_that_a_stranger_has_is_not_given(self, services: Services) -> None:
        with socket.create_server(("127.0.0.1", 0)) as stranger:
            port = stranger.getsockname()[1]
            services.start({"engine": engine()}, port_range=f"{port}-{port + 200}")
            assert services.up() != [f"127.0.0.1:{port}"]
            services.end()

    def test_a_job_without_a_free_port_ends_with_3_and_says_so(self, services: Services) -> None:
        with socket.create_server(("127.0.0.1", 0)) as stranger:
            port = stranger.getsockname()[1]
            services.start({"engine": engine()}, port_range=f"{port}-{port}")
            result = services.job.end()
        assert result.code == 3
        assert f"no port from {port} to {port} is free on this host; widen port_range" in result.err
        assert "is gone" not in result.err

    def test_a_port_stays_over_a_restart_and_another_is_chosen_when_a_stranger_has_taken_it(
        self, services: Services
    ) -> None:
        """
        1. The engine is killed: its successor has the same port.
        2. It is killed again, and a stranger takes the port before the next start, which is some time later: that one
           cannot bind the port, ends before it is ready, and gets another one. It costs no restart.
        """
        services.start({"engine": engine(restart_delay=2)})
        (address,) = services.up()
        os.kill(services.pid("engine:0"), signal.SIGKILL)
        pid = services.pid("engine:0", 1)
        assert services.unirun.workers()["engine:0"]["address"] == address
        os.kill(pid, signal.SIGKILL)
        assert gone(pid, 10)
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):

            def moved() -> str | None:
                worker = services.unirun.workers()["engine:0"]
                found = str(worker["address"])
                return found if worker["ready"] and found != address else None

            assert answer(eventually(moved, "the engine has another port")) == 200
        (role,) = (role for role in services.unirun.status()["roles"] if role["name"] == "engine")
        assert role["restarts"] == 2
        services.end()

    def test_the_ports_of_ipv6_are_in_brackets(self, services: Services) -> None:
        services.start(
            {"engine": engine("--host", "{host}")}, "--master-addr", "[::1]", train={"env": {"A": "x"}}
        )
        (address,) = services.up()
        assert address.startswith("[::1]:")
        services.end()


class TestReadiness:
    def test_a_role_starts_when_slow_and_flapping_servers_are_ready(self, services: Services) -> None:
        services.start({"engine": engine("--ready-after", "0.5", "--flap", "6", count=2)})
        assert len(services.up()) == 2
        assert len(services.unirun.events("ready")) >= 2
        services.end()

    def test_a_server_that_is_never_ready_ends_the_job_with_4_and_the_reason(
        self, services: Services
    ) -> None:
        services.start({"engine": engine("--never-ready", ready_timeout=1)})
        result = services.job.end()
        assert result.code == 4
        assert "engine:0 was not ready within 1 s: http://127.0.0.1:" in result.err
        assert "answers with status 503" in result.err
        assert "up" not in result.out.split()

    def test_a_server_that_dies_before_it_is_ready_is_told_with_its_last_lines(
        self, services: Services
    ) -> None:
        crash = ("--never-ready", "--crash-after", "0.1", "--exit-code", "7", "--log-line", "no such model")
        services.start({"engine": engine(*crash, max_restarts=1, restart_delay=0)})
        result = services.job.end()
        assert result.code == 5, "the budget is spent"
        assert "engine:0 ended with exit code 7 before it was ready; restart 1 of 1" in result.err
        assert "no such model" in result.out + result.err

    def test_a_server_that_cannot_be_executed_ends_the_job_at_once(self, services: Services) -> None:
        script = services.unirun.root / "serve"
        script.write_text("#!/nowhere/python\n")
        script.chmod(0o755)
        services.start({"engine": engine() | {"program": str(script)}})
        result = services.job.end()
        assert result.code == 127
        assert f"{script} cannot be executed: No such file or directory" in result.err
        assert "restart 1" not in result.err

    @pytest.mark.parametrize(
        "ready",
        [
            "tcp",
            {"log": "listen.*on"},
            {"file": "{root}/ready-{rank}"},
            {"command": ["bash", "-c", "exec 3<>/dev/tcp/{host}/{port}"]},
        ],
        ids=["tcp", "log", "file", "command"],
    )
    def test_other_probes_say_the_same(self, services: Services, ready: Any) -> None:
        root = str(services.unirun.root)
        ready = json.loads(json.dumps(ready).replace("{root}", root))
        more = ["--log-line", "they listen now on it"]
        role = engine(*more, ready=ready)
        if isinstance(ready, dict) and "file" in ready:
            text = f"touch {root}/ready-{{rank}}; exec {sys.executable} {STUB} --port {{port}}"
            role |= {"program": "bash", "args": ["-c", text]}
        services.start({"engine": role})
        services.up()
        services.end()

    def test_a_listener_of_another_process_does_not_make_a_rank_ready(self, services: Services) -> None:
        """The server that answers is a stranger's; the program does nothing."""
        with socket.create_server(("127.0.0.1", 0)) as stranger:
            port = stranger.getsockname()[1]
            idle = engine(ready=f"tcp://127.0.0.1:{port}", ready_timeout=1)
            services.start({"engine": {**idle, "program": "sleep", "args": ["60"]}})
            result = services.job.end()
        assert result.code == 4
        assert f"another process listens on port {port}" in result.err

    def test_a_role_may_start_when_one_rank_is_ready(self, services: Services) -> None:
        text = f"[ {{rank}} = 0 ] || sleep 60; exec {sys.executable} {STUB} --port {{port}}"
        role = engine(count=2) | {"program": "bash", "args": ["-c", text]}
        services.start({"engine": role}, train={"after": {"engine": 1}})
        services.up()
        status = services.unirun.workers()
        assert [status[f"engine:{rank}"]["ready"] for rank in (0, 1)] == [True, False]
        services.end()

    def test_the_output_of_a_service_is_in_its_log_only_once_it_is_ready(self, services: Services) -> None:
        role = engine("--log-line", "loading")
        services.start({"engine": role})
        (address,) = services.up()
        services.job.lines(r"^\[engine:0\] loading")
        for number in range(3):
            urllib.request.urlopen(f"http://{address}/health?{number}", timeout=10).close()
        services.go.touch()
        assert services.job.end().out.count("loading") == 1


class TestRestarts:
    def test_a_rank_restarts_alone_and_the_addresses_tell_it(self, services: Services) -> None:
        services.start({"engine": engine(count=2)})
        services.up()
        other, file = services.pid("engine:1"), services.unirun.job_dir()
        os.kill(services.pid("engine:0"), signal.SIGKILL)
        services.pid("engine:0", 1)
        assert services.pid("engine:1") == other, "it is the same process"
        (addresses,) = file.glob("addresses.*.json")

        def told() -> bool:
            rows = json.loads(addresses.read_text())["engine"]
            return [(row["incarnation"], row["ready"]) for row in rows] == [(1, True), (0, True)]

        eventually(told, "the file says that engine:0 is ready in incarnation 1")
        services.end()

    def test_the_ranks_of_a_group_start_again_together_and_have_one_address(self, services: Services) -> None:
        """Of four ranks, two are a server: the first of them listens, the second one works for it."""
        text = f"[ $(({{rank}} % 2)) = 0 ] || exec sleep 60; exec {sys.executable} {STUB} --port {{port}}"
        role = engine(count=4, group=2) | {"program": "bash", "args": ["-c", text]}
        services.start({"engine": role})
        assert len(services.up()) == 2
        before = services.unirun.workers()
        os.kill(before["engine:1"]["pid"], signal.SIGKILL)
        services.pid("engine:0", 1)
        after = services.unirun.workers()
        assert after["engine:1"]["incarnation"] == 1
        assert [after[f"engine:{rank}"]["pid"] for rank in (2, 3)] == [
            before[f"engine:{rank}"]["pid"] for rank in (2, 3)
        ]
        assert after["engine:0"]["address"] == before["engine:0"]["address"]
        services.end()

    def test_a_service_that_ends_with_0_has_failed(self, services: Services) -> None:
        services.start({"engine": engine(max_restarts=0)})
        services.up()
        os.kill(services.pid("engine:0"), signal.SIGTERM)
        result = services.job.end()
        assert result.code != 0
        assert "engine:0" in result.err
        assert "role engine has no restarts" in result.err

    def test_the_job_goes_on_without_an_optional_service(self, services: Services) -> None:
        services.start({"engine": engine(max_restarts=0, optional=True)})
        services.up()
        os.kill(services.pid("engine:0"), signal.SIGKILL)
        services.job.lines("the job goes on without it")
        services.end()

    @pytest.mark.parametrize(
        "trouble",
        [["--answer-500-after", "0.5"], ["--close-port-after", "0.5"], ["stop"]],
        ids=lambda t: t[0],
    )
    def test_a_server_that_answers_no_more_is_restarted(self, services: Services, trouble: list[str]) -> None:
        alive_probe = {"http": "http://{addr}/health", "every": 0.2, "misses": 2, "timeout": 0.5}
        more = trouble if trouble != ["stop"] else []
        services.start({"engine": engine(*more, alive=alive_probe)})
        services.up()
        if not more:
            os.kill(services.pid("engine:0"), signal.SIGSTOP)
        (line,) = services.job.lines(r"engine:0 did not answer 2 times in a row: (.*); restart 1 of 10")
        assert "http://" in line or "port" in line
        services.pid("engine:0", 1)
        services.end()


class TestTheEnd:
    def test_services_end_last_and_the_last_started_first(self, services: Services) -> None:
        text = 'trap "echo {0} $(date +%s%N) >>{1}; exit" TERM; touch {2}; while :; do sleep 0.02; done'

        def role(name: str, *after: str) -> dict[str, Any]:
            here = services.unirun.root
            body = text.format(name, here / "ends", here / f"up-{name}")
            ready = {"file": str(here / f"up-{name}")}
            keys: dict[str, Any] = {"program": "bash", "args": ["-c", body], "service": True, "ready": ready}
            return keys | ({"after": [*after]} if after else {})

        services.start({"engine": role("engine"), "router": role("router", "engine")})
        services.job.lines(r"^\S*\s*up")
        services.end()
        ends = [line.split() for line in (services.unirun.root / "ends").read_text().splitlines()]
        assert [name for name, _ in ends] == ["router", "engine"]

    def test_nothing_stays_of_a_server_that_ignores_term_and_leaks_a_child(self, services: Services) -> None:
        services.start({"engine": engine("--ignore-term", "--leak-child")}, shutdown_timeout=0.5)
        services.up()
        pid = services.pid("engine:0")
        services.end()
        assert not alive(pid)
        services.unirun.assert_nothing_left()

    def test_nothing_stays_in_shared_memory_of_a_server_that_is_killed(self, services: Services) -> None:
        text = (
            "import signal, multiprocessing as m; from multiprocessing.shared_memory import SharedMemory as S\n"
            "block, lock = S(create=True, size=4096), m.get_context('spawn').Lock()\n"
            "print('has', block.name, lock._semlock.name, flush=True); signal.pause()"
        )
        server = {"program": sys.executable, "args": ["-c", text], "service": True, "ready": {"log": "has"}}
        services.start({"engine": server})
        services.up()

        def left(incarnation: int) -> list[Path]:
            line = services.unirun.log("engine", 0, incarnation).decode().splitlines()[0]
            _, block, lock = line.split()
            found = (Path("/dev/shm", block), Path("/dev/shm", f"sem.{lock.lstrip('/')}"))
            return [path for path in found if path.exists()]

        first = services.pid("engine:0")
        assert len(left(0)) == 2
        os.kill(first, signal.SIGKILL)
        second = services.pid("engine:0", 1)
        eventually(lambda: not left(0), "its memory and its semaphore are gone")
        assert len(left(1)) == 2
        services.end()
        assert left(1) == []
        assert gone(second, 10)

    def test_the_job_ends_when_all_primaries_have_ended(self, services: Services) -> None:
        later = services.unirun.root / "later"
        text = f"until [ -e {later} ]; do sleep 0.03; done"
        evaluate = {"program": "bash", "args": ["-c", text]}
        file = services.unirun.root / "job.yaml"
        train = {"program": "true", "after": ["engine"]}
        file.write_text(yaml.safe_dump({"roles": {"engine": engine(), "train": train, "evaluate": evaluate}}))
        job = services.unirun.start("--config", file)
        job.lines("ranks of 3 roles up|logs in")
        eventually(
            lambda: "role train succeeded" in services.unirun.events("role"), "the first primary has ended"
        )
        pid = services.pid("engine:0")
        assert alive(pid)
        later.touch()
        assert job.end().code == 0
        assert gone(pid, 10)

    def test_a_killed_command_leaves_nothing(self, services: Services) -> None:
        services.start({"engine": engine("--ignore-term", count=2)})
        services.up()
        os.kill(services.job.pid, signal.SIGKILL)
        services.unirun.assert_nothing_left()


def test_a_hundred_services_of_one_host(services: Services) -> None:
    text = "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1])))\nwhile True: s.accept()"
    role = engine(count=100) | {"args": ["-S", "-c", text, "{port}"], "ready": "tcp"}
    services.start({"engine": role})
    assert len(set(services.up())) == 100
    services.end()


def test_no_process_of_a_job_without_torch_imports_it(services: Services) -> None:
    services.start({"engine": engine()})
    services.up()
    for pid in services.unirun.processes():
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    services.end()
