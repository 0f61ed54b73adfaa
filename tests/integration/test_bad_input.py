"""Mistakes of users: each has a message with a remedy, and the right exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.effort import variants
from tests.waiting import WAIT_TIMEOUT
from unirun.failover.diagnosis import OOM_KILLED
from unirun.launcher.notes import PERHAPS

from .harness import EXEC, Script, Unirun, alive, gone


class TestACommandLine:
    """`tests/unit/cli/test_refusals.py` has all invalid command lines and job files."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                ("--role", "rollout", "--env", "rolout:K=V", "train.py"),
                "--env: no role is called 'rolout'; did you mean 'rollout'?",
            ),
            (("--config", "job.yaml"), "max_restart: unknown key; did you mean 'max_restarts'?"),
        ],
    )
    def test_an_invalid_command_line_is_refused_in_one_line(
        self, unirun: Unirun, script: Script, arguments: tuple[str, ...], message: str
    ) -> None:
        script("print('never')")
        script("{script: train.py, max_restart: 1}", "job.yaml")
        result = unirun(*arguments)
        assert (result.code, result.out) == (2, ""), result.err
        (line,) = result.err.splitlines()
        assert line.startswith("unirun: ")
        assert message in line
        assert not (unirun.home / "jobs").exists(), "nothing is made for a job that cannot be"


class TestAnAddress:
    @pytest.mark.parametrize("address", ["203.0.113.7", "no.such.host.invalid"])
    def test_a_master_addr_of_another_host_ends_the_command_with_4(
        self, unirun: Unirun, script: Script, address: str
    ) -> None:
        result = unirun("--master-addr", address, script("print('never')"))
        (line,) = result.err.splitlines()
        assert (result.code, result.out) == (4, "")
        assert address in line
        assert "see --master-addr" in line

    def test_a_taken_master_port_ends_the_command_with_4(self, unirun: Unirun, script: Script) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            logs = unirun.root / "logs"
            result = unirun("--master-port", port, "--log-dir", logs, script("print('never')"))
        (line,) = result.err.splitlines()
        assert (result.code, result.out) == (4, "")
        assert line == (
            f"unirun: 127.0.0.1:{port} cannot be listened on: address already in use; "
            "leave out --master-port to get a free one"
        )
        assert not [*(unirun.home / "jobs").iterdir()], "no job is left"
        assert not [*logs.iterdir()], "no folder of the job is left"


class TestAnId:
    def test_the_id_of_a_running_job_is_refused(self, unirun: Unirun, script: Script) -> None:
        train = script("import signal; print('up'); signal.pause()")
        job = unirun.start(*EXEC, "--rdzv-id", "mine", train)
        job.lines("up$")
        second = unirun(*EXEC, "--rdzv-id", "mine", train)
        assert (second.code, second.err) == (
            2,
            "unirun: job mine is running; stop it with: unirun stop mine\n",
        )
        job.signal(signal.SIGTERM)
        assert job.end(WAIT_TIMEOUT).code == 143

    def test_an_empty_job_id_is_replaced_by_a_generated_one(self, unirun: Unirun, script: Script) -> None:
        result = unirun(*EXEC, "--rdzv-id=", script("print('ran')"))
        assert result.code == 0, result.err
        assert unirun.job_dir().name.startswith("train-")


class TestAHome:
    def test_an_unwritable_unirun_home_is_an_error(self, unirun: Unirun, script: Script) -> None:
        (unirun.root / "file").write_text("")
        result = unirun(script(""), env={"UNIRUN_HOME": str(unirun.root / "file")})
        (line,) = result.err.splitlines()
        assert (result.code, "set UNIRUN_HOME to a directory that you may write" in line) == (2, True), line

    def test_a_unirun_home_with_a_very_long_path_works(self, unirun: Unirun, script: Script) -> None:
        home = unirun.root.joinpath(*["d" * 100] * 3)
        result = unirun(
            *EXEC, script("import unirun; print(unirun.init().rank)"), env={"UNIRUN_HOME": str(home)}
        )
        assert (result.code, result.out) == (0, "0\n"), result.err


class TestAScriptThatFailsAtOnce:
    @pytest.mark.parametrize("method", ["fork", "exec"])
    @pytest.mark.parametrize(
        ("text", "message", "ours"),
        [
            ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'", False),
            ("def f(:\n    pass", "SyntaxError: ", True),
            ("\n   x = 1", "IndentationError: unexpected indent", True),
        ],
    )
    def test_a_script_that_fails_at_once_is_reported_like_python_does(
        self, unirun: Unirun, script: Script, text: str, message: str, ours: bool, method: str
    ) -> None:
        path = script("")
        path.write_text(text)
        # A script that could not be begun is not started again.
        result = unirun("--start-method", method, "--nproc-per-node", 2, "--max-restarts", int(ours), path)
        assert result.code == 1
        report = result.err[result.err.index("unirun: root cause:") :]
        assert message in report
        assert f'File "{path}", line' in result.err
        assert "unirun/launcher" not in result.err
        # A traceback is shown once for each rank that has it.
        assert ("Traceback" in result.err) != ours
        assert "Traceback" not in report

    def test_a_missing_module_of_a_role_is_named_before_anything_starts(self, unirun: Unirun) -> None:
        result = unirun("--max-restarts", 3, "-m", "no_such_package.job")
        assert (result.code, "there is no module 'no_such_package'" in result.err) == (2, True), result.err
        assert "job" not in result.err.partition("no_such_package")[0]


class TestAWorkloadThatCannotStart:
    """It is not restarted, as it would fail in the same way."""

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("Importing", "ModuleNotFoundError: No module named 'no_such_module'"),
            ("Bare", "Bare.__init__() takes 1 positional argument but 3 were given"),
        ],
    )
    def test_a_workload_that_cannot_start_ends_the_job_with_its_code_and_one_report(
        self, unirun: Unirun, script: Script, name: str, message: str
    ) -> None:
        script(
            """
            import unirun

            class Importing(unirun.BaseWorkload):
                def setup(self):
                    import no_such_module

            class Bare(unirun.BaseWorkload):
                def __init__(self):
                    pass
            """,
            "play.py",
        )
        result = unirun("--roles", f"actor=1@play:{name}", "--transport", "socket")
        assert (result.code, "restart 1 of" in result.err) == (1, False), result.err
        report = result.err[result.err.index("unirun: job failed") :]
        assert "with an error that a restart cannot mend" in report
        assert message in report
        # The worker's own words, and the report.
        assert result.err.count(message) == 2


class TestASpawner:
    @pytest.mark.parametrize("restarts", [0, 1])
    def test_a_spawner_that_cannot_import_a_module_ends_the_job_and_names_it(
        self, unirun: Unirun, script: Script, restarts: int
    ) -> None:
        result = unirun("--preload", "no_such_module", "--max-restarts", restarts, script("print('never')"))
        assert result.code in (1, 5), result.err
        assert result.out == ""
        assert "no_such_module" in result.err
        assert "No module named 'no_such_module'" in result.err

    def test_a_spawner_that_crashes_in_an_import_ends_the_job_with_a_reason(
        self, unirun: Unirun, script: Script
    ) -> None:
        script("import os; os.kill(os.getpid(), 11)", "crash.py")
        result = unirun("--preload", "crash", script(""), env={"PYTHONPATH": str(unirun.root)})
        assert result.code != 0
        assert "killed by SIGSEGV" in result.err, result.err


class TestAWorkerThatClosesItsLink:
    @pytest.mark.parametrize("method", ["fork", "exec"])
    def test_a_worker_that_closes_its_link_continues_and_is_reported(
        self, unirun: Unirun, script: Script, method: str
    ) -> None:
        train = script(
            """
            import os, signal, sys
            os.closerange(3, 4096)
            signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))
            print("up", os.getpid(), flush=True)
            signal.pause()
            """
        )
        job = unirun.start("--role", "a", "--start-method", method, train)
        (pid,) = job.lines(r"up (\d+)")
        job.lines("a:0: closed its link to the agent and runs on; only its exit can be seen now")
        assert alive(int(pid))
        os.kill(int(pid), signal.SIGUSR1)
        assert job.end().code == 3

    @pytest.mark.parametrize("method", variants("exec", "fork"))
    def test_a_worker_that_closes_its_link_after_init_continues_when_descriptors_are_reused(
        self, unirun: Unirun, script: Script, method: str
    ) -> None:
        train = script(
            """
            import os, signal, socket, sys
            signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))
            if os.environ["ROLE_NAME"] == "a":
                import unirun
                unirun.init()
                os.closerange(3, 4096)
                kept = [socket.socketpair() for _ in range(8)]
                for ours, theirs in kept:
                    theirs.send(b"for the script alone")
            print("up", os.environ["ROLE_NAME"], os.environ["UNIRUN_INCARNATION"], os.getpid(), flush=True)
            while True:
                signal.pause()
            """
        )
        job = unirun.start("--roles", "a=1,b=1", "--max-restarts", "b=1", "--start-method", method, train)
        (ours,) = job.lines(r"up a 0 (\d+)")
        (other,) = job.lines(r"up b 0 (\d+)")
        os.kill(int(other), signal.SIGUSR1)
        job.lines("up b 1")
        assert not gone(int(ours), 0.5)
        os.kill(int(ours), signal.SIGUSR1)
        assert job.end().code == 3

    def test_a_worker_that_closed_its_link_still_has_its_error_in_the_report(
        self, unirun: Unirun, script: Script
    ) -> None:
        result = unirun("-q", "-r", 3, script("import os; os.closerange(3, 4096); raise ValueError('words')"))
        assert (result.code, "ValueError: words" in result.err) == (1, True), result.err

    def test_a_worker_that_closed_its_link_ends_with_the_agent(self, unirun: Unirun, script: Script) -> None:
        job = unirun.start(
            script("import os, signal; os.closerange(3, 4096); print('up', os.getpid()); signal.pause()")
        )
        (pid,) = job.lines(r"up (\d+)")
        os.kill(unirun.pid_of("unirun-agent"), signal.SIGKILL)
        assert gone(int(pid), WAIT_TIMEOUT)
        assert job.end().code == 137


class TestAWorkerThatTalksNonsense:
    def test_garbage_on_the_agents_socket_is_refused_and_does_not_end_the_job(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            """
            import os, socket
            folder, name = os.path.split(os.environ["UNIRUN_SOCKET"])
            os.chdir(folder)  # an address has 107 bytes at most
            for data in (b"", b"x" * 100_000, bytes(64)):
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(name)
                    sock.recv(1)
                    try:
                        sock.sendall(data)
                    except OSError:
                        pass
            print("done")
            """
        )
        result = unirun(*EXEC, train)
        assert (result.code, result.out) == (0, "done\n"), result.err
        assert "was refused" in result.err


class TestMemoryThatRunsOut:
    LIMIT = 64 << 20

    @pytest.fixture
    def small_memory(self) -> Iterator[Path | None]:
        """A control group with little memory, None where it cannot be created."""
        for root, name in (
            (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
            (Path("/sys/fs/cgroup"), "memory.max"),
        ):
            group = root / f"unirun-test-{os.getpid()}"
            try:
                group.mkdir()
            except OSError:
                continue
            try:
                (group / name).write_text(str(self.LIMIT))
                yield group
                return
            except OSError:
                continue
            finally:
                with contextlib.suppress(OSError):
                    group.rmdir()
        yield None

    def test_out_of_memory_is_named_as_the_cause(
        self, unirun: Unirun, script: Script, small_memory: Path | None
    ) -> None:
        enter = (
            f"open({str(small_memory / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
            if small_memory
            else ("import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30,) * 2)")
        )
        train = script(
            f"""
            import os, signal
            if os.environ["RANK"] == "1":
                {enter}
                kept = [bytes(4096) * 256 for _ in range(4000)]
            signal.pause()
            """
        )
        result = unirun(*EXEC, "--roles", "actor=2", train)
        if small_memory is None:
            # Where the kernel cannot be brought to it, Python itself has to find that there is no more.
            assert (result.code, "MemoryError" in result.err) == (1, True), result.err
            return
        assert result.code == 137, result.err
        report = result.err[result.err.index("unirun: root cause: actor:1") :]
        assert "killed by SIGKILL" in report
        # It is counted for a group that is not the agent's. The kernel's log, if it may be read, names the process.
        assert OOM_KILLED in report or PERHAPS in report

    def test_out_of_memory_is_not_reported_for_another_sigkill(self, unirun: Unirun, script: Script) -> None:
        result = unirun(*EXEC, script("import os; os.kill(os.getpid(), 9)"))
        assert (result.code, "out of memory" in result.err) == (137, False)
