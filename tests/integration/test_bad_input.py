"""What a user may get wrong: each has a message that says what to do, and the right exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import EXEC, SOON, Script, Unirun, alive, gone

ROLES = ("--roles", "actor=1,rollout=1")


class TestACommandLine:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ((*ROLES, "--env", "rolout:K=V"), "--env: no role is called 'rolout'; did you mean 'rollout'?"),
            ((*ROLES, "--script", "actr=x.py"), "--script: no role is called 'actr'; did you mean 'actor'?"),
            (
                (*ROLES, "--max-restarts", "critic=1"),
                "--max-restarts: no role is called 'critic'; known: actor, rollout",
            ),
            (
                (*ROLES, "--nproc-per-node", "acter=2"),
                "--nproc-per-node: no role is called 'acter'; did you mean 'actor'?",
            ),
            ((*ROLES, "--cwd", "acter=."), "--cwd: no role is called 'acter'; did you mean 'actor'?"),
            ((*ROLES, "--primary", "actors"), "primary: no role is called 'actors'; did you mean 'actor'?"),
            (("--roles", "actor=0"), "roles.actor.count: expected a number from 1 to 1000000, found 0"),
            (("--roles", "actor=-2"), "roles.actor.count: expected a number from 1 to 1000000, found -2"),
            (("--roles", "actor=two"), "roles.actor.count: expected a whole number, found 'two'"),
            (
                ("--roles", "actor=1,actor=2"),
                "--roles: role 'actor' is there twice; give each role one name and number",
            ),
            (
                ("--roles", "2actor=1"),
                "roles.2actor: '2actor' is no name for a role; a letter, then letters,",
            ),
            (("--nproc-per-node", "gpu"), "has no GPU; use a number, 'cpu' or 'auto'"),
            (("--max-restarts", "-1"), "max_restarts: expected a number from 0"),
            (("--env", "K"), "--env: 'K' has no value; write K=V or ROLE:K=V"),
            (("--env", "RANK=3"), "env.RANK: unirun sets this for every worker itself"),
            (("--start-method", "thread"), "--start-method: invalid choice: 'thread'"),
            (("--no-such-option",), "unknown option --no-such-option"),
            (("--max-restart-s", "1"), "unknown option --max-restart-s; did you mean '--max-restarts'?"),
            (("--config", "missing.yaml"), "missing.yaml: cannot be read: no such file or directory"),
            (("--cwd", "nowhere"), "roles.default.cwd: 'nowhere' is no directory"),
            (("--roles", "a=1@pkg.mod:Class"), "each has an entry of its own"),
        ],
    )
    def test_that_cannot_be_meant_is_refused_in_one_line(
        self, unirun: Unirun, script: Script, options: tuple[str, ...], message: str
    ) -> None:
        # With an empty mask a machine with GPUs has none either.
        result = unirun(*options, script("print('never')"), env={"CUDA_VISIBLE_DEVICES": ""})
        assert (result.code, result.out) == (2, ""), result.err
        (line,) = result.err.splitlines()
        assert line.startswith("unirun: ")
        assert message in line
        assert not (unirun.home / "jobs").exists(), "nothing is made for a job that cannot be"

    def test_names_everything_that_is_wrong_at_once(self, unirun: Unirun, script: Script) -> None:
        result = unirun("--roles", "actor=0,rollout=x", "--cwd", "nowhere", script(""))
        assert result.code == 2
        assert len(result.err.splitlines()) == 4

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("missing.py", "script 'missing.py' does not exist; looked in "),
            ("folder", "script 'folder' is a directory; name the file in it"),
        ],
    )
    def test_whose_script_is_no_file_is_refused(self, unirun: Unirun, name: str, message: str) -> None:
        (unirun.root / "folder").mkdir()
        result = unirun(name)
        (line,) = result.err.splitlines()
        assert (result.code, message in line) == (2, True), line

    def test_whose_program_is_nowhere_is_refused(self, unirun: Unirun) -> None:
        result = unirun("--no-python", "no-such-program")
        (line,) = result.err.splitlines()
        assert (result.code, "program 'no-such-program' is not found" in line) == (2, True), line


class TestAJobFile:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("roles: {actor: {count: many}}", "roles.actor.count: expected a whole number, found 'many'"),
            ("roles: [actor]", "roles: expected a mapping with names as keys, found ['actor']"),
            (
                "roles: {actor: {count: 1, scirpt: x.py}}",
                "roles.actor.scirpt: unknown key; did you mean 'script'?",
            ),
            ("max_restart: 1", "max_restart: unknown key; did you mean 'max_restarts'?"),
            ("log: {tees: 1}", "log.tees: unknown key; did you mean 'tee'?"),
            ("env: {K: [1]}", "env.K: expected a text or a number, found [1]; quote it"),
            (
                "shutdown_timeout: soon",
                "shutdown_timeout: expected a number of seconds, at least 0, found 'soon'",
            ),
            ("args: {a: 1}", "args: expected a list of texts, found {'a': 1}"),
            ("virtual_local_rank: 3", "virtual_local_rank: expected true or false, found 3"),
            ("name: ${nothing.here}", "nothing.here"),
            ("roles: {a: 1}: x", "job.yaml: is no YAML: "),
            ("- a list", "job.yaml: holds a list, expected a mapping with keys like 'roles'"),
        ],
    )
    def test_that_says_what_cannot_be_is_refused_in_one_line(
        self, unirun: Unirun, script: Script, text: str, message: str
    ) -> None:
        script("")
        script(text, "job.yaml")
        result = unirun("--config", "job.yaml", *(["script=train.py"] if ":" in text else []))
        assert result.code == 2, result.err
        (line,) = result.err.splitlines()
        assert message in line

    def test_that_is_no_text_is_refused(self, unirun: Unirun) -> None:
        (unirun.root / "job.yaml").write_bytes(b"name: \xff\xfe\n")
        result = unirun("--config", "job.yaml")
        (line,) = result.err.splitlines()
        assert (result.code, "job.yaml" in line) == (2, True), line


class TestAnAddress:
    def test_that_is_taken_ends_the_command_with_4(self, unirun: Unirun, script: Script) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            result = unirun("--master-port", port, script("print('never')"))
        (line,) = result.err.splitlines()
        assert (result.code, result.out) == (4, "")
        assert line == (
            f"unirun: 127.0.0.1:{port} cannot be listened on: address already in use; "
            "leave out --master-port to get a free one"
        )

    @pytest.mark.parametrize("address", ["203.0.113.7", "no.such.host.invalid"])
    def test_that_is_not_of_this_host_ends_the_command_with_4(
        self, unirun: Unirun, script: Script, address: str
    ) -> None:
        result = unirun("--master-addr", address, script("print('never')"))
        (line,) = result.err.splitlines()
        assert (result.code, address in line, "--master-addr" in line) == (4, True, True), line


class TestAnId:
    def test_of_a_job_that_runs_is_refused(self, unirun: Unirun, script: Script) -> None:
        train = script("import signal; print('up'); signal.pause()")
        job = unirun.start(*EXEC, "--rdzv-id", "mine", train)
        job.lines("up$")
        second = unirun(*EXEC, "--rdzv-id", "mine", train)
        assert (second.code, second.err) == (
            2,
            "unirun: job mine is running; stop it with: unirun stop mine\n",
        )
        job.signal(signal.SIGTERM)
        assert job.end(SOON).code == 143

    @pytest.mark.parametrize("name", ["../up", "a/b", "", "x" * 80])
    def test_that_is_no_name_is_refused(self, unirun: Unirun, script: Script, name: str) -> None:
        result = unirun(*EXEC, f"--rdzv-id={name}", script("print('ran')"))
        assert result.code == (2 if name else 0), result.err
        assert not (unirun.root / "up").exists()


class TestAHome:
    def test_that_cannot_be_written_is_told(self, unirun: Unirun, script: Script) -> None:
        (unirun.root / "file").write_text("")
        result = unirun(script(""), env={"UNIRUN_HOME": str(unirun.root / "file")})
        (line,) = result.err.splitlines()
        assert (result.code, "set UNIRUN_HOME to a directory that you may write" in line) == (2, True), line

    def test_with_a_very_long_path_works(self, unirun: Unirun, script: Script) -> None:
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
    def test_is_reported_like_python_does(
        self, unirun: Unirun, script: Script, text: str, message: str, ours: bool, method: str
    ) -> None:
        path = script("")
        path.write_text(text)
        # A script that could not be begun is not started again.
        result = unirun("--start-method", method, "--nproc-per-node", 2, "--max-restarts", int(ours), path)
        assert result.code == 1
        report = result.err[result.err.index("unirun: root cause:") :]
        assert message in report
        assert f'File "{path}", line' in report
        assert "unirun/launcher" not in result.err
        assert ("Traceback" in report) != ours

    def test_because_the_module_is_not_there_says_so(self, unirun: Unirun) -> None:
        result = unirun(*EXEC, "--max-restarts", 3, "-m", "no_such_package.job")
        assert (result.code, "No module named 'no_such_package'" in result.err) == (1, True), result.err
        assert "unirun/launcher" not in result.err


class TestAWorkloadThatCannotStart:
    """It is not started again: nothing would be different the next time."""

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("Importing", "ModuleNotFoundError: No module named 'no_such_module'"),
            ("Bare", "Bare.__init__() takes 1 positional argument but 3 were given"),
        ],
    )
    def test_ends_the_job_with_its_own_code_and_one_report(
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
    def test_that_cannot_import_ends_the_job_and_names_the_module(
        self, unirun: Unirun, script: Script, restarts: int
    ) -> None:
        result = unirun("--preload", "no_such_module", "--max-restarts", restarts, script("print('never')"))
        assert result.code in (1, 5), result.err
        assert result.out == ""
        assert "no_such_module" in result.err
        assert "No module named 'no_such_module'" in result.err

    def test_whose_import_crashes_ends_the_job_with_a_reason(self, unirun: Unirun, script: Script) -> None:
        script("import os; os.kill(os.getpid(), 11)", "crash.py")
        result = unirun("--preload", "crash", script(""), env={"PYTHONPATH": str(unirun.root)})
        assert result.code != 0
        assert "killed by SIGSEGV" in result.err, result.err


class TestAWorkerThatClosesItsLink:
    @pytest.mark.parametrize("method", ["fork", "exec"])
    def test_runs_on_and_the_user_is_told(self, unirun: Unirun, script: Script, method: str) -> None:
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

    @pytest.mark.parametrize("method", ["fork", "exec"])
    def test_after_init_runs_on_too_even_when_its_descriptors_are_used_again(
        self, unirun: Unirun, script: Script, method: str
    ) -> None:
        train = script(
            """
            import os, signal, socket, sys, unirun
            context = unirun.init()
            signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))
            if context.role == "a":
                os.closerange(3, 4096)
                kept = [socket.socketpair() for _ in range(8)]
                for ours, theirs in kept:
                    theirs.send(b"for the script alone")
            print("up", context.role, context.incarnation, os.getpid(), flush=True)
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

    def test_still_has_its_words_in_the_report(self, unirun: Unirun, script: Script) -> None:
        result = unirun("-q", "-r", 3, script("import os; os.closerange(3, 4096); raise ValueError('words')"))
        assert (result.code, "ValueError: words" in result.err) == (1, True), result.err

    def test_ends_with_the_agent_all_the_same(self, unirun: Unirun, script: Script) -> None:
        job = unirun.start(
            script("import os, signal; os.closerange(3, 4096); print('up', os.getpid()); signal.pause()")
        )
        (pid,) = job.lines(r"up (\d+)")
        os.kill(unirun.pid_of("unirun-agent"), signal.SIGKILL)
        assert gone(int(pid), 1.0)
        assert job.end().code == 137


class TestAWorkerThatTalksNonsense:
    def test_on_the_agents_socket_is_refused_and_does_not_end_the_job(
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
        """A control group with little memory where one can be made, else None."""
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

    def test_is_named_as_the_cause(self, unirun: Unirun, script: Script, small_memory: Path | None) -> None:
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
        assert "the kernel killed it: out of memory" in report

    def test_is_not_said_of_any_other_sigkill(self, unirun: Unirun, script: Script) -> None:
        result = unirun(*EXEC, script("import os; os.kill(os.getpid(), 9)"))
        assert (result.code, "out of memory" in result.err) == (137, False)
