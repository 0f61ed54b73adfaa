"""Deaths of a warm process, of a guard, and of parts of a warm job."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.effort import variants
from tests.integration import test_orphans
from tests.integration.harness import START_TIMEOUT, Script, Unirun, gone
from tests.integration.test_orphans import (
    WITH_CHILDREN,
    all_gone_in_time,
    pids_of,
)
from tests.integration.warm import ONE_THREAD, Warm, WarmUnirun, end, ready
from tests.waiting import eventually
from unirun.launcher.orders import spawner_request
from unirun.launcher.warm.borrowing import Borrowed, borrow

SEED = int(os.environ.get("UNIRUN_WARM_SEED", "20260101"))

MOMENTS = 8


class TestAtEachMomentOfAStart:
    """Suspended or killed after so many milliseconds; the job gets a working spawner, or starts cold."""

    @pytest.mark.parametrize("signum", variants(signal.SIGKILL, signal.SIGTERM))
    def test_the_warm_process_may_be_killed_at_each_moment_of_a_start(
        self, light: dict[str, str], signum: int
    ) -> None:
        rng = random.Random(SEED)
        lent = 0
        for _ in range(MOMENTS):
            warm = ready(light)
            pid = warm.description.pid
            code = f"import os, time; time.sleep({rng.uniform(0.0, 0.05)}); os.kill({pid}, {int(signum)})"
            killer = subprocess.Popen([sys.executable, "-S", "-E", "-c", code])
            borrowed = borrow(warm, spawner_request(light, (), "/"))
            if isinstance(borrowed, Borrowed):
                lent += 1
                end(borrowed)
            else:
                assert borrowed.startswith(f"the warm process {pid} declines: it "), borrowed
            killer.wait()
            assert gone(pid, START_TIMEOUT)
        print(f"{lent} of {MOMENTS} were lent")

    def test_a_guard_may_be_killed_at_each_moment_of_a_start(
        self, light: dict[str, str], tmp_path: Path
    ) -> None:
        """A guard that was lent already leaves a spawner that continues, and ends with the job."""
        rng = random.Random(SEED)
        warm = ready(light)
        code = """if True:
            import os, sys, time
            path, end = sys.argv[1], time.monotonic() + 60
            while not (pids := open(path).read().split()) and time.monotonic() < end: pass
            time.sleep(float(sys.argv[2]))
            try: os.kill(int(pids[0]), 9)
            except ProcessLookupError: pass
        """
        children = f"/proc/{warm.description.pid}/task/{warm.description.pid}/children"
        for _ in range(MOMENTS):
            command = [sys.executable, "-S", "-E", "-c", code, children, str(rng.uniform(0.0, 0.03))]
            killer = subprocess.Popen(command)
            borrowed = borrow(warm, spawner_request(light, (), "/"))
            assert killer.wait(START_TIMEOUT) == 0
            if isinstance(borrowed, Borrowed):
                end(borrowed)
            eventually(lambda: not Path(children).read_text(), "it was reaped")
        os.kill(warm.description.pid, signal.SIGTERM)

    def test_a_job_may_go_away_at_each_moment_of_a_warm_start(self, light: dict[str, str]) -> None:
        """The fork notices it, and exits without output."""
        rng = random.Random(SEED)
        warm = ready(light)
        code = "import sys; from unirun.launcher.orders import spawner_request; import os; "
        code += "from unirun.launcher.warm.borrowing import borrow, running; "
        code += "print(flush=True); borrow(running()[0], spawner_request(dict(os.environ), (), '/')); input()"
        for _ in range(3):
            borrower = subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=Path(__file__).parents[3],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            assert borrower.stdout is not None
            borrower.stdout.readline()
            time.sleep(rng.uniform(0.0, 0.03))
            borrower.kill()
            _, err = borrower.communicate(timeout=START_TIMEOUT)
            assert err == b""
        assert (warm.folder / "log").read_text() == ""
        os.kill(warm.description.pid, signal.SIGTERM)

    @pytest.mark.chaos
    def test_the_warm_process_may_be_suspended_at_each_moment_of_a_start(
        self, own: Warm, tmp_path: Path, script: Script
    ) -> None:
        unirun = WarmUnirun(tmp_path, own)
        path = script("print('done')")
        (pid,) = own.pids
        os.kill(pid, signal.SIGSTOP)
        try:
            job = unirun.start("-v", path, env=ONE_THREAD)
            job.lines("declines: it does not answer: timed out; a spawner starts cold")
        finally:
            os.kill(pid, signal.SIGCONT)
        result = job.end()
        assert (result.code, result.out) == (0, "done\n"), result.err
        # The warm process forks when it runs again. Its agent has gone on without it, so that child must end without an error.
        eventually(lambda: not own.forks, "nothing is left of it")
        assert "Traceback" not in "".join(
            file.read_text() for file in [*unirun.job_dir().glob("*.log"), *own.run.glob("warm/*/log")]
        )
        assert "start: warm" in (again := unirun("-v", path, env=ONE_THREAD)).err
        assert again.code == 0
        unirun.assert_nothing_left()


class TestNobodySurvivesTheKillOf:
    @pytest.mark.parametrize(
        ("part", "method"), [*((part, "fork") for part in test_orphans.ENDS), ("unirun-spawner", "exec")]
    )
    def test_no_process_of_a_warm_job_survives_the_kill_of_a_part_and_the_status_names_it(
        self, unirun: Unirun, script: Script, part: str, method: str
    ) -> None:
        """As when it starts cold."""
        cold = test_orphans.TestNobodySurvivesTheKillOf()
        cold.test_no_process_survives_the_kill_of_a_part_and_the_status_names_it(unirun, script, part, method)


class TestADetachedJob(test_orphans.TestADetachedJob):
    """As when it starts cold."""

    METHOD = "fork"


class TestAPartOfAJob:
    @pytest.mark.parametrize("part", ["unirun", "unirun-agent", "unirun-guard", "unirun-spawner"])
    def test_a_part_of_a_warm_job_may_be_killed_while_it_starts(
        self, unirun: Unirun, warm: Warm, script: Script, part: str
    ) -> None:
        """A spawner that had nothing to do yet is borrowed again, so the job may continue."""
        job = unirun.start("--roles", "a=2", script("print('done')"))
        if part == "unirun":
            eventually(lambda: "unirun-agent" in unirun.processes().values(), "the agent is there")
            victim: int | None = job.pid
        else:
            looked = eventually(
                lambda: (
                    [pid for pid, name in unirun.processes().items() if name == part] or job.popen.poll() == 0
                ),
                f"{part} is there",
            )
            victim = looked[0] if isinstance(looked, list) else None
        if victim is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        result = job.end()
        # 4: the node was lost before the job began.
        assert result.code in (0, 1, 4, 137, -9), result.err
        unirun.assert_nothing_left()


class TestTheGuardOfASpawner:
    def test_a_killed_guard_leaves_no_process_at_the_jobs_end(
        self, unirun: Unirun, warm: Warm, script: Script
    ) -> None:
        job = unirun.start("--roles", "a=2", script(WITH_CHILDREN), "fork")
        pids = pids_of(job, 2)
        os.kill(unirun.pid_of("unirun-guard"), signal.SIGKILL)
        assert unirun("stop", "--now").code == 0
        job.end()
        assert all_gone_in_time(pids)

    def test_guard_and_warm_process_may_be_killed_together(
        self, own: Warm, tmp_path: Path, script: Script
    ) -> None:
        unirun = WarmUnirun(tmp_path, own)
        job = unirun.start("--roles", "a=2", script(WITH_CHILDREN), "fork", env=ONE_THREAD)
        pids = pids_of(job, 2)
        for pid in (*own.pids, unirun.pid_of("unirun-guard"), unirun.pid_of("unirun-agent")):
            os.kill(pid, signal.SIGKILL)
        assert all_gone_in_time(pids)
        assert job.end().code == 137
        unirun.assert_nothing_left()
