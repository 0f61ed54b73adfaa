"""A job is followed to its end through the deaths of its masters, and told once to stop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from tests.unit.rendezvous.standin import PATIENCE, Place, Script, StandIn
from unirun.observe.status import JobStatus, write_status
from unirun.rendezvous import masters
from unirun.rendezvous.masters import follow_to_end
from unirun.wire.blocking import BlockingStream
from unirun.wire.messages import Attach, Ended, Message, Stop

STOP = Stop(15, "unirun stop")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    with Place() as place:
        stands(place, "running")
        yield place


def stands(place: Place, phase: str, epoch: int = 1) -> None:
    """The job stands so, as the master of a term says."""
    status = JobStatus("run-1", "job", phase, "", 1.0, None, None, (), epoch)
    write_status(place.job, status)


class Follower:
    """Somebody who follows the job in a thread of its own."""

    def __init__(self, place: Place, stop: Stop | None = None) -> None:
        self.found: list[JobStatus] = []
        self._thread = Thread(
            target=lambda: self.found.append(follow_to_end(place.job, stop, PATIENCE)), daemon=True
        )
        self._thread.start()

    def join(self) -> JobStatus:
        self._thread.join(PATIENCE)
        (status,) = self.found
        return status


def heard(master: StandIn) -> Message:
    return master.heard.get(timeout=PATIENCE)


def ending(place: Place) -> Script:
    """The actions of a master in which the job ends at the first request."""

    def script(stream: BlockingStream) -> None:
        stream.receive()
        stands(place, "succeeded")
        stream.send(Ended(0, "succeeded", ""))

    return script


def test_the_end_is_waited_for(place: Place) -> None:
    place.leader(script=ending(place))
    assert Follower(place).join().phase == "succeeded"


def test_a_job_that_has_ended_needs_no_master(place: Place) -> None:
    stands(place, "failed")
    assert follow_to_end(place.job, STOP, PATIENCE).phase == "failed"


def test_a_job_whose_processes_are_gone_is_lost(place: Place) -> None:
    follower = Follower(place)
    place.let_go()
    assert follower.join().phase == "lost"


def test_who_follows_does_not_stop_the_job(place: Place) -> None:
    follower = Follower(place)
    for number in range(3):
        master = place.leader(f"m{number}", deposing=number)
        assert heard(master) == Attach()
        master.die()
    stands(place, "succeeded")
    assert follower.join().phase == "succeeded"


@pytest.mark.parametrize("phase", ["launching", "running", "stopping"])
def test_a_wish_to_stop_is_told_even_to_a_job_that_stops_already(place: Place, phase: str) -> None:
    stands(place, phase)
    master = place.leader()
    follower = Follower(place, STOP)
    assert heard(master) == STOP
    stands(place, "stopped")
    master.die()
    assert follower.join().phase == "stopped"


def test_a_wish_that_the_dead_master_has_written_is_not_told_again(place: Place) -> None:
    first = place.leader()
    follower = Follower(place, STOP)
    assert heard(first) == STOP
    stands(place, "stopping")
    first.die()
    second = place.leader("second", deposing=1)
    assert heard(second) == Attach()
    stands(place, "stopped")
    second.die()
    assert follower.join().phase == "stopped"


def test_a_wish_that_has_died_with_its_master_is_told_to_the_next(place: Place) -> None:
    first = place.leader()
    follower = Follower(place, STOP)
    assert heard(first) == STOP
    first.die()
    second = place.leader("second", deposing=1)
    assert heard(second) == STOP
    stands(place, "stopped")
    second.die()
    assert follower.join().phase == "stopped"


def test_a_master_is_waited_for(place: Place) -> None:
    follower = Follower(place, STOP)
    master = place.leader()
    assert heard(master) == STOP
    stands(place, "stopped")
    master.die()
    assert follower.join().phase == "stopped"


def test_patience_ends(place: Place) -> None:
    with pytest.raises(TimeoutError, match=r"job run-1 has not ended within 0.1 s"):
        follow_to_end(place.job, timeout=0.1)
    place.leader()
    with pytest.raises(TimeoutError):
        follow_to_end(place.job, timeout=0.1)


def test_a_master_that_hangs_is_left_for_the_one_that_has_told_since_how_the_job_stands(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masters, "SUCCESSOR_POLL_INTERVAL", 0.05)
    first = place.leader()
    follower = Follower(place, STOP)
    assert heard(first) == STOP
    stands(place, "stopping")
    second = place.leader("second", deposing=1, script=ending(place))
    assert second.heard.empty()
    stands(place, "stopping", epoch=2)
    assert follower.join().phase == "succeeded"
    first.die()
