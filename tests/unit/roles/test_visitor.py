"""A process outside the job follows its roles from one master to the next, and leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.rendezvous.fake_master import FakeJob, FakeMaster, Script
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import FrameError, JobError, RendezvousError, UsageError, WorkerLost
from unirun.observe.status import JobStatus, read_status, write_status
from unirun.rendezvous import masters
from unirun.roles.visitor import Visitor
from unirun.wire.blocking import BlockingStream
from unirun.wire.messages import Attach, Ended, Grow, RoleView, View, Visit, Welcome, WorkerView
from unirun.wire.reports import Message, ViewWanted


def view(ranks: int, number: int = 0, since: int | None = None) -> View:
    workers = tuple(WorkerView(rank, 0, "serving", {}) for rank in range(ranks))
    return View((RoleView("worker", ranks, 0, "", "running", workers),), number, since)


def welcome(ranks: int = 2, transport: str = "socket") -> Welcome:
    return Welcome(view(ranks), "{}", "job", (), (), 60.0, transport)


def greets(message: Message, *more: Message) -> Script:
    """The actions of a master that answers a visitor."""

    def script(stream: BlockingStream) -> None:
        assert stream.receive() == Visit()
        for each in (message, *more):
            stream.send(each)

    return script


@pytest.fixture
def fake_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJob]:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    with FakeJob() as fake_job:
        stands(fake_job, "running")
        yield fake_job


@pytest.fixture
def visit(fake_job: FakeJob) -> Iterator[Callable[[], Visitor]]:
    """Visits the job; a visitor that has left has no thread any more."""
    visitors: list[Visitor] = []

    def go() -> Visitor:
        visitors.append(Visitor(fake_job.job_dir))
        return visitors[-1]

    yield go
    for each in visitors:
        each.close()
    assert "unirun-visitor" not in {thread.name for thread in threading.enumerate()}


def stands(fake_job: FakeJob, phase: str, epoch: int = 1) -> None:
    """The job stands so, as the master of a term says."""
    write_status(fake_job.job_dir, JobStatus("run-1", "job", phase, "", 1.0, None, None, (), epoch))


class Counted:
    """A function, and the number of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.number = function, 0

    def __call__(self, *args: Any) -> Any:
        self.number += 1
        return self._function(*args)


def heard(master: FakeMaster) -> Message:
    return master.heard.get(timeout=WAIT_TIMEOUT)


def becomes(visitor: Visitor, size: int) -> bool:
    return visitor.peers.wait_for(lambda: visitor.peers.size("worker") == size, WAIT_TIMEOUT)


class TestARole:
    def test_its_group_has_all_its_workers(self, fake_job: FakeJob, visit: Callable[[], Visitor]) -> None:
        fake_job.leader(script=greets(welcome(3)))
        visitor = visit()
        assert len(visitor.role_group("worker")) == 3
        assert visitor.role_group("worker") is visitor.role_group("worker")

    def test_a_role_of_another_size_has_another_group(
        self, fake_job: FakeJob, visit: Callable[[], Visitor]
    ) -> None:
        fake_job.leader(script=greets(welcome(2), view(5, 1)))
        visitor = visit()
        assert becomes(visitor, 5)
        assert len(visitor.role_group("worker")) == 5
        visitor.peers.update(view(3, 2))
        assert len(visitor.role_group("worker")) == 3

    def test_one_that_the_job_does_not_have_is_told(
        self, fake_job: FakeJob, visit: Callable[[], Visitor]
    ) -> None:
        fake_job.leader(script=greets(welcome()))
        with pytest.raises(UsageError, match="wokrer"):
            visit().role_group("wokrer")

    def test_more_workers_are_asked_of_the_master(
        self, fake_job: FakeJob, visit: Callable[[], Visitor]
    ) -> None:
        master = fake_job.leader(script=greets(welcome()))
        visit().grow("worker")
        assert heard(master) == Grow("worker")

    def test_a_view_that_was_missed_is_asked_for(
        self, fake_job: FakeJob, visit: Callable[[], Visitor]
    ) -> None:
        master = fake_job.leader(script=greets(welcome(), view(2, 7, since=6)))
        visit()
        assert heard(master) == ViewWanted()


class TestMasters:
    def test_it_goes_on_with_the_next_one(self, fake_job: FakeJob, visit: Callable[[], Visitor]) -> None:
        master = fake_job.leader(script=greets(welcome(2)))
        visitor = visit()
        for number in (1, 2):
            successor = fake_job.leader(f"m{number}", deposing=number, script=greets(welcome(2 + number)))
            stands(fake_job, "running", number + 1)
            master.die()
            master = successor
            assert becomes(visitor, 2 + number)

    def test_it_leaves_one_that_hangs_when_another_leads(
        self, fake_job: FakeJob, visit: Callable[[], Visitor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(masters, "SUCCESSOR_POLL_INTERVAL", 0.02)
        looks = Counted(read_status)
        monkeypatch.setattr(masters, "read_status", looks)
        fake_job.leader(script=greets(welcome(2)))
        visitor = visit()
        for term in (2, 3):
            # A master takes its term before it writes the status.
            leader = fake_job.leader(f"m{term}", deposing=term - 1, script=greets(welcome(1 + term)))
            stands(fake_job, "running", term)
            assert becomes(visitor, 1 + term)
            before = looks.number
            eventually(lambda before=before: looks.number > before + 2, "it looks for others")  # type: ignore[misc]
            assert leader.visits == 1, "it stays with the one that leads"

    def test_it_goes_on_when_the_status_of_the_job_cannot_be_read(
        self, fake_job: FakeJob, visit: Callable[[], Visitor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(masters, "SUCCESSOR_POLL_INTERVAL", 0.02)
        master = fake_job.leader(script=greets(welcome()))
        visit()
        fake_job.job_dir.state.unlink()
        eventually(lambda: master.visits > 1, "it visits the master again", within=10.0)
        stands(fake_job, "running")

    def test_asking_one_that_is_gone_for_more_workers_is_no_error(
        self, fake_job: FakeJob, visit: Callable[[], Visitor]
    ) -> None:
        master = fake_job.leader(script=greets(welcome()))
        visitor = visit()
        master.die()
        visitor.grow("worker")

    def test_without_one_it_is_told(self, fake_job: FakeJob, visit: Callable[[], Visitor]) -> None:
        with pytest.raises(RendezvousError):
            visit()

    def test_one_that_answers_something_else_is_told(
        self, fake_job: FakeJob, visit: Callable[[], Visitor]
    ) -> None:
        fake_job.leader(script=greets(Attach()))
        with pytest.raises(FrameError, match="sent Attach where a Welcome was expected"):
            visit()

    def test_calls_that_let_in_nobody_else_are_told(
        self, fake_job: FakeJob, visit: Callable[[], Visitor]
    ) -> None:
        fake_job.leader(script=greets(welcome(transport="torch")))
        with pytest.raises(
            UsageError, match=r"run-1 are called over torch, .*; start it with --transport socket"
        ):
            visit()


class TestTheEnd:
    def test_when_the_job_ends_nobody_answers_any_more(
        self, fake_job: FakeJob, visit: Callable[[], Visitor]
    ) -> None:
        fake_job.leader(script=greets(welcome(), Ended(0, "succeeded", "")))
        visitor = visit()
        assert visitor.peers.wait_for(lambda: visitor.peers.find("worker", 0).over, WAIT_TIMEOUT)
        with pytest.raises(WorkerLost, match="has ended"):
            visitor.role_group("worker").anything()
        # The stream is closed, since the master waits for that.
        visitor._thread.join(WAIT_TIMEOUT)
        assert not visitor._thread.is_alive()

    def test_a_job_that_has_ended_without_a_word_is_over(
        self, fake_job: FakeJob, visit: Callable[[], Visitor]
    ) -> None:
        master = fake_job.leader(script=greets(welcome()))
        visitor = visit()
        stands(fake_job, "failed")
        master.die()
        assert visitor.peers.wait_for(lambda: visitor.peers.find("worker", 1).over, WAIT_TIMEOUT)

    def test_one_that_has_ended_before_cannot_be_visited(
        self, fake_job: FakeJob, visit: Callable[[], Visitor]
    ) -> None:
        stands(fake_job, "succeeded")
        with pytest.raises(
            JobError, match="job run-1 has succeeded, so it has no workers; attach to one that runs"
        ):
            visit()

    def test_who_leaves_while_there_is_no_master_does_not_wait_for_one(
        self, fake_job: FakeJob, visit: Callable[[], Visitor]
    ) -> None:
        """The fixture looks whether its thread has ended."""
        master = fake_job.leader(script=greets(welcome()))
        visitor = visit()
        master.die()
        visitor.close()

    def test_who_leaves_while_it_is_let_in_by_the_next_one_keeps_no_stream_to_it(
        self, fake_job: FakeJob, visit: Callable[[], Visitor]
    ) -> None:
        visited, let_in = threading.Event(), threading.Event()

        def hesitate(stream: BlockingStream) -> None:
            visited.set()
            assert let_in.wait(WAIT_TIMEOUT)
            greets(welcome())(stream)

        master = fake_job.leader(script=greets(welcome()))
        visitor = visit()
        fake_job.leader("m1", deposing=1, script=hesitate)
        master.die()
        assert visited.wait(WAIT_TIMEOUT)
        leaves = threading.Thread(target=visitor.close)
        leaves.start()
        eventually(lambda: visitor._closed, "it leaves")
        let_in.set()
        leaves.join(WAIT_TIMEOUT)
        assert visitor._stream.socket.fileno() == -1
