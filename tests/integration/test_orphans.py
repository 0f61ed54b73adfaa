"""No worker and no child of a worker outlives a killed part of its job by more than a second."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from tests.effort import variants
from tests.waiting import WAIT_TIMEOUT, eventually

from .harness import START_TIMEOUT, Running, Script, Unirun, alive, gone

pytestmark = pytest.mark.cold
"""`starting_warm` has these cases for warm jobs."""

LIMIT = 30.0
"""Seconds that a worker may outlive the killed part."""

ENDS = {
    "unirun": ("stopped", "the unirun command was killed"),
    "unirun-master and unirun-agent": ("lost", "its processes are gone and left no end"),
    "unirun-agent": ("failed", "the agent of node"),
    "unirun-spawner": ("failed", "killed by SIGKILL"),
}
"""The phase and the reason in the status, by the killed part."""

WITH_CHILDREN = """
    import os, signal, subprocess, sys
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pids = [os.getpid()]
    for own in (False, True):
        code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
        command = [sys.executable, "-S", "-E", "-c", code]
        child = subprocess.Popen(command, start_new_session=own, stdout=subprocess.PIPE)
        child.stdout.readline()
        pids.append(child.pid)
    if sys.argv[1] == "fork" and os.environ["ROLE_NAME"] == "b":
        import unirun
        unirun.init()
    print("pids", *pids, flush=True)
    while True:
        signal.pause()
"""


def pids_of(job: Running, count: int) -> list[int]:
    """Pids of all workers and their children."""
    return [int(pid) for line in job.lines(r"pids ([\d ]+)$", count) for pid in line.split()]


def victims(job: Running, part: str) -> list[int]:
    """The processes that have one of the titles in `part`. A master that dies alone has a successor, and is in
    `test_durability`."""
    if part == "unirun":
        return [job.pid]
    titles = [title[:15] for title in part.split(" and ")]
    return [pid for pid, title in job.command.processes().items() if title in titles]


def kill_together(pids: list[int]) -> None:
    """SIGKILL to each of `pids`. None of them acts on the death of another."""
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, signum)


def all_gone_in_time(pids: list[int]) -> bool:
    end = time.monotonic() + LIMIT
    return all(gone(pid, end - time.monotonic()) or not alive(pid) for pid in pids)


@pytest.mark.parametrize("method", variants("exec", "fork"))
@pytest.mark.parametrize("part", ENDS)
class TestNobodySurvivesTheKillOf:
    def test_no_process_survives_the_kill_of_a_part_and_the_status_names_it(
        self, unirun: Unirun, script: Script, part: str, method: str
    ) -> None:
        job = unirun.start("--roles", "a=2,b=1", "--start-method", method, script(WITH_CHILDREN), method)
        pids = pids_of(job, 3)
        kill_together(victims(job, part))
        assert all_gone_in_time(pids), [pid for pid in pids if alive(pid)]
        result = job.end()
        assert result.code == (-9 if part == "unirun" else 137), result.err
        if part != "unirun":
            assert result.err.strip(), "the user is told"
        unirun.assert_nothing_left()
        status = eventually(lambda: s if (s := unirun.status())["phase"] != "running" else None, "an end")
        phase, reason = ENDS[part]
        assert (status["phase"], reason in status["reason"]) == (phase, True), status["reason"]


class TestEarly:
    """Parts are killed before any worker exists, while torch is being imported."""

    @pytest.mark.parametrize("part", ["unirun", "unirun-agent", "unirun-spawner"])
    def test_no_process_survives_a_kill_during_the_start(
        self, unirun: Unirun, script: Script, part: str
    ) -> None:
        job = unirun.start("--roles", "a=2", script("import signal; signal.pause()"))
        if part == "unirun":
            eventually(lambda: "unirun-agent" in unirun.processes().values(), "the agent is there")
            os.kill(job.pid, signal.SIGKILL)
        elif part == "unirun-agent":
            os.kill(unirun.pid_of(part), signal.SIGKILL)
        else:

            def over() -> bool:
                """An agent starts another spawner for one that is killed before it was to fork anything."""
                for pid, title in unirun.processes().items():
                    if title == part[:15]:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                return job.popen.poll() is not None

            eventually(over, f"the job ends without a {part}", START_TIMEOUT)
        result = job.end()
        assert result.code != 0
        unirun.assert_nothing_left()


class TestADetachedJob:
    METHOD = "exec"

    @pytest.fixture
    def detached(self, unirun: Unirun, script: Script) -> list[int]:
        """Pids of the workers of a detached job, and of their children."""
        started = unirun(
            "-d", "--roles", "a=2", "--start-method", self.METHOD, script(WITH_CHILDREN), self.METHOD
        )
        assert started.code == 0, started.err

        def pids() -> list[int]:
            lines = [
                line for rank in range(2) for line in unirun.log("a", rank).split(b"\n") if b"pids" in line
            ]
            return [int(pid) for line in lines for pid in line.split()[1:]] if len(lines) == 2 else []

        def look() -> list[int]:
            try:
                return pids()
            except OSError:
                return []

        return eventually(look, "both workers are up", START_TIMEOUT)

    def test_a_detached_job_continues_after_the_command_has_returned(
        self, unirun: Unirun, detached: list[int]
    ) -> None:
        assert "unirun" not in unirun.processes().values()
        assert all(map(alive, detached))
        eventually(lambda: unirun.status()["phase"] == "running", "the status has it", WAIT_TIMEOUT)
        assert unirun("stop", "--now").code == 0
        assert not any(map(alive, detached))
        assert unirun.status()["phase"] == "stopped"

    @pytest.mark.parametrize(
        ("part", "phase"),
        [
            ("unirun-master and unirun-agent", "lost"),
            ("unirun-agent", "failed"),
            ("unirun-spawner", "failed"),
        ],
    )
    def test_no_process_of_a_detached_job_survives_the_kill_of_a_part(
        self, unirun: Unirun, detached: list[int], part: str, phase: str
    ) -> None:
        kill_together(victims(unirun.started[0], part))
        assert all_gone_in_time(detached), [pid for pid in detached if alive(pid)]
        unirun.assert_nothing_left()
        assert eventually(lambda: unirun.status()["phase"] == phase, f"phase {phase}", WAIT_TIMEOUT)
