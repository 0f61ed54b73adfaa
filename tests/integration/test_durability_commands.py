"""Detached jobs, and commands about them, through deaths of masters."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.observe.jobdir import JobDir
from unirun.train.job import JobHandle

from .harness import START_TIMEOUT, Script, Unirun, alive
from .masters import Masters

pytestmark = pytest.mark.timeout(300)


TELLING = """
    import os, pathlib, time
    for number in range(1_000_000):
        print("line", number, os.getpid(), flush=True)
        if pathlib.Path("enough").exists():
            print("the last", flush=True)
            break
        time.sleep(0.05)
"""


class Detached:
    """A detached job that writes lines until it is told to finish."""

    def __init__(self, unirun: Unirun, script: Path) -> None:
        self._unirun = unirun
        started = unirun("-d", "--start-method", "exec", "--roles", "a=2", script)
        assert started.code == 0, started.err
        self.run_id = started.out.strip()
        self.masters = Masters(unirun)
        self.handle = JobHandle(JobDir(unirun.job_dir()))
        eventually(lambda: self.pids(), "both workers write", START_TIMEOUT)

    def pids(self) -> list[int]:
        """Pids of both workers, once they have written."""
        try:
            heads = [self._unirun.log("a", rank).split(b"\n")[0].split() for rank in range(2)]
        except OSError:
            return []
        return [int(head[2]) for head in heads] if all(len(head) == 3 for head in heads) else []

    def enough(self) -> None:
        (self._unirun.root / "enough").touch()

    def lose_its_master(self) -> None:
        """Kill the master and return while there is none."""
        self.masters.kill()


@pytest.fixture
def detached(unirun: Unirun, script: Script) -> Detached:
    return Detached(unirun, script(TELLING))


def test_a_job_in_the_background_survives_its_masters(unirun: Unirun, detached: Detached) -> None:
    """
    1. The master of a detached job is killed three times.
    2. The workers keep their processes, and the status shows them running.
    3. The workers end, and the job succeeds.
    """
    pids = detached.pids()
    for _ in range(3):
        detached.lose_its_master()
    detached.masters.next()
    assert detached.pids() == pids
    assert all(map(alive, pids))
    eventually(lambda: unirun.status()["phase"] == "running", "the status has it", WAIT_TIMEOUT)
    assert [worker["incarnation"] for worker in unirun.workers().values()] == [0, 0]
    detached.enough()
    eventually(lambda: unirun.status()["phase"] == "succeeded", "it ends", WAIT_TIMEOUT)
    assert unirun.status()["code"] == 0


def test_status_shows_a_detached_job_without_a_master(unirun: Unirun, detached: Detached) -> None:
    eventually(lambda: unirun.workers()["a:1"]["phase"] == "running", "the master knows of its workers")
    detached.lose_its_master()
    status = unirun.status()
    assert status["phase"] == "running"
    assert [worker["pid"] for worker in status["roles"][0]["workers"]] == detached.pids()
    detached.enough()


@pytest.mark.parametrize("now", [(), ("--now",)])
def test_stop_reaches_the_next_master(unirun: Unirun, detached: Detached, now: tuple[str, ...]) -> None:
    pids = detached.pids()
    detached.lose_its_master()
    stopped = unirun("stop", *now)
    assert stopped.code == 0, stopped.err
    assert "stopped" in stopped.out
    assert not any(map(alive, pids))
    assert unirun.status()["phase"] == "stopped"
    unirun.assert_nothing_left()


def test_a_stop_outlives_the_master_that_received_it(unirun: Unirun, script: Script) -> None:
    """
    1. ``unirun stop`` with a long grace period reaches the master, and the workers get SIGTERM.
    2. The master is killed; the next one does not send SIGTERM again, which would kill the workers.
    3. The workers end, and ``unirun stop`` returns.
    """
    stubborn = script(
        """
        import os, pathlib, signal, sys, time
        def stop(*_):
            print("asked", flush=True)
            while not pathlib.Path("enough").exists():
                time.sleep(0.02)
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        print("line", 0, os.getpid(), flush=True)
        while True:
            signal.pause()
        """
    )
    detached = Detached(unirun, stubborn)
    stop = unirun.start("stop", "--grace", "600")
    for rank in range(2):
        eventually(lambda rank=rank: b"asked" in unirun.log("a", rank), "it is asked to end")  # type: ignore[misc]
    detached.lose_its_master()
    detached.masters.next()
    assert all(map(alive, detached.pids())), "asked twice, they would have been killed"
    assert stop.popen.poll() is None
    detached.enough()
    ended = stop.end(WAIT_TIMEOUT)
    assert ended.code == 0, ended.err
    assert unirun.status()["phase"] == "stopped"


def test_logs_are_followed_to_the_end_through_masters(unirun: Unirun, detached: Detached) -> None:
    """
    1. ``unirun logs -f`` follows the workers of a detached job.
    2. The master is killed, and lines keep coming under the next one.
    3. That master is killed too, the workers end, and the last line of each is shown.
    """
    follow = unirun.start("logs", "-f")
    follow.lines(r"^\[a:1\] line", 3)
    detached.lose_its_master()
    detached.masters.next()
    number = int(follow.lines(r"^\[a:1\] line (\d+)", 3)[-1])
    follow.lines(rf"^\[a:1\] line {number + 5} ")
    detached.lose_its_master()
    detached.enough()
    end = follow.end()
    assert end.code == 0, end.err
    assert end.out.count("the last") == 2


def test_a_handle_waits_through_the_death_of_a_master(unirun: Unirun, detached: Detached) -> None:
    with pytest.raises(TimeoutError):
        detached.handle.wait(0.1)
    detached.lose_its_master()
    detached.enough()
    assert detached.handle.wait(START_TIMEOUT) == 0


def test_a_handle_stops_a_job_that_has_just_lost_its_master(unirun: Unirun, detached: Detached) -> None:
    pids = detached.pids()
    detached.lose_its_master()
    began = time.monotonic()
    assert detached.handle.stop() == 143
    assert time.monotonic() - began < WAIT_TIMEOUT
    assert not any(map(alive, pids))
