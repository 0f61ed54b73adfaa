"""Exit codes and the report of the root cause."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest

from tests.effort import variants
from tests.waiting import WAIT_TIMEOUT

from .harness import Script, Unirun


class TestTheExitCode:
    """`test_conformance.py` has all the ways in which a worker may end; these are the command's exit codes for some."""

    @pytest.mark.parametrize(
        ("method", "code", "expected"),
        [
            ("exec", "pass", 0),
            ("fork", "import sys; sys.exit(7)", 7),
            ("exec", "import os; os.kill(os.getpid(), 9)", 137),
            ("exec", "import os; os.abort()", 134),
            ("fork", "import ctypes; ctypes.string_at(0)", 139),
            ("exec", "import atexit, os; atexit.register(os._exit, 8)", 8),
        ],
    )
    def test_the_exit_code_is_that_of_the_worker(
        self, unirun: Unirun, script: Script, method: str, code: str, expected: int
    ) -> None:
        result = unirun("--start-method", method, script(code))
        assert result.code == expected, result.err
        status = unirun.status()
        assert (status["code"], status["phase"]) == (expected, "failed" if expected else "succeeded")

    @pytest.mark.parametrize(
        ("program", "expected"),
        [(["/bin/sh", "-c", "kill -9 $$"], 137), (["./garbage"], 126)],
    )
    def test_the_exit_code_is_that_of_the_program(
        self, unirun: Unirun, program: list[str], expected: int
    ) -> None:
        garbage = unirun.root / "garbage"
        garbage.write_bytes(b"\x7fELF, almost")
        garbage.chmod(0o755)
        result = unirun("--no-python", *program)
        assert result.code == expected, result.err

    def test_the_exit_code_is_a_fatal_one_that_no_restart_follows(
        self, unirun: Unirun, script: Script
    ) -> None:
        code = script("import sys; sys.exit(77)")
        result = unirun("--max-restarts", "5", "--fatal-exit-codes", "2,77", code)
        assert (result.code, unirun.status()["roles"][0]["restarts"]) == (77, 0), result.err
        assert "no restart follows exit code 77 (--fatal-exit-codes)" in result.err


def root_cause(err: str) -> list[str]:
    """The lines of the report from the root cause on, without the command's name and indentation."""
    lines = [
        line.removeprefix("unirun: ").strip() for line in err.splitlines() if line.startswith("unirun: ")
    ]
    (start,) = (n for n, line in enumerate(lines) if line.startswith("root cause: "))
    return lines[start:]


class TestTheRootCause:
    def test_the_root_cause_is_the_first_failure_in_time(self, unirun: Unirun, script: Script) -> None:
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
        assert "its traceback is above" in cause
        assert any('File "' in line and "train.py" in line for line in result.err.splitlines())
        assert not any("unirun/launcher" in line for line in cause), (
            "frames of unirun are no news to the user"
        )
        assert cause[-2] == f"log: {unirun.job_dir()}/logs/actor/1/0/stderr.log"
        assert cause[-1].endswith(" failed, exit code 1")

    def test_the_root_cause_is_the_killed_worker_and_not_its_peers(
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

    @pytest.mark.parametrize(
        ("does", "says"),
        [
            ("os._exit(0)", "ended with exit code 0 while "),
            ("time.sleep(600)", "had not failed when actor:0,2-3 waited for a peer in vain"),
        ],
        ids=["leaves", "hangs"],
    )
    def test_the_root_cause_is_a_rank_that_its_peers_wait_for(
        self, unirun: Unirun, script: Script, does: str, says: str
    ) -> None:
        train = script(
            f"""
            import datetime, os, time, torch, torch.distributed as dist
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
            dist.barrier()
            group = dist.new_group(timeout=datetime.timedelta(seconds=2))
            if dist.get_rank() == 1:
                {does}
            while True:
                dist.all_reduce(torch.ones(1), group=group)
            """
        )
        result = unirun("--roles", "actor=4", "--max-restarts", 1, train)
        assert result.code == 5, result.err
        assert root_cause(result.err)[0].startswith("root cause: actor:1 on ")
        assert says in root_cause(result.err)[0]
        assert len(re.findall(rf"the cause of its restart: actor:1 on \S+: {says}", result.err)) == 1
        assert [row["rank"] for row in unirun.status()["failures"] if says in row["message"]] == [1, 1]

    def test_the_root_cause_is_a_rank_in_another_collective(self, unirun: Unirun, script: Script) -> None:
        train = script(
            """
            import datetime, torch, torch.distributed as dist
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
            dist.barrier()
            group = dist.new_group(timeout=datetime.timedelta(seconds=2))
            if dist.get_rank() == 2:
                dist.broadcast(torch.ones(1), 3, group=group)
            dist.all_reduce(torch.ones(1), group=group)
            """
        )
        result = unirun("--roles", "actor=4", "--max-restarts", 1, train)
        assert result.code == 5, result.err
        where = "exit code 1 (it waited in broadcast, actor:0-1,3 in all_reduce)"
        for words in ("root cause", "the cause of its restart"):
            assert re.search(rf"{words}: actor:2 on \S+: {re.escape(where)}$", result.err, re.MULTILINE), (
                result.err
            )

    @pytest.mark.parametrize("method", variants("fork", "exec"))
    @pytest.mark.parametrize("recorded", [True, False], ids=["record", "uncaught"])
    def test_the_root_cause_has_the_traceback_with_and_without_record(
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
        assert "its traceback is above" in cause
        assert result.err.count("Traceback (most recent call last):") == 1
        error = json.loads((unirun.job_dir() / "logs/default/0/0/error.json").read_text())
        assert "words in the error" in error["message"]["message"]
        extra = error["message"]["extraInfo"]
        assert int(extra["timestamp"]) > 0
        assert "in main" in extra["py_callstack"]
        log = unirun.log("default", 0, stream="stderr").decode()
        assert log.count("KeyError: 'words in the error'") >= 1

    def test_the_root_cause_shows_the_end_of_stderr_after_a_signal(
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
        assert "the end of its output:" in cause
        assert "last words 99" in cause
        assert "last words 50" not in cause

    def test_the_root_cause_shows_the_stack_of_a_segmentation_fault(
        self, unirun: Unirun, script: Script
    ) -> None:
        result = unirun(script("def deep():\n    import ctypes\n    ctypes.string_at(0)\ndeep()\n"))
        cause = root_cause(result.err)
        assert "killed by SIGSEGV" in cause[0]
        assert any("train.py" in line and "in deep" in line for line in cause), result.err

    def test_the_root_cause_of_a_single_worker_says_so(self, unirun: Unirun, script: Script) -> None:
        result = unirun("--start-method", "exec", script("raise ValueError('x')"))
        assert "(the only failure)" in result.err
        assert "other failures" not in result.err

    def test_the_root_cause_is_in_the_status(self, unirun: Unirun, script: Script) -> None:
        unirun("--start-method", "exec", script("raise ValueError('x')"))
        status = unirun.status()
        assert (
            status["reason"]
            == "default:0 ended with exit code 1; role default has no restarts (--max-restarts 0)"
        )
        assert status["roles"][0]["workers"][0]["exit"] == "exit code 1"


class TestAWorkerThatIgnoresSigterm:
    def test_a_worker_that_ignores_sigterm_is_killed_when_another_has_failed(
        self, unirun: Unirun, script: Script
    ) -> None:
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
        result = job.end(WAIT_TIMEOUT)
        assert result.code == 6, result.err
        assert root_cause(result.err)[0].startswith("root cause: a:1 on ")
        assert "a:0: did not end in its grace period and is killed" in result.err


class TestTheRootCauseInAnotherRole:
    """The ranks that fail first say that they have lost a peer."""

    def test_a_rank_that_fails_in_a_group_across_roles_is_the_cause(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            """
            import atexit, os, signal, torch, torch.distributed as dist, unirun
            ctx = unirun.init()
            group = ctx.group("actor", "rollout")
            # All come this far, also the connections.
            dist.all_reduce(torch.ones(1), group=group)
            if (ctx.role, ctx.rank) == ("rollout", 1):
                # Its peers learn it from their connections, and fail before its own end is known.
                atexit.register(lambda: (dist.destroy_process_group(), __import__("time").sleep(1.0)))
                raise ValueError("the cause")
            dist.all_reduce(torch.ones(1), group=group)
            signal.pause()
            """
        )
        result = unirun("--roles", "actor=2,rollout=2", train)
        assert result.code == 1, result.err
        cause = root_cause(result.err)
        assert cause[0].startswith("root cause: rollout:1 on ")
        assert "ValueError: the cause" in cause

    def test_a_publisher_of_weights_that_ends_with_0_too_early_is_the_cause(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            """
            import os, torch, unirun
            ctx = unirun.init()
            channel, weights = unirun.WeightsChannel("w", publisher="actor", receivers=["rollout"]), {"a": torch.zeros(4)}
            if ctx.role == "actor":
                channel.publish(weights, 1)
                # Once it is asked for the next version.
                unirun.Queue("taken", producer="rollout", consumer="actor").get()
                os._exit(0)
            channel.receive(into=weights, min_version=1)
            unirun.Queue("taken", producer="rollout", consumer="actor").put(1)
            channel.receive(into=weights, min_version=2)
            """
        )
        result = unirun("--roles", "actor=1,rollout=1", train)
        assert result.code == 1, result.err
        assert root_cause(result.err)[0].startswith("root cause: actor:0 on ")
        assert "ended with exit code 0 while rollout:0 waited for it" in root_cause(result.err)[0]


class TestAWorkerWhoseExitHandlersTakeLong:
    def test_long_exit_handlers_of_a_failed_worker_are_waited_for(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            """
            import atexit, os, time
            def upload():
                while not os.path.exists("go"):
                    time.sleep(0.01)
                print("uploaded", flush=True)
            atexit.register(upload)
            raise ValueError("x")
            """
        )
        job = unirun.start("--shutdown-timeout", 0.3, "--start-method", "exec", train)
        job.lines(r"default:0: has failed 0\.3 s ago, and its exit handlers or threads still run")
        (unirun.root / "go").touch()
        result = job.end(WAIT_TIMEOUT)
        assert (result.code, result.lines) == (1, ["uploaded"]), result.err
        assert "killed" not in root_cause(result.err)[0]

    def test_long_exit_handlers_have_the_grace_period_of_a_stop(self, unirun: Unirun, script: Script) -> None:
        train = script(
            """
            import atexit, signal
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            atexit.register(lambda: signal.sigwait([signal.SIGUSR1]))
            raise ValueError("x")
            """
        )
        job = unirun.start("--shutdown-timeout", 0.3, "--start-method", "exec", train)
        job.lines("its exit handlers or threads still run")
        job.signal(signal.SIGTERM)
        result = job.end(WAIT_TIMEOUT)
        assert result.code == 143, result.err
        assert "default:0: did not end in its grace period and is killed" in result.err
