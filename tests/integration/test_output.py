"""Output of workers is kept and shown completely, and slow readers do not block them."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import termios
from typing import Any

import pytest

from tests.unit.launcher.foreground.screen import Screen
from tests.waiting import WAIT_TIMEOUT, eventually

from .harness import EXEC, START_TIMEOUT, Script, Unirun, gone


class TestLogFiles:
    @pytest.mark.parametrize("method", ["fork", "exec"])
    def test_log_files_have_each_stream_of_each_rank(
        self, unirun: Unirun, script: Script, method: str
    ) -> None:
        train = script(
            "import os, sys; r = os.environ['RANK']; print('out', r); print('err', r, file=sys.stderr);"
            "os.system('echo child')"
        )
        result = unirun("--start-method", method, "--roles", "a=2", train)
        assert result.code == 0, result.err
        for rank in range(2):
            assert unirun.log("a", rank) == f"out {rank}\nchild\n".encode()
            assert unirun.log("a", rank, stream="stderr") == f"err {rank}\n".encode()
        assert result.lines == ["child", "child", "out 0", "out 1"]
        assert re.findall(r"^\[a:\d\] err \d$", result.err, re.M)
        assert "[a:0] err 0" in result.err

    @pytest.mark.parametrize("method", ["fork", "exec"])
    def test_log_and_console_have_the_last_incomplete_line_of_a_killed_worker(
        self, unirun: Unirun, script: Script, method: str
    ) -> None:
        train = script("import os; print('whole'); print('half', end=''); os.kill(os.getpid(), 9)")
        result = unirun("--start-method", method, "--role", "a", train)
        assert result.code == 137
        assert unirun.log("a", 0) == b"whole\nhalf"
        assert result.out == "whole\nhalf"

    def test_log_files_may_have_a_line_of_ten_megabytes(self, unirun: Unirun, script: Script) -> None:
        size = 10_000_000
        result = unirun("--roles", "a=2", script(f"print('x' * {size})"))
        assert result.code == 0
        for rank in range(2):
            assert unirun.log("a", rank) == b"x" * size + b"\n"
        assert result.out.count("x") == 2 * size

    def test_log_and_console_have_bytes_that_are_not_utf8(self, unirun: Unirun, script: Script) -> None:
        data = b"\xff\xfe\x00 bad \xc3(\r\nnext \xf0\x9f\n"
        result = unirun(*EXEC, script(f"import sys; sys.stdout.buffer.write({data!r})"))
        assert result.code == 0
        assert unirun.log("default", 0) == data
        assert result.out == data.decode(errors="backslashreplace")

    def test_log_files_are_below_log_dir(self, unirun: Unirun, script: Script) -> None:
        where = unirun.root / "deep" / "er"
        result = unirun(*EXEC, "--log-dir", where, "--rdzv-id", "mine", "--role", "a", script("print('x')"))
        assert result.code == 0, result.err
        assert (where / "mine" / "a" / "0" / "0" / "stdout.log").read_bytes() == b"x\n"
        assert str(where / "mine") in result.err
        assert unirun.status()["logs"] == str(where / "mine")

    def test_log_files_are_replaced_by_a_second_job_of_the_same_id(
        self, unirun: Unirun, script: Script
    ) -> None:
        for word in ("first", "second"):
            assert unirun(*EXEC, "--rdzv-id", "mine", "--role", "a", script(f"print({word!r})")).code == 0
        assert unirun.log("a", 0) == b"second\n"

    def test_lines_with_a_filter_word_are_copied_to_a_log_file(self, unirun: Unirun, script: Script) -> None:
        train = script("for word in ('loss 1', 'noise', 'acc 2'): print(word)")
        result = unirun(*EXEC, "--nproc-per-node", 2, "--duplicate-stdout-filters", "loss,acc", train)
        assert result.code == 0, result.err
        (copy,) = unirun.job_dir().rglob("filtered_stdout.log")
        text = copy.read_text()
        assert (text.count("loss 1"), text.count("acc 2"), text.count("noise")) == (2, 2, 0)


class TestTheConsole:
    @pytest.mark.parametrize(
        ("options", "out", "err"),
        [
            ((), ["o0", "o1"], ["e0", "e1"]),
            (("-r", "0:3,1:1", "-t", "0:1"), ["o0"], ["e1"]),
            (("-r", "1:3", "--local-ranks-filter", "0,1"), ["o0"], ["e0"]),
        ],
    )
    def test_the_console_shows_the_requested_streams(
        self, unirun: Unirun, script: Script, options: tuple[str, ...], out: list[str], err: list[str]
    ) -> None:
        """`tests/unit/cli/test_console.py` has all options."""
        train = script(
            "import os, sys; r = os.environ['RANK']; print('o' + r); print('e' + r, file=sys.stderr)"
        )
        result = unirun(*EXEC, "--nproc-per-node", 2, *options, train)
        assert result.code == 0, result.err
        assert result.lines == out
        assert sorted(re.findall(r"^\[default:\d\] (e\d)$", result.err, re.M)) == err
        assert [unirun.log("default", rank) for rank in range(2)] == [b"o0\n", b"o1\n"]
        assert [unirun.log("default", rank, stream="stderr") for rank in range(2)] == [b"e0\n", b"e1\n"]

    def test_the_console_is_plain_without_a_terminal(self, unirun: Unirun, script: Script) -> None:
        result = unirun(*EXEC, "--nproc-per-node", 2, script("print('x')"))
        assert "\x1b" not in result.out + result.err
        assert "\r" not in result.out + result.err

    def test_a_quiet_console_shows_only_the_workers(self, unirun: Unirun, script: Script) -> None:
        result = unirun(*EXEC, "-q", script("print('x')"))
        assert (result.code, result.out, result.err) == (0, "x\n", "")

    def test_the_console_uses_torchruns_template_for_the_prefix(self, unirun: Unirun, script: Script) -> None:
        template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name}/${local_rank}> "}
        options = (*EXEC, "--role", "a", "--nproc-per-node", 2)
        result = unirun(*options, script("print('x')"), env=template)
        assert sorted(result.out.splitlines()) == ["<a/0> x", "<a/1> x"]
        own = ("--log-line-prefix-template", "${hostname}:${rank}: ")
        result = unirun(*options, *own, script("print('x')"), env=template)
        host = socket.gethostname()
        assert sorted(result.out.splitlines()) == [f"{host}:0: x", f"{host}:1: x"]

    def test_the_console_on_a_terminal_has_colours_and_a_live_line_without_a_trace(
        self, unirun: Unirun, script: Script
    ) -> None:
        width, height = 40, 10
        train = script("import os; print(os.environ['ROLE_NAME'], 'x' * 200)")
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        try:
            job = unirun.start(
                *("--roles", "actor=2,rollout=2", "--rdzv-id", "mine", train),
                read=False,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                env={"TERM": "xterm-256color", "NO_COLOR": ""},
            )
            os.close(theirs)
            text = b""
            while select.select([ours], [], [], START_TIMEOUT)[0]:
                try:
                    text += os.read(ours, 1 << 16)
                except OSError:  # the other end is closed
                    break
            assert job.end().code == 0
        finally:
            os.close(ours)
        assert re.search(rb"\x1b\[\d+m\[actor:0\] \x1b\[0mactor xxx", text), text
        assert re.search(rb"\d s  actor 0/2  rollout 0/2  ", text), text
        screen = Screen(width, height)
        screen.feed(text)
        lines = screen.lines()
        workers = {f"[{role}:{rank}] {role} {'x' * 200}" for role in ("actor", "rollout") for rank in (0, 1)}
        assert workers <= {*lines}
        notes = [line for line in lines if line not in workers]
        assert [re.sub(r"[\d.]+ s$", "", line) for line in notes] == [
            f"unirun: job mine, logs in {unirun.job_dir() / 'logs'}",
            "unirun: 4 ranks of 2 roles up after ",
            "unirun: job mine succeeded after ",
        ]

    def test_the_console_shows_events_with_torchruns_handler(self, unirun: Unirun, script: Script) -> None:
        result = unirun(*EXEC, "-q", "--event-log-handler", "console", script("print('x')"))
        events = [json.loads(line) for line in result.err.splitlines()]
        assert (result.code, result.out) == (0, "x\n")
        kinds = [event["kind"] for event in events]
        assert kinds[0] == "join"
        assert kinds[-1] == "end"
        assert len(kinds) == len((unirun.job_dir() / "events.jsonl").read_text().splitlines())

    def test_a_lost_console_with_events_does_not_end_the_job(self, unirun: Unirun, script: Script) -> None:
        ours, theirs = os.pipe()
        os.close(ours)
        job = unirun.start(*EXEC, "--event-log-handler", "console", script("print('x')"), stderr=theirs)
        os.close(theirs)
        assert job.end().code == 0


class TestAReaderThatFallsBehind:
    MEGABYTES = """
        import os, pathlib
        for n in range(20_000):
            print(f"line {n:06} " + "x" * 60)
        pathlib.Path("done" + os.environ["RANK"]).touch()
    """

    def test_a_slow_reader_never_blocks_a_worker_and_gets_everything(
        self, unirun: Unirun, script: Script
    ) -> None:
        job = unirun.start(
            *EXEC, "--nproc-per-node", 2, script(self.MEGABYTES), read=False, stderr=subprocess.DEVNULL
        )
        for rank in range(2):
            eventually((unirun.root / f"done{rank}").exists, "a worker has written all of it", START_TIMEOUT)
        eventually(lambda: all(w["exit"] for w in unirun.workers().values()), "both workers have ended")
        assert job.popen.stdout is not None
        lines = job.popen.stdout.read().splitlines()
        for rank in range(2):
            mine = [line for line in lines if line.startswith(b"[default:%d] " % rank)]
            assert [line.split()[2] for line in mine] == [b"%06d" % n for n in range(20_000)]
        assert job.end().code == 0

    def test_a_slow_reader_does_not_delay_a_signal_to_the_workers(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(self.MEGABYTES + "\n        import signal; signal.pause()\n")
        job = unirun.start(*EXEC, "--nproc-per-node", 2, train, read=False)
        for rank in range(2):
            eventually((unirun.root / f"done{rank}").exists, "a worker has written all of it", START_TIMEOUT)
        pids = [worker["pid"] for worker in unirun.workers().values()]
        job.signal(signal.SIGTERM)
        assert all(gone(pid, WAIT_TIMEOUT) for pid in pids)
        assert isinstance(job.popen, subprocess.Popen)
        out, _ = job.popen.communicate(timeout=START_TIMEOUT)
        assert out.count(b"\n") == 40_000
        assert job.end().code == 143

    def test_a_slow_reader_does_not_delay_a_signal_after_a_restart(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            """
            import os, pathlib, signal, sys
            for n in range(20_000):
                print(f"line {n:06} " + "x" * 60)
            if os.environ["UNIRUN_INCARNATION"] == "0":
                sys.exit(1)
            pathlib.Path("again").write_text(str(os.getpid()))
            while True:
                signal.pause()
            """
        )
        job = unirun.start(*EXEC, "--max-restarts", 1, train, read=False)

        def again() -> str | None:
            path = unirun.root / "again"
            return path.read_text() if path.exists() else None

        pid = int(eventually(again, "it runs again", START_TIMEOUT))
        job.signal(signal.SIGTERM)
        assert gone(pid, WAIT_TIMEOUT)
        assert isinstance(job.popen, subprocess.Popen)
        out, _ = job.popen.communicate(timeout=START_TIMEOUT)
        assert out.count(b"\n") == 40_000
        assert job.end().code == 143

    def test_a_slow_reader_delays_the_commands_end_only_until_a_signal(
        self, unirun: Unirun, script: Script
    ) -> None:
        job = unirun.start(*EXEC, script(self.MEGABYTES + "\n        raise SystemExit(3)\n"), read=False)
        eventually((unirun.root / "done0").exists, "the worker has written all of it", START_TIMEOUT)
        eventually(lambda: unirun.status()["phase"] == "failed", "the job is over", START_TIMEOUT)
        eventually(lambda: set(unirun.processes().values()) <= {"unirun"}, "its processes are gone")
        assert not gone(job.pid, 0.0)

        def interrupted() -> bool:
            job.signal(signal.SIGINT)
            return gone(job.pid, 5.0)

        # One that comes before the command knows of the end is for the job.
        eventually(interrupted, "a signal ends it")
        assert job.end(WAIT_TIMEOUT).code == 3

    def test_a_slow_reader_may_have_a_non_blocking_pipe(self, unirun: Unirun, script: Script) -> None:
        ours, theirs = os.pipe()
        os.set_blocking(theirs, False)
        job = unirun.start(
            *EXEC, script(self.MEGABYTES), read=False, stdout=theirs, stderr=subprocess.DEVNULL
        )
        os.close(theirs)
        eventually((unirun.root / "done0").exists, "the worker has written all of it", START_TIMEOUT)
        with os.fdopen(ours, "rb") as pipe:
            assert pipe.read().count(b"\n") == 20_000
        assert job.end().code == 0

    @pytest.mark.parametrize("stream", ["stdout", "stderr"])
    def test_a_reader_that_goes_away_ends_the_job_as_a_signal_does(
        self, unirun: Unirun, script: Script, stream: str
    ) -> None:
        """As ``| head`` and ``2>&1 | head``."""
        train = script(
            f"""
            import signal, sys
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(open("asked", "w").close()))
            while True:
                print("x" * 100, file=sys.{stream})
            """
        )
        options: dict[str, Any] = {"stderr": subprocess.STDOUT} if stream == "stderr" else {}
        job = unirun.start(*EXEC, "-q", "--nproc-per-node", 2, train, read=False, **options)
        assert job.popen.stdout is not None
        job.popen.stdout.readline()
        job.popen.stdout.close()
        assert job.end().code == 141
        assert (unirun.root / "asked").exists()
        status = unirun.status()
        assert (status["phase"], status["code"]) == ("stopped", 141)
        assert unirun.events("stop") == ["the reader of its output is gone"]

    def test_a_reader_of_stderr_that_goes_away_ends_nothing(self, unirun: Unirun, script: Script) -> None:
        train = script("import sys\nfor _ in range(10_000): print('x' * 100, file=sys.stderr)")
        ours, theirs = os.pipe()
        os.close(ours)
        job = unirun.start(*EXEC, train, stderr=theirs)
        os.close(theirs)
        assert job.end().code == 0

    def test_a_reader_that_goes_away_after_the_job_sets_the_exit_code(
        self, unirun: Unirun, script: Script
    ) -> None:
        job = unirun.start(*EXEC, "-q", script(self.MEGABYTES), read=False)
        eventually((unirun.root / "done0").exists, "the worker has written all of it", START_TIMEOUT)
        eventually(lambda: unirun.status()["phase"] == "succeeded", "the job is over", START_TIMEOUT)
        assert job.popen.stdout is not None
        job.popen.stdout.close()
        assert job.end().code == 141
        assert unirun.status()["code"] == 0


class TestALot:
    def test_many_lines_of_eight_ranks_are_all_shown(self, unirun: Unirun, script: Script) -> None:
        """At 100 000 lines a second in total, or as fast as the machine can."""
        train = script(
            """
            import os, sys, time
            rank = os.environ["RANK"]
            began = time.perf_counter()
            for n in range(10_000):
                sys.stdout.write(f"{rank} {n}\\n")
                if n % 125 == 0:
                    time.sleep(max(0.0, began + n / 12_500 - time.perf_counter()))
            """
        )
        result = unirun("--roles", "actor=4,rollout=4", train)
        assert result.code == 0, result.err
        expected = "".join(f"{{rank}} {n}\n" for n in range(10_000))
        shown: dict[str, list[str]] = {}
        for line in result.out.splitlines(keepends=True):
            head, _, rest = line.partition("] ")
            shown.setdefault(head[1:], []).append(rest)
        assert len(shown) == 8
        for role in ("actor", "rollout"):
            for rank in range(4):
                mine = expected.replace("{rank}", str(rank))
                assert unirun.log(role, rank).decode() == mine
                assert "".join(shown[f"{role}:{rank}"]) == mine
