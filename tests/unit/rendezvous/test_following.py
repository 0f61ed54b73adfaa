"""A job is followed to its end through the deaths of its masters, and told once to stop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from tests.unit.rendezvous.fake_master import FakeJob, FakeMaster, Script
from tests.waiting import WAIT_TIMEOUT
from unirun.observe.status import JobStatus, write_status
from unirun.rendezvous import masters
from unirun.rendezvous.masters import follow_to_end
from unirun.wire.blocking import BlockingStream
from unirun.wire.messages import Attach, Ended, Stop
from unirun.wire.reports import Message

STOP = Stop(15, "unirun stop")


@pytest.fixture
def fake_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJob]:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    with FakeJob() as fake_job:
        stands(fake_job, "running")
        yield fake_job


def stands(fake_job: FakeJob, phase: str, epoch: int = 1) -> None:
    """The job stands so, as the master of a term says."""
    status = JobStatus("run-1", "job", phase, "", 1.0, None, None, (), epoch)
    write_status(fake_job.job_dir, status)


class Follower:
    """Somebody who follows the job in a thread of its own."""

    def __init__(
        self, fake_job: FakeJob, stop: Stop | None = None, *, timeout: float | None = WAIT_TIMEOUT
    ) -> None:
        self.found: list[JobStatus] = []
        self._thread = Thread(
            target=lambda: self.found.append(follow_to_end(fake_job.job_dir, stop, timeout)), daemon=True
        )
        self._thread.start()

    def join(self) -> JobStatus:
        self._thread.join(WAIT_TIMEOUT)
        (status,) = self.found
        return status


def heard(master: FakeMaster) -> Message:
    return master.heard.get(timeout=WAIT_TIMEOUT)


def ending(fake_job: FakeJob) -> Script:
    """The actions of a master in which the job ends at the first request."""

    def script(stream: BlockingStream) -> None:
        stream.receive()
        stands(fake_job, "succeeded")
        stream.send(Ended(0, "succeeded", ""))

    return script


@pytest.mark.parametrize("timeout", [WAIT_TIMEOUT, None])
def test_the_end_is_waited_for(fake_job: FakeJob, timeout: float | None) -> None:
    fake_job.leader(script=ending(fake_job))
    assert Follower(fake_job, timeout=timeout).join().phase == "succeeded"


def test_a_job_that_has_ended_needs_no_master(fake_job: FakeJob) -> None:
    stands(fake_job, "failed")
    assert follow_to_end(fake_job.job_dir, STOP, WAIT_TIMEOUT).phase == "failed"


def test_a_job_whose_processes_are_gone_is_lost(fake_job: FakeJob) -> None:
    follower = Follower(fake_job)
    fake_job.let_go()
    assert follower.join().phase == "lost"


def test_who_follows_does_not_stop_the_job(fake_job: FakeJob) -> None:
    follower = Follower(fake_job)
    for number in range(3):
        master = fake_job.leader(f"m{number}", deposing=number)
        assert heard(master) == Attach()
        master.die()
    stands(fake_job, "succeeded")
    assert follower.join().phase == "succeeded"


@pytest.mark.parametrize("phase", ["launching", "running", "stopping"])
def test_a_wish_to_stop_is_told_even_to_a_job_that_stops_already(fake_job: FakeJob, phase: str) -> None:
    stands(fake_job, phase)
    master = fake_job.leader()
    follower = Follower(fake_job, STOP)
    assert heard(master) == STOP
    stands(fake_job, "stopped")
    master.die()
    assert follower.join().phase == "stopped"


def test_a_wish_that_the_dead_master_has_written_is_not_told_again(fake_job: FakeJob) -> None:
    first = fake_job.leader()
    follower = Follower(fake_job, STOP)
    assert heard(first) == STOP
    stands(fake_job, "stopping")
    first.die()
    second = fake_job.leader("second", deposing=1)
    assert heard(second) == Attach()
    stands(fake_job, "stopped")
    second.die()
    assert follower.join().phase == "stopped"


def test_a_wish_that_has_died_with_its_master_is_told_to_the_next(fake_job: FakeJob) -> None:
    first = fake_job.leader()
    follower = Follower(fake_job, STOP)
    assert heard(first) == STOP
    first.die()
    second = fake_job.leader("second", deposing=1)
    assert heard(second) == STOP
    stands(fake_job, "stopped")
    second.die()
    assert follower.join().phase == "stopped"


def test_a_master_is_waited_for(fake_job: FakeJob) -> None:
    follower = Follower(fake_job, STOP)
    master = fake_job.leader()
    assert heard(master) == STOP
    stands(fake_job, "stopped")
    master.die()
    assert follower.join().phase == "stopped"


def test_following_raises_timeout_error_after_its_timeout(fake_job: FakeJob) -> None:
    with pytest.raises(TimeoutError, match=r"job run-1 has not ended within 0.1 s"):
        follow_to_end(fake_job.job_dir, timeout=0.1)
    fake_job.leader()
    with pytest.raises(TimeoutError):
        follow_to_end(fake_job.job_dir, timeout=0.1)


def test_a_master_that_hangs_is_left_for_the_one_that_has_told_since_how_the_job_stands(
    fake_job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masters, "SUCCESSOR_POLL_INTERVAL", 0.05)
    first = fake_job.leader()
    follower = Follower(fake_job, STOP)
    assert heard(first) == STOP
    stands(fake_job, "stopping")
    second = fake_job.leader("second", deposing=1, script=ending(fake_job))
    assert second.heard.empty()
    stands(fake_job, "stopping", epoch=2)
    assert follower.join().phase == "succeeded"
    first.die()
