"""Jobs that are warm, and the life of a warm process."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.effort import variants
from tests.integration.harness import START_TIMEOUT, Script, Unirun, alive, gone
from tests.integration.warm import ONE_THREAD, Warm, WarmUnirun, end, ready
from tests.waiting import eventually
from unirun.launcher.orders import spawner_request
from unirun.launcher.warm.borrowing import (
    LOG,
    Borrowed,
    abandon_starting,
    borrow,
    choose,
    is_alive,
    running,
    start,
)

CREW = """
import psutil
from unirun import BaseTrainer, BaseWorkload

class Actor(BaseWorkload):
    pass

class Mine(BaseTrainer):
    def init(self):
        pass

    def fit(self):
        return [each.name() for each in psutil.Process().parents()[:2]]
"""
FUNCTION = """
import psutil
from unirun.train import Trainer
with Trainer() as trainer:
    print(*trainer.run(lambda: [each.name() for each in psutil.Process().parents()[:2]]))
"""
SUBMITS = """
from unirun.train import DLJobBuilder
job = DLJobBuilder().node_num(1).device_per_node(2).config({}).dl_type("RL").trainer("mine", "Mine")
job = job.workload("actor", "mine", "Actor").total(1).per_node(1)
print(job.build().submit().result)
"""


class TestEveryJobThatFits:
    def test_jobs_that_fit_are_warm_also_several_at_once(self, unirun: Unirun, script: Script) -> None:
        path = script("import os, torch; print(os.environ['RANK'], torch.ones(2).sum().item())")
        jobs = [unirun.start("--nproc-per-node", 1 + number % 2, path) for number in range(6)]
        for number, job in enumerate(jobs):
            result = job.end()
            assert (result.code, result.lines) == (0, [f"{rank} 2.0" for rank in range(1 + number % 2)]), (
                result.err
            )
            assert "declines" not in result.err

    @pytest.mark.parametrize(
        "program", variants("-", "main.py"), ids=variants("an interpreter without a file", "a program")
    )
    def test_a_submitted_job_that_fits_is_warm(self, unirun: Unirun, script: Script, program: str) -> None:
        """Its PYTHONPATH is the search path of the submitting program. A notebook is an interpreter without a file."""
        folder = script(CREW, "code/mine.py").parent
        with script(SUBMITS, "code/main.py").open() as statements:
            command = [sys.executable, program]
            result = unirun.start_program(command, cwd=folder, stdin=statements).end()
        assert result.code == 0, result.err
        assert result.lines[-1] == "['unirun-spawner', 'unirun-guard']"

    def test_the_workers_of_a_trainer_are_warm(self, unirun: Unirun, script: Script) -> None:
        path = script(FUNCTION)
        result = unirun.start_program([sys.executable, str(path)], cwd=path.parent).end()
        assert (result.code, result.lines) == (0, ["['unirun-spawner', 'unirun-guard']"]), result.err

    def test_a_warm_job_has_new_interpreters_with_exec(self, unirun: Unirun, script: Script) -> None:
        path = script("import sys, os; print('torch' in sys.modules, os.environ.get('UNIRUN_HOME'))")
        result = unirun("--start-method", "exec", path)
        assert (result.code, result.lines) == (0, [f"False {unirun.home}"]), result.err

    def test_the_warm_process_gets_neither_token_nor_environment_of_a_job(
        self, unirun: Unirun, warm: Warm, script: Script
    ) -> None:
        secret = f"mark-of-{random.randbytes(16).hex()}"
        running = unirun.start(
            "--nproc-per-node", 2, script("import signal; signal.pause()"), env={"MY_SECRET": secret}
        )
        running.lines("2 ranks of 1 role up")
        token = (unirun.job_dir() / "token").read_bytes().strip()
        forks = [pid for pid, title in warm.forks.items() if title == "unirun-spawner"]
        assert any(_has(pid, secret.encode()) for pid in forks), "the search finds it where it is"
        running.signal(signal.SIGTERM)
        running.end()
        assert not [pid for pid in warm.pids if _has(pid, secret.encode())]
        assert not [pid for pid in warm.pids if _has(pid, token)]
        assert not any(str(unirun.home).encode() in _environ(pid) for pid in warm.pids)


def _environ(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def _has(pid: int, text: bytes) -> bool:
    """Return True if `text` is in the writable memory of a process."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            region, rights = line.split()[:2]
            begin, end = (int(each, 16) for each in region.split("-"))
            if rights[:2] == "rw":
                with contextlib.suppress(OSError):
                    memory.seek(begin)
                    if text in memory.read(end - begin):
                        return True
    return False


# its life


class TestAWarmProcess:
    def test_a_warm_process_is_shown_and_its_death_affects_no_job(
        self, own: Warm, tmp_path: Path, script: Script
    ) -> None:
        unirun = WarmUnirun(tmp_path, own)
        path = script(
            "import torch, pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)\nprint('done')"
        )
        job = unirun.start("-v", path, env=ONE_THREAD)
        job.lines("1 rank of 1 role up")
        (pid,) = own.pids
        shown = unirun("warm", "status", env=ONE_THREAD)
        (row,) = (line.split() for line in shown.out.splitlines() if line.startswith(str(pid)))
        assert row[-3] == "1", shown.out
        assert 10 < int(row[-2]) < 1000, shown.out
        os.kill(pid, signal.SIGKILL)
        assert gone(pid, START_TIMEOUT)
        (unirun.root / "go").touch()
        ended = job.end()
        assert (ended.code, ended.out) == (0, "done\n"), ended.err
        assert "start: warm" in job.text
        after = unirun("-v", path, env=ONE_THREAD)
        assert (after.code, after.out) == (0, "done\n"), after.err
        assert "start: cold: no warm process runs" in after.err
        assert unirun("warm", "status", env=ONE_THREAD).code == 1
        assert not [*(own.run / "warm").iterdir()], "what it has left was removed"
        unirun.assert_nothing_left()

    def test_a_warm_process_that_cannot_be_left_behind_is_reported_and_the_job_starts(
        self, tmp_path: Path, script: Script
    ) -> None:
        unirun = Unirun(tmp_path)
        result = unirun(script("print('done')"), env={"UNIRUN_WARM": "1", "UNIRUN_RUN_DIR": "/dev/null/run"})
        assert (result.code, result.out) == (0, "done\n")
        assert "/dev/null/run cannot be used: Not a directory; set UNIRUN_RUN_DIR" in result.err

    def test_a_warm_process_ends_with_the_login_session_on_request(self, tmp_path: Path) -> None:
        """The session is that of the shell, which ends when its stdin does."""
        unirun = WarmUnirun(tmp_path, Warm(tmp_path / "warm"))
        command = Path(sys.executable).with_name("unirun")
        shell = unirun.start_program(
            ["sh", "-c", f"{command} warm --until-logout && read line"], env=ONE_THREAD, stdin=subprocess.PIPE
        )
        (pid,) = map(int, shell.lines(r"process (\d+) is ready"))
        assert shell.popen.stdin is not None
        shell.popen.stdin.close()
        assert gone(pid, START_TIMEOUT)
        unirun.assert_nothing_left()

    def test_a_job_leaves_a_warm_process_on_request_which_ends_when_told(
        self, tmp_path: Path, script: Script
    ) -> None:
        warm = Warm(tmp_path / "warm")
        unirun = WarmUnirun(tmp_path, warm)
        env = {**ONE_THREAD, "UNIRUN_WARM": "1"}
        try:
            path = script("print('done')")
            assert "start: cold" in unirun("-v", path, env=env).err
            eventually(
                lambda: "start: warm" in unirun("plan", path, env=env).out,
                "a warm process is ready",
                START_TIMEOUT,
            )
            assert "start: warm" in unirun("-v", path, env=env).err
            # It is in the home of the test: its jobs left it behind.
            (pid,) = (pid for pid, title in unirun.processes().items() if title == "unirun-warm")
            assert f"process {pid} has ended" in unirun("warm", "stop", env=env).out
            assert not alive(pid)
        finally:
            unirun.assert_nothing_left()
            unirun.clean_up()


class TestAModuleOfTheUsers:
    @pytest.fixture
    def write(self, tmp_path: Path, light: dict[str, str]) -> Callable[[str], dict[str, str]]:
        """Writes the module ``mine``; returns the environment in which it is found."""

        def write(text: str) -> dict[str, str]:
            (tmp_path / "lib").mkdir()
            (tmp_path / "lib" / "mine.py").write_text(text)
            time.sleep(0.05)
            return {**light, "PYTHONPATH": str(tmp_path / "lib")}

        return write

    def test_a_user_module_that_reads_all_variables_makes_all_compared(
        self, write: Callable[[str], dict[str, str]]
    ) -> None:
        env = write("import os; copy = os.environ.copy()")
        warm = ready(env, modules=("mine",))
        assert choose(spawner_request(env, ("mine",), "/")).warm == warm
        assert choose(spawner_request({**env, "PWD": "/x", "_": "/bin/x"}, ("mine",), "/")).warm == warm
        assert (
            "NEW is '1', there not set"
            in choose(spawner_request({**env, "NEW": "1"}, ("mine",), "/")).against[0]
        )
        os.kill(warm.description.pid, signal.SIGTERM)

    def test_variables_set_by_a_user_module_are_not_compared(
        self, write: Callable[[str], dict[str, str]]
    ) -> None:
        env = write(
            "import os; os.environ.setdefault('MINE', 'x'); os.environ['OMP_MINE'] = os.environ['MINE']"
        )
        warm = ready(env, modules=("mine",))
        assert choose(spawner_request(env, ("mine",), "/")).warm == warm
        assert "MINE is 'y'" in choose(spawner_request({**env, "MINE": "y"}, ("mine",), "/")).against[0]
        os.kill(warm.description.pid, signal.SIGTERM)

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("import os; os.utime(__file__)", "mine.py has changed while it was loaded"),
            (
                "import threading, time; threading.Thread(target=time.sleep, args=[60], daemon=True).start()",
                "threads",
            ),
            ("raise ValueError('mine')", "ValueError: mine"),
        ],
    )
    def test_a_user_module_that_prevents_warm_starts_is_reported(
        self, write: Callable[[str], dict[str, str]], text: str, reason: str
    ) -> None:
        folder = start(write(text), ("mine",), START_TIMEOUT)
        with (folder / "log").open() as log:
            eventually(lambda: not is_alive(folder), "it has ended")
            assert reason in log.read()
        assert running() == []
        assert not folder.exists()


class TestItEnds:
    def test_a_warm_process_ends_after_its_idle_time(self, light: dict[str, str]) -> None:
        folder = start(light, (), 0.3)
        eventually(lambda: not folder.exists(), "it is gone")

    def test_a_warm_process_ends_with_the_login_session(self, light: dict[str, str]) -> None:
        leader = subprocess.Popen(["sleep", "60"])
        warm = ready(light, until=leader.pid)
        leader.kill()
        leader.wait()
        assert gone(warm.description.pid, START_TIMEOUT)
        assert not warm.folder.exists()

    def test_a_warm_process_told_to_end_while_it_imports_ends(
        self, tmp_path: Path, light: dict[str, str]
    ) -> None:
        go = tmp_path / "go"
        (tmp_path / "slow.py").write_text(
            f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        )
        folder = start({**light, "PYTHONPATH": str(tmp_path)}, ("slow",), START_TIMEOUT)
        with (folder / LOG).open() as log:
            assert abandon_starting() == 1
            assert running() == []
            go.touch()
            eventually(lambda: "FileNotFoundError" in log.read(), "it has ended")

    def test_a_warm_process_does_not_end_while_a_job_runs(self, light: dict[str, str]) -> None:
        warm = ready(light, idle=0.5)
        borrowed = borrow(warm, spawner_request(light, (), "/"))
        assert isinstance(borrowed, Borrowed), borrowed
        assert not gone(warm.description.pid, 1.5)
        end(borrowed)
        assert gone(warm.description.pid, START_TIMEOUT)

    def test_a_warm_process_ends_when_its_state_has_changed(self, light: dict[str, str]) -> None:
        """Jobs choose it by the state that it had when it was ready."""
        warm = ready(light)
        os.setpriority(os.PRIO_PROCESS, warm.description.pid, os.getpriority(os.PRIO_PROCESS, 0) + 1)
        told = borrow(warm, spawner_request(light, (), "/"))
        assert "declines: nice is " in str(told)
        assert gone(warm.description.pid, START_TIMEOUT)

    def test_a_warm_fork_ends_at_once_for_an_unusable_working_directory(self, light: dict[str, str]) -> None:
        """The fork ends, not the warm process."""
        warm = ready(light)
        told = borrow(warm, spawner_request(light, (), "/nowhere"))
        assert "it has ended meanwhile" in str(told)
        borrowed = borrow(warm, spawner_request(light, (), "/"))
        assert isinstance(borrowed, Borrowed)
        end(borrowed)
        os.kill(warm.description.pid, signal.SIGTERM)
