"""The tasks beside a master: what was decided is written before it is done, and they end when the master does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import sys
import threading
import warnings

import pytest

from tests.unit.failover.job import TERM, Job
from tests.unit.failover.persistence.desk import PATIENCE, SEAT, Desk, run, stored
from unirun.failover.state import JobPhase
from unirun.launcher.master import writer as writing
from unirun.rendezvous.election import campaign, leader_of
from unirun.values import WorkerId
from unirun.wire.address import UnixAddress
from unirun.wire.messages import Stop
from unirun.wire.reports import WorkerStarted


@pytest.fixture
def desk() -> Desk:
    return Desk(Job({"actor": 9}).running())


def test_what_follows_from_a_decision_is_done_when_it_is_written(desk: Desk) -> None:
    seen: list[bool] = []
    desk.then = lambda: seen.append(not stored(desk).roles["actor"].workers[0].live)

    async def go() -> None:
        record = desk.decides("one")
        assert desk.done == []
        async with desk.writer.working(desk.over):
            await desk.until(lambda: desk.done == [record])

    run(go())
    assert seen == [True]


def test_what_follows_from_no_decision_is_done_at_once(desk: Desk) -> None:
    record = desk.steps("nothing", desk.job.state)
    assert desk.done == [record]


def test_steps_are_done_in_their_order(desk: Desk) -> None:
    async def go() -> None:
        async with desk.writer.working(desk.over):
            records = [desk.decides(str(number)) for number in range(4)]
            await desk.until(lambda: len(desk.done) >= 4)
            records += [desk.decides(str(number)) for number in range(4)]
            await desk.until(lambda: len(desk.done) >= 8)
        assert desk.done == records

    run(go())


def test_a_master_whose_job_ends_while_more_is_to_be_written_ends_too(desk: Desk) -> None:
    """`over` is set, and the writer woken, in one turn of the loop: neither news may swallow the other."""

    async def go() -> None:
        async with desk.writer.working(desk.over):
            desk.decides("the first is noted, too")
            await desk.until(lambda: desk.writer._news_since is None)

            def both() -> None:
                desk.over.set()
                desk.writer._wake.set()

            desk.then = both
            desk.decides("the second ends the job")
            await desk.over.wait()

    run(go())
    assert stored(desk).roles["actor"].workers[1].exit is not None


def test_a_master_that_finds_the_job_ended_has_nothing_to_do(desk: Desk) -> None:
    async def go() -> None:
        async with desk.writer.working(desk.over):
            pass

    # What other tests have left is not told here.
    gc.collect()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run(go())
        gc.collect()
    assert [str(each.message) for each in found] == []
    assert leader_of(desk.store, SEAT) is None


def test_news_that_can_wait_is_written_without_what_is_there(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "NOTE_DELAY", 0.01)

    async def go() -> None:
        async with desk.writer.working(desk.over):
            for pid in (7, 8):
                desk.store.written.clear()
                desk.steps("news", desk.job.on(WorkerStarted(WorkerId("actor", 0, 0), pid)).state)
                await desk.until(lambda: desk.store.written != [])
                ((puts, _),) = desk.store.written
                assert "jobs/job-1/context/ranks/actor/0" in puts
                assert "jobs/job-1/context/spec/0" not in puts

    run(go())


def test_it_leads_until_all_is_said(desk: Desk) -> None:
    async def go() -> None:
        async with desk.writer.working(desk.over):
            desk.over.set()
            await asyncio.sleep(0)
            assert leader_of(desk.store, SEAT) is not None
        assert leader_of(desk.store, SEAT) is None

    run(go())


def test_what_is_left_is_written_at_the_end(desk: Desk) -> None:
    async def go() -> None:
        async with desk.writer.working(desk.over):
            desk.decides("late")

    run(go())
    assert not stored(desk).roles["actor"].workers[0].live


class TestAStoreThatIsAway:
    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(writing, "RETRY_DELAY", 0.001)
        monkeypatch.setattr(writing, "MAX_RETRY_DELAY", 0.004)

    def test_an_unreachable_store_is_tried_again_until_it_is_back(self, desk: Desk) -> None:
        desk.store.faults.extend(["away", "away", "lost", "lost", "away", "done"])

        async def go() -> None:
            async with desk.writer.working(desk.over):
                record = desk.decides("one")
                await desk.until(lambda: desk.done == [record])

        run(go())
        assert desk.troubles == ["it is away; decisions wait until it can be written", *desk.troubles[1:]]
        assert desk.troubles[-1] == desk.writer.trouble == ""

    @pytest.fixture
    def back(self, desk: Desk) -> threading.Event:
        """The store is away until this is set."""
        back = threading.Event()

        def refuse() -> None:
            if not back.is_set():
                desk.store.faults.append("away")

        desk.store.interfere = refuse
        return back

    def test_an_unreachable_store_holds_everything_back_but_the_end_that_somebody_wants(
        self, desk: Desk, back: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writing, "STOP_WRITE_TIMEOUT", 0.02)

        async def go() -> None:
            async with desk.writer.working(desk.over):
                one = desk.decides("one")
                await desk.until(lambda: desk.writer.trouble != "")
                two = desk.decides("two")
                assert desk.done == []
                stop = desk.steps("stop", desk.job.on(Stop(TERM, "enough")).state)
                await desk.until(lambda: desk.verdicts != [])
                assert desk.done == [one, two, stop]
                last = desk.decides("last")
                assert desk.done == [one, two, stop, last], "from now on nothing waits"
                back.set()
                await desk.until(lambda: desk.writer.trouble == "")

        run(go())
        assert [verdict.reason for verdict in desk.verdicts] == ["enough"]
        assert stored(desk).phase is JobPhase.STOPPING

    def test_an_unreachable_store_that_has_been_away_for_long_does_not_hold_up_a_stop_any_longer(
        self, desk: Desk, back: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def go() -> None:
            async with desk.writer.working(desk.over):
                desk.decides("one")
                await desk.until(lambda: desk.writer.trouble != "")
                monkeypatch.setattr(writing, "STOP_WRITE_TIMEOUT", 0.0)
                desk.steps("stop", desk.job.on(Stop(TERM, "enough")).state)
                await desk.until(lambda: desk.verdicts != [])
                back.set()

        run(go())

    def test_an_unreachable_store_holds_an_end_back_that_nobody_wants_until_it_has_been_away_for_long(
        self, desk: Desk, back: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writing, "STOP_WRITE_TIMEOUT", 0.0)

        async def go() -> None:
            async with desk.writer.working(desk.over):
                one = desk.decides("one")
                end = desk.steps("end", desk.job.exits("actor", 1, 1).state)
                await desk.until(lambda: desk.writer.trouble != "")
                tried = desk.store.asked
                await desk.until(lambda: desk.store.asked > tried + 3)
                assert desk.done == []
                monkeypatch.setattr(writing, "END_WRITE_TIMEOUT", 0.0)
                more = desk.decides("more")
                await desk.until(lambda: desk.done == [one, end, more])
                back.set()
                await desk.until(lambda: desk.writer.trouble == "")

        run(go())
        assert len(desk.done) == 3, "it was done once"
        assert len(desk.verdicts) == 1
        assert stored(desk).phase is JobPhase.STOPPING

    def test_an_unreachable_store_holds_back_what_is_no_end_however_long_it_has_been_away(
        self, desk: Desk, back: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writing, "END_WRITE_TIMEOUT", 0.0)

        async def go() -> None:
            async with desk.writer.working(desk.over):
                record = desk.decides("one")
                await desk.until(lambda: desk.store.asked > 5)
                assert desk.done == []
                back.set()
                await desk.until(lambda: desk.done == [record])

        run(go())
        assert desk.verdicts == []

    def test_an_unreachable_store_and_that_does_not_answer_holds_the_end_back_for_a_moment_only(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writing, "STOP_WRITE_TIMEOUT", 0.02)
        answers = threading.Event()
        desk.store.interfere = lambda: answers.wait(PATIENCE)

        async def go() -> None:
            async with desk.writer.working(desk.over):
                one = desk.decides("one")
                stop = desk.steps("stop", desk.job.on(Stop(TERM, "enough")).state)
                assert desk.done == []
                await desk.until(lambda: desk.done == [one, stop])
                answers.set()

        run(go())
        assert len(desk.verdicts) == 1
        assert stored(desk).phase is JobPhase.STOPPING

    def test_an_unreachable_store_and_a_disk_that_is_full_of_what_it_says_hold_nothing_back_once_there_is_room(
        self, desk: Desk, back: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The job's directory holds the store and the master's log."""
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stderr", full)

            async def go() -> None:
                async with desk.writer.working(desk.over):
                    record = desk.decides("one")
                    await desk.until(lambda: desk.store.asked > 5)
                    back.set()
                    await desk.until(lambda: desk.done == [record])
                    assert not desk.over.is_set()

            run(go())
            monkeypatch.undo()
            with contextlib.suppress(OSError):
                full.close()


class TestAMasterThatIsDeposed:
    def test_a_deposed_master_does_nothing_more_and_leaves(self, desk: Desk) -> None:
        async def go() -> None:
            async with desk.writer.working(desk.over):
                assert campaign(desk.store, SEAT, UnixAddress("/y", "host"), 8, ttl=60, deposing=1)
                desk.decides("late")
                await desk.over.wait()
                assert desk.writer.deposed

        run(go())
        assert desk.done == []
        leader = leader_of(desk.store, SEAT)
        assert leader is not None
        assert leader.epoch == 2, "it does not resign for another"

    def test_a_deposed_master_learns_it_though_it_has_nothing_to_write(self, desk: Desk) -> None:
        desk.writer._term.ttl = 0.03

        async def go() -> None:
            async with desk.writer.working(desk.over):
                assert campaign(desk.store, SEAT, UnixAddress("/y", "host"), 8, ttl=60, deposing=1)
                await desk.over.wait()

        run(go())
        assert desk.writer.deposed

    @pytest.mark.parametrize("stderr", ["open", "full", "closed"])
    def test_a_deposed_master_is_also_one_that_cannot_go_on_for_another_reason(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch, stderr: str
    ) -> None:
        monkeypatch.setattr(desk.contexts, "write", lambda *_, **__: 1 / 0)
        file = open("/dev/full" if stderr == "full" else "/dev/null", "w")
        monkeypatch.setattr(sys, "stderr", file)
        if stderr == "closed":
            file.close()

        async def go() -> None:
            async with desk.writer.working(desk.over):
                desk.decides("one")
                await desk.over.wait()

        run(go())
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            file.close()
        assert desk.done == []
        assert desk.writer.deposed
        assert isinstance(desk.writer.error, ZeroDivisionError)
        assert stored(desk).roles["actor"].workers[0].live, (
            "what was not written is for the next master to decide"
        )
        assert leader_of(desk.store, SEAT) is not None, "it does not say that it has left in good order"

    def test_a_deposed_master_is_not_one_that_cannot_write_the_end_which_goes_on_unwritten(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said = io.StringIO()
        monkeypatch.setattr(sys, "stderr", said)
        monkeypatch.setattr(desk.contexts, "write", lambda *_: 1 / 0)
        desk.writer.unwritten = True

        async def go() -> None:
            async with desk.writer.working(desk.over):
                one, two = desk.decides("one"), desk.decides("two")
                assert desk.done == [one, two]
                await desk.until(lambda: "ZeroDivisionError" in said.getvalue())
                await asyncio.sleep(0)
                assert desk.done == [one, two, desk.decides("three")]

        run(go())
        assert not desk.over.is_set()
        assert not desk.writer.deposed
        assert desk.writer.error is None
