"""A job that differs from a warm process, in one variable or module, starts cold and says what differs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.integration.harness import START_TIMEOUT, UNIRUN, Script, Unirun, gone
from tests.integration.warm import ONE_THREAD, Warm, WarmUnirun, warm_in
from tests.waiting import eventually

AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root may")


@contextlib.contextmanager
def a_cgroup() -> Iterator[str]:
    """Shell commands that move the shell into another control group."""
    for top in ("/sys/fs/cgroup", "/sys/fs/cgroup/freezer"):
        folder = Path(top, f"unirun-test-{os.getpid()}")
        with contextlib.suppress(OSError):
            folder.mkdir()
            if not (folder / "cgroup.procs").exists():
                folder.rmdir()
                continue
            try:
                yield f"echo $$ > {folder}/cgroup.procs"
            finally:
                eventually(lambda: not (folder / "cgroup.procs").read_text(), "the group is empty")  # noqa: B023
                folder.rmdir()
            return
    pytest.skip("no control group can be made here")


SHELL = {
    "priority": "renice -n 3 $$ >/dev/null",
    "limit Max stack size": "ulimit -s 4096",
    "limit Max open files": "ulimit -n 512",
    "Cpus_allowed_list": "taskset -p -c 0 $$ >/dev/null",
}

WRAPPED = {
    "I/O priority": "ionice -c 3",
    "NoNewPrivs": "setpriv --no-new-privs",
}

WRAPPED_BY_ROOT = {
    "namespace uts": "unshare --uts",
    "CapBnd": "setpriv --bounding-set=-sys_time",
}

OTHER_USER = "setpriv --reuid=65534 --clear-groups --inh-caps=+dac_override --ambient-caps=+dac_override"


class TestAJobStartsColdWhen:
    """`unirun plan` and ``-v`` give the reason."""

    def planned(
        self, unirun: Unirun, script: Script, before: str, env: Mapping[str, str] | None = None
    ) -> str:
        """The line about the start in the plan of a job that a shell starts."""
        path = script("print('done')")
        words = (
            f'{before} "$0" "$@"'
            if before in (*WRAPPED.values(), *WRAPPED_BY_ROOT.values())
            else f'{before}; "$0" "$@"'
        )
        command = ["bash", "-c", words, UNIRUN, "plan", str(path)]
        result = unirun.start_program(command, env=env).end()
        assert result.code == 0, result.err
        (line,) = re.findall(r"start: .*", result.out)
        return str(line)

    def test_a_job_starts_cold_when_a_variable_read_at_import_differs(
        self, unirun: Unirun, script: Script
    ) -> None:
        assert self.planned(unirun, script, ":").startswith("start: warm")
        for env, reason in (
            (
                {"OPENBLAS_NUM_THREADS": "1"},
                r"process \d+ differs: OPENBLAS_NUM_THREADS is '1', there not set",
            ),
            ({"HOME": "/nowhere"}, r"process \d+ differs: HOME is '/nowhere', there '.*'"),
            ({"OMP_NUM_THREADS": "3"}, r"process \d+ differs: OMP_NUM_THREADS is '3', there .*"),
            ({"UNIRUN_WARM": "0"}, "UNIRUN_WARM=0"),
            ({"UNIRUN_RUN_DIR": "/nowhere"}, r"no warm process runs \(unirun warm\)"),
        ):
            assert re.fullmatch(f"start: cold: {reason}", self.planned(unirun, script, ":", env))

    @pytest.mark.parametrize("name", [*SHELL, *WRAPPED])
    def test_a_job_starts_cold_when_the_process_state_differs(
        self, unirun: Unirun, script: Script, name: str
    ) -> None:
        told = self.planned(unirun, script, SHELL.get(name) or WRAPPED[name])
        assert re.match(rf"start: cold: process \d+ differs: .*{name} is ", told), told

    @AS_ROOT
    @pytest.mark.parametrize("name", WRAPPED_BY_ROOT)
    def test_a_job_starts_cold_when_process_state_set_by_root_differs(
        self, unirun: Unirun, script: Script, name: str
    ) -> None:
        told = self.planned(unirun, script, WRAPPED_BY_ROOT[name])
        assert re.match(rf"start: cold: process \d+ differs: .*{name} is ", told), told

    @AS_ROOT
    def test_a_job_starts_cold_when_the_control_group_differs(self, unirun: Unirun, script: Script) -> None:
        with a_cgroup() as move:
            assert "differs: cgroup is " in self.planned(unirun, script, move)

    @AS_ROOT
    def test_a_job_of_another_user_starts_cold(self, warm: Warm, tmp_path: Path) -> None:
        """A user who may read root's files, but not inspect its processes."""
        with tempfile.TemporaryDirectory() as name:
            unirun, path = WarmUnirun(Path(name), warm), Path(name, "train.py")
            path.write_text("import os; print('user', os.getuid())")
            os.chmod(name, 0o755)
            os.chown(name, 65534, 65534)
            command = [*OTHER_USER.split(), UNIRUN, "-v", str(path)]
            result = unirun.start_program(command, env={"HOME": name}).end()
            assert (result.code, result.out) == (0, "user 65534\n"), result.err
            assert re.search(r"start: cold: process \d+ differs: .*Uid is ", result.err), result.err
            unirun.assert_nothing_left()

    def test_a_job_starts_cold_when_its_limits_differ_and_succeeds(
        self, warm: Warm, tmp_path: Path, script: Script
    ) -> None:
        path = script("import resource; print(resource.getrlimit(resource.RLIMIT_STACK)[0])")
        unirun = WarmUnirun(tmp_path, warm)
        result = unirun.start_program(
            ["bash", "-c", 'ulimit -S -s 4096; "$0" -v "$1"', UNIRUN, str(path)]
        ).end()
        assert (result.code, result.out) == (0, "4194304\n"), result.err
        assert re.search(r"start: cold: process \d+ differs: limit Max stack size is '4194304 ", result.err)
        unirun.assert_nothing_left()


JOURNAL = """
    import os
    VALUE = 1
    os.environ["JOURNAL_SET"] = "by the journal"
    ASKED = os.environ.get("JOURNAL_ASKED")
"""


class TestModulesOfTheUsers:
    @pytest.fixture
    def journal(
        self, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[tuple[Warm, Path, dict[str, str]]]:
        """A warm process with a user module, the module's folder, and the variables of its jobs."""
        root = tmp_path_factory.mktemp("journal")
        module = root / "journal.py"
        module.write_text(textwrap.dedent(JOURNAL))
        env = {**ONE_THREAD, "PYTHONPATH": str(root)}
        time.sleep(0.05)
        with warm_in(root / "warm", "--preload", "journal", env=env) as warm:
            yield warm, module, env

    @pytest.mark.chaos
    def test_user_modules_stay_warm_while_their_files_are_unchanged(
        self, journal: tuple[Warm, Path, dict[str, str]], tmp_path: Path, script: Script
    ) -> None:
        warm, module, env = journal
        unirun = WarmUnirun(tmp_path, warm)
        path = script("import journal, os; print(journal.VALUE, os.environ.get('JOURNAL_SET'), os.getppid())")

        def told(*options: str, **more: str) -> str:
            result = unirun("plan", *options, path, env={**env, **more})
            assert result.code == 0, result.err
            return "".join(re.findall(r"start: .*", result.out))

        assert "start: warm" in told("--preload", "journal", MINE="1")
        assert "it has imported journal, which this job does not --preload" in told()
        assert "JOURNAL_ASKED is '1', there not set" in told("--preload", "journal", JOURNAL_ASKED="1")
        first = unirun("-v", "--preload", "journal", path, env=env)
        shutil.rmtree(unirun.job_dir())
        assert "start: warm" in first.err
        assert first.out.startswith("1 None "), first.out + first.err
        # What it makes up for while nothing tells that it is so: the fork looks, and the job hears.
        (pid,) = warm.pids
        module.write_text(module.read_text().replace("VALUE = 1", "VALUE = 2"))
        second = unirun("-v", "--preload", "journal", path, env=env)
        assert (second.code, second.out[:2]) == (0, "2 "), second.err
        declined = f"the warm process {pid} declines: {module} was replaced since it was loaded"
        assert declined in unirun.events("notice")[0]
        assert gone(pid, START_TIMEOUT)
        assert (
            "start: cold: no warm process runs" in unirun("plan", "--preload", "journal", path, env=env).out
        )
        unirun.assert_nothing_left()


class TestAnOldUnirun:
    @pytest.mark.chaos
    def test_a_warm_process_with_a_replaced_unirun_file_lends_nothing(
        self, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, script: Script
    ) -> None:
        root = tmp_path_factory.mktemp("old")
        package = root / "lib" / "unirun"
        shutil.copytree(Path(__file__).parents[3] / "unirun", package)
        env = {**ONE_THREAD, "PYTHONPATH": str(root / "lib")}
        path = script("print('done')")
        time.sleep(0.05)
        with warm_in(root / "warm", env=env) as warm:
            unirun = WarmUnirun(tmp_path, warm)
            assert "start: warm" in unirun("plan", path, env=env).out
            other = unirun("plan", path, env={**ONE_THREAD, "PYTHONPATH": ""}).out
            assert f"unirun is '{Path(__file__).parents[3] / 'unirun'}', there '{package}'" in other
            process = package / "launcher" / "warm" / "process.py"
            os.replace(shutil.copy(process, root / "new"), process)
            result = unirun("-v", path, env=env)
            assert (result.code, result.out) == (0, "done\n"), result.err
            assert f"{process} was replaced since it was loaded" in unirun.events("notice")[0]
            unirun.assert_nothing_left()


# every way to start a job
