"""Exit codes, the root cause report, signals, and that whole process groups end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from .harness import SOON, Unirun, alive, eventually

Script = Callable[..., Path]

PAUSE = "import signal; print('up', flush=True); signal.pause()"

STUBBORN = """
    import signal
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    print("up", flush=True)
    while True:
        signal.pause()
"""


CHILDREN = """\
import os, signal, subprocess, sys
code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
for own in (False, True):
    child = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", code], start_new_session=own, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    print(f"child {child.pid}\\n", end="")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        # In one write: its parent writes to the same file.
        print(f"child {os.getpid()}\\n", end="", flush=True)
        while True:
            signal.pause()
    os._exit(0)
os.wait()
print("up\\n", end="", flush=True)
"""


def root_cause(err: str) -> list[str]:
    """The lines of the report from the root cause on, without the command's name and indentation."""
    lines = [
        line.removeprefix("unirun: ").strip() for line in err.splitlines() if line.startswith("unirun: ")
    ]
    (start,) = (n for n, line in enumerate(lines) if line.startswith("root cause: "))
    return lines[start:]


class TestTheExitCode:
    @pytest.mark.parametrize(
        ("method", "code", "expected"),
        [
            ("exec", "pass", 0),
            ("exec", "import sys; sys.exit()", 0),
            ("exec", "import sys; sys.exit(7)", 7),
            ("fork", "import sys; sys.exit(7)", 7),
            ("exec", "import sys; sys.exit(256 + 7)", 7),
            ("exec", "raise SystemExit('words')", 1),
            ("fork", "raise SystemExit('words')", 1),
            ("exec", "1 / 0", 1),
            ("fork", "1 / 0", 1),
            ("exec", "import os; os._exit(7)", 7),
            ("fork", "import os; os._exit(7)", 7),
            ("exec", "import os; os.kill(os.getpid(), 9)", 137),
            ("fork", "import os; os.kill(os.getpid(), 9)", 137),
            ("exec", "import os; os.kill(os.getpid(), 15)", 143),
            ("fork", "import os; os.kill(os.getpid(), 15)", 143),
            ("exec", "import os; os.abort()", 134),
            ("exec", "import ctypes; ctypes.string_at(0)", 139),
            ("fork", "import ctypes; ctypes.string_at(0)", 139),
            ("exec", "raise KeyboardInterrupt", 130),
            ("exec", "import atexit, os; atexit.register(os._exit, 8)", 8),
            ("fork", "import atexit, os; atexit.register(os._exit, 8)", 8),
        ],
    )
    def test_is_the_workers_own(
        self, unirun: Unirun, script: Script, method: str, code: str, expected: int
    ) -> None:
        result = unirun("--start-method", method, script(code))
        assert result.code == expected, result.err
        status = unirun.status()
        assert (status["code"], status["phase"]) == (expected, "failed" if expected else "succeeded")

    @pytest.mark.parametrize(
        ("program", "expected"),
        [(["/bin/sh", "-c", "exit 7"], 7), (["/bin/sh", "-c", "kill -9 $$"], 137), (["./garbage"], 126)],
    )
    def test_is_the_programs_own(self, unirun: Unirun, program: list[str], expected: int) -> None:
        garbage = unirun.root / "garbage"
        garbage.write_bytes(b"\x7fELF, almost")
        garbage.chmod(0o755)
        result = unirun("--no-python", *program)
        assert result.code == expected, result.err


class TestTheRootCause:
    def test_is_the_first_failure_in_time(self, unirun: Unirun, script: Script) -> None:
        train = script(
            """
            import os, signal, sys
            if os.environ["RANK"] == "1":
                raise ValueError("the cause")
            def on_term(*_):
                raise RuntimeError("a consequence")
            signal.signal(signal.SIGTERM, on_term)
            signal.pause()
            """
        )
        result = unirun("--roles", "actor=3", "--start-method", "exec", train)
        assert result.code == 1
        cause = root_cause(result.err)
        assert cause[0].startswith("root cause: actor:1 on ")
        assert ": exit code 1 (the " in cause[0]
        assert "ValueError: the cause" in cause
        assert any(line.startswith('File "') and "train.py" in line for line in cause)
        assert not any("unirun/launcher" in line for line in cause), (
            "frames of unirun are no news to the user"
        )
        assert cause[-2] == f"log: {unirun.job_dir()}/logs/actor/1/0/stderr.log"
        assert cause[-1].endswith(" failed, exit code 1")

    def test_is_the_killed_worker_and_not_the_peers_that_lost_it(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            """
            import os, torch, torch.distributed as dist
            dist.init_process_group("gloo")
            dist.barrier()
            if dist.get_rank() == 2:
                os.kill(os.getpid(), 9)
            while True:
                dist.all_reduce(torch.ones(1))
            """
        )
        result = unirun("--roles", "actor=4", train)
        assert result.code == 137, result.err
        assert root_cause(result.err)[0].startswith("root cause: actor:2 on ")
        assert "killed by SIGKILL" in root_cause(result.err)[0]

    @pytest.mark.parametrize("method", ["fork", "exec"])
    @pytest.mark.parametrize("recorded", [True, False], ids=["record", "uncaught"])
    def test_has_the_traceback_with_record_and_without(
        self, unirun: Unirun, script: Script, recorded: bool, method: str
    ) -> None:
        head = (
            "from torch.distributed.elastic.multiprocessing.errors import record"
            if recorded
            else "record = lambda f: f"
        )
        train = script(f"{head}\n@record\ndef main():\n    raise KeyError('words in the error')\nmain()\n")
        result = unirun("--start-method", method, train)
        assert result.code == 1
        cause = root_cause(result.err)
        assert cause.count("KeyError: 'words in the error'") == 1
        assert "Traceback (most recent call last):" in cause
        error = json.loads((unirun.job_dir() / "logs/default/0/0/error.json").read_text())
        assert "words in the error" in error["message"]["message"]
        extra = error["message"]["extraInfo"]
        assert int(extra["timestamp"]) > 0
        assert "in main" in extra["py_callstack"]
        log = unirun.log("default", 0, stream="stderr").decode()
        assert log.count("KeyError: 'words in the error'") >= 1

    def test_shows_the_end_of_stderr_when_a_signal_left_no_traceback(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            """
            import os, sys
            for n in range(100):
                print("last words", n, file=sys.stderr)
            os.kill(os.getpid(), 9)
            """
        )
        result = unirun("--start-method", "exec", "-q", "-r", 3, train)
        cause = root_cause(result.err)
        assert "the end of its stderr:" in cause
        assert "last words 99" in cause
        assert "last words 50" not in cause

    def test_shows_where_a_segmentation_fault_was(self, unirun: Unirun, script: Script) -> None:
        result = unirun(script("def deep():\n    import ctypes\n    ctypes.string_at(0)\ndeep()\n"))
        cause = root_cause(result.err)
        assert "killed by SIGSEGV" in cause[0]
        assert any("train.py" in line and "in deep" in line for line in cause), result.err

    def test_of_one_worker_says_so(self, unirun: Unirun, script: Script) -> None:
        result = unirun("--start-method", "exec", script("raise ValueError('x')"))
        assert "(the only failure)" in result.err
        assert "other failures" not in result.err

    def test_is_in_the_status_too(self, unirun: Unirun, script: Script) -> None:
        unirun("--start-method", "exec", script("raise ValueError('x')"))
        status = unirun.status()
        assert (
            status["reason"]
            == "default:0 ended with exit code 1; role default has no restarts (--max-restarts 0)"
        )
        assert status["roles"][0]["workers"][0]["exit"] == "exit code 1"


class TestASignalToTheCommand:
    @pytest.mark.parametrize(
        ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
    )
    def test_stops_the_workers_and_is_the_exit_code(
        self, unirun: Unirun, script: Script, signum: signal.Signals, code: int
    ) -> None:
        train = script(
            """
            import os, signal, sys
            def leave(number, _):
                print("got", signal.Signals(number).name, os.environ["RANK"], flush=True)
                sys.exit()
            for name in ("SIGTERM", "SIGINT", "SIGHUP"):
                signal.signal(getattr(signal, name), leave)
            print("up", flush=True)
            signal.pause()
            """
        )
        job = unirun.start("--roles", "a=2", "--start-method", "exec", train)
        job.lines("up$", 2)
        job.signal(signum)
        result = job.end()
        assert result.code == code, result.err
        assert [line for line in result.lines if line != "up"] == [f"got {signum.name} {n}" for n in range(2)]
        assert (unirun.status()["phase"], unirun.status()["code"]) == ("stopped", code)
        assert "root cause" not in result.err

    def test_ends_a_worker_that_raises_keyboard_interrupt_without_a_report(
        self, unirun: Unirun, script: Script
    ) -> None:
        job = unirun.start("--roles", "a=2", script(PAUSE))
        job.lines("up$", 2)
        job.signal(signal.SIGINT)
        result = job.end()
        assert (result.code, unirun.status()["phase"]) == (130, "stopped"), result.err
        assert "root cause" not in result.err

    def test_is_followed_by_sigkill_after_the_grace_period(self, unirun: Unirun, script: Script) -> None:
        job = unirun.start(
            "--roles", "a=2", "--shutdown-timeout", 0.5, "--start-method", "exec", script(STUBBORN)
        )
        job.lines("up$", 2)
        job.signal(signal.SIGTERM)
        result = job.end(SOON)
        assert result.code == 143
        assert result.err.count("did not end in its grace period and is killed") == 2

    def test_that_comes_twice_kills_at_once(self, unirun: Unirun, script: Script) -> None:
        job = unirun.start(
            "--roles", "a=2", "--shutdown-timeout", 600, "--start-method", "exec", script(STUBBORN)
        )
        job.lines("up$", 2)
        job.signal(signal.SIGINT)
        job.lines("SIGINT: stopping")
        job.signal(signal.SIGINT)
        assert job.end(SOON).code == 130

    def test_while_the_job_ends_by_itself_is_the_first_of_two(self, unirun: Unirun, script: Script) -> None:
        slow = """
            import os, signal, sys, time
            def stop(*_):
                print("asked", flush=True)
                while not os.path.exists("go"):
                    time.sleep(0.01)
                print("cleaned up", flush=True)
                sys.exit(0)
            signal.signal(signal.SIGTERM, stop)
            print("up", flush=True)
            signal.pause()
        """
        lead = script("import time, os\nwhile not os.path.exists('up'): time.sleep(0.01)", "lead.py")
        argv = [
            "--roles",
            "lead=1,slow=1",
            "--primary",
            "lead",
            "--script",
            f"slow={script(slow, 'slow.py')}",
        ]
        job = unirun.start(*argv, lead)
        job.lines(r"\] up")
        (unirun.root / "up").touch()
        job.lines(r"\] asked")
        job.signal(signal.SIGINT)
        job.lines("SIGINT: stopping; SIGKILL follows")
        (unirun.root / "go").touch()
        end = job.end(SOON)
        assert end.code == 0
        assert "cleaned up" in end.out

    def test_before_the_workers_are_there_ends_the_job(self, unirun: Unirun, script: Script) -> None:
        job = unirun.start("--roles", "a=2", script(PAUSE))
        job.lines("logs in")
        job.signal(signal.SIGINT)
        result = job.end(SOON)
        assert (result.code, unirun.status()["phase"]) == (130, "stopped"), result.err

    def test_that_nohup_ignores_is_ignored(self, unirun: Unirun, script: Script) -> None:
        job = unirun.start(
            *("--start-method", "exec", script(PAUSE)),
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        )
        job.lines("up$")
        job.signal(signal.SIGHUP)
        job.signal(signal.SIGTERM)
        assert job.end(SOON).code == 143

    def test_can_be_chosen(self, unirun: Unirun, script: Script) -> None:
        train = script(
            "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(print('saved')));"
            "print('up', flush=True); signal.pause()"
        )
        job = unirun.start("--signals-to-handle", "SIGUSR1,SIGTERM", "--start-method", "exec", train)
        job.lines("up$")
        job.signal(signal.SIGUSR1)
        result = job.end(SOON)
        assert (result.code, result.lines) == (128 + signal.SIGUSR1, ["saved", "up"])


class TestWholeProcessGroups:
    @pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
    def test_end_with_their_worker(self, unirun: Unirun, script: Script, end: str, code: int) -> None:
        job = unirun.start("--roles", "a=2", "--start-method", "exec", script(CHILDREN + end))
        result = job.end()
        assert result.code == code, result.err
        pids = [int(line.split()[1]) for line in result.lines if line.startswith("child")]
        assert pids
        assert not any(map(alive, pids))

    @pytest.mark.parametrize("method", ["fork", "exec"])
    def test_end_when_the_job_is_stopped(self, unirun: Unirun, script: Script, method: str) -> None:
        job = unirun.start("--roles", "a=2", "--start-method", method, script(CHILDREN + "signal.pause()"))
        job.lines("up$", 2)
        pids = [int(pid) for pid in job.lines(r"child (\d+)", 6)]
        job.signal(signal.SIGTERM)
        assert job.end(SOON).code == 143
        assert not any(map(alive, pids))

    def test_end_when_a_child_has_no_environment(self, unirun: Unirun, script: Script) -> None:
        train = script(
            """
            import subprocess
            child = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env={})
            print("child", child.pid, flush=True)
            """
        )
        result = unirun("--roles", "a=2", "--start-method", "exec", train)
        pids = [int(line.split()[1]) for line in result.lines]
        assert (result.code, len(pids), any(map(alive, pids))) == (0, 2, False), result.err

    def test_leave_the_other_workers_alone(self, unirun: Unirun, script: Script) -> None:
        train = script(
            """
            import os, signal, subprocess, sys
            child = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
            signal.signal(signal.SIGUSR1, lambda *_: sys.exit(child.poll() is not None))
            print("up", os.environ["ROLE_NAME"], os.getpid(), child.pid, flush=True)
            if os.environ["ROLE_NAME"] == "other":
                signal.pause()
            """
        )
        job = unirun.start("--roles", "short=1,other=1", "--start-method", "exec", train)
        (pids,) = job.lines(r"up other (\d+ \d+)")
        job.lines("up short")
        worker, child = map(int, pids.split())
        eventually(lambda: unirun.workers()["short:0"]["phase"] == "exited", "short:0 has ended")
        assert alive(child)
        os.kill(worker, signal.SIGUSR1)
        assert job.end().code == 0


class TestAWorkerThatIgnoresSigterm:
    def test_is_killed_when_another_has_failed(self, unirun: Unirun, script: Script) -> None:
        train = script(
            """
            import os, signal, sys
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGUSR1, lambda *_: sys.exit(6))
            print("up", os.environ["RANK"], os.getpid(), flush=True)
            while True:
                signal.pause()
            """
        )
        job = unirun.start("--roles", "a=3", "--shutdown-timeout", 0.3, "--start-method", "exec", train)
        job.lines("up", 3)
        (pid,) = job.lines(r"up 1 (\d+)")
        os.kill(int(pid), signal.SIGUSR1)
        result = job.end(SOON)
        assert result.code == 6, result.err
        assert root_cause(result.err)[0].startswith("root cause: a:1 on ")
        assert "a:0: did not end in its grace period and is killed" in result.err
