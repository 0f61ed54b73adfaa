"""The tasks beside a master: what was decided is written before it is done, and they end when the master does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.failover.context.faulty_store import FaultyStore
from tests.unit.failover.job import TERM, Job
from tests.waiting import WAIT_TIMEOUT, eventually_async
from unirun.errors import StoreAway
from unirun.failover.context import ContextStore, load
from unirun.failover.draft import Command, Record
from unirun.failover.state import JobPhase, JobState, Verdict
from unirun.launcher.master import writer as writing
from unirun.launcher.master.writer import StateWriter
from unirun.rendezvous.election import campaign, leader_of
from unirun.values import WorkerId
from unirun.wire.address import UnixAddress
from unirun.wire.messages import Stop
from unirun.wire.reports import WorkerStarted

ELECTION_PREFIX = "jobs/job-1/"


class WriterHarness:
    """A writer with its store, and what it has let be done."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.store = FaultyStore()
        term = campaign(self.store, ELECTION_PREFIX, UnixAddress("/x", "host"), 7, ttl=60)
        assert term is not None
        self.contexts = ContextStore(self.store, "job-1", term)
        self.contexts.create(job.state)
        self.done: list[Command] = []
        self.then: Callable[[], None] = lambda: None
        self.troubles: list[str] = []
        self.verdicts: list[Verdict] = []
        self.writer = StateWriter(
            job.state, term, self.contexts, self._do, self._changed, self.verdicts.append
        )
        self.over = asyncio.Event()

    def _do(self, commands: list[Command]) -> None:
        self.done += commands
        if commands:
            self.then()

    def _changed(self) -> None:
        self.troubles.append(self.writer.trouble)

    def decides(self, text: str) -> Record:
        """A step with a decision, from which a record follows."""
        rank = next(worker.rank for worker in self.job.state.roles["actor"].workers if worker.live)
        return self.steps(text, self.job.exits("actor", rank).state)

    def steps(self, text: str, state: JobState) -> Record:
        record = Record("test", text)
        self.writer.add(state, [record])
        return record


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, WAIT_TIMEOUT))


def stored(harness: WriterHarness) -> JobState:
    state = load(harness.store, "job-1")
    assert state is not None
    return state


@pytest.fixture
def harness() -> Iterator[WriterHarness]:
    made = WriterHarness(Job({"actor": 9}).running())
    yield made
    made.writer._thread.shutdown()


def test_what_follows_from_a_decision_is_done_when_it_is_written(harness: WriterHarness) -> None:
    seen: list[bool] = []
    harness.then = lambda: seen.append(not stored(harness).roles["actor"].workers[0].live)

    async def go() -> None:
        record = harness.decides("one")
        assert harness.done == []
        async with harness.writer.working(harness.over):
            await eventually_async(lambda: harness.done == [record])

    run(go())
    assert seen == [True]


def test_what_follows_from_no_decision_is_done_at_once(harness: WriterHarness) -> None:
    record = harness.steps("nothing", harness.job.state)
    assert harness.done == [record]


def test_steps_are_done_in_their_order(harness: WriterHarness) -> None:
    async def go() -> None:
        async with harness.writer.working(harness.over):
            records = [harness.decides(str(number)) for number in range(4)]
            await eventually_async(lambda: len(harness.done) >= 4)
            records += [harness.decides(str(number)) for number in range(4)]
            await eventually_async(lambda: len(harness.done) >= 8)
        assert harness.done == records

    run(go())


def test_a_master_whose_job_ends_while_more_is_to_be_written_ends_too(harness: WriterHarness) -> None:
    """`over` is set, and the writer woken, in one turn of the loop: neither news may swallow the other."""

    async def go() -> None:
        async with harness.writer.working(harness.over):
            harness.decides("the first is noted, too")
            await eventually_async(lambda: harness.writer._news_since is None)

            def both() -> None:
                harness.over.set()
                harness.writer._wake.set()

            harness.then = both
            harness.decides("the second ends the job")
            await harness.over.wait()

    run(go())
    assert stored(harness).roles["actor"].workers[1].exit is not None


def test_a_master_that_finds_the_job_ended_has_nothing_to_do(harness: WriterHarness) -> None:
    async def go() -> None:
        async with harness.writer.working(harness.over):
            pass

    # What other tests have left is not told here.
    gc.collect()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run(go())
        gc.collect()
    assert [str(each.message) for each in found] == []
    assert leader_of(harness.store, ELECTION_PREFIX) is None


def test_news_of_a_large_job_waits_longer(harness: WriterHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "NOTE_BYTES_PER_SECOND", harness.contexts.size / 100)

    async def go() -> None:
        async with harness.writer.working(harness.over):
            harness.steps("news", harness.job.on(WorkerStarted(WorkerId("actor", 0, 0), 7)).state)
            left = harness.writer._until_note()
            assert left is not None
            assert 90 < left <= 100
            record = harness.decides("one")
            await eventually_async(lambda: harness.done[-1:] == [record])
            assert stored(harness).roles["actor"].workers[0].pid == 7

    run(go())


def test_news_that_can_wait_is_written_soon(harness: WriterHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "NOTE_DELAY", 0.01)

    async def go() -> None:
        async with harness.writer.working(harness.over):
            for pid in (7, 8):
                harness.store.written.clear()
                harness.steps("news", harness.job.on(WorkerStarted(WorkerId("actor", 0, 0), pid)).state)
                await eventually_async(lambda: harness.store.written != [])
                assert len(harness.store.written) == 1
                assert stored(harness).roles["actor"].workers[0].pid == pid

    run(go())


def test_news_that_comes_while_news_is_written_is_written_soon_too(
    harness: WriterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "NOTE_DELAY", 0.01)
    pids = iter(range(8, 12))

    async def go() -> None:
        loop = asyncio.get_running_loop()

        def tell() -> None:
            if (pid := next(pids, 0)) != 0:
                harness.steps("news", harness.job.on(WorkerStarted(WorkerId("actor", 0, 0), pid)).state)

        def interfere() -> None:
            told = threading.Event()
            loop.call_soon_threadsafe(tell)
            loop.call_soon_threadsafe(told.set)
            assert told.wait(WAIT_TIMEOUT)

        async with harness.writer.working(harness.over):
            harness.store.interfere = interfere
            harness.steps("news", harness.job.on(WorkerStarted(WorkerId("actor", 0, 0), 7)).state)
            await eventually_async(lambda: stored(harness).roles["actor"].workers[0].pid == 11)

    run(go())


def test_it_leads_until_all_is_said(harness: WriterHarness) -> None:
    async def go() -> None:
        async with harness.writer.working(harness.over):
            harness.over.set()
            await asyncio.sleep(0)
            assert leader_of(harness.store, ELECTION_PREFIX) is not None
        assert leader_of(harness.store, ELECTION_PREFIX) is None

    run(go())


def test_what_is_left_is_written_at_the_end(harness: WriterHarness) -> None:
    async def go() -> None:
        async with harness.writer.working(harness.over):
            harness.decides("late")

    run(go())
    assert not stored(harness).roles["actor"].workers[0].live


class TestAStoreThatIsAway:
    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(writing, "RETRY_DELAY", 0.001)
        monkeypatch.setattr(writing, "MAX_RETRY_DELAY", 0.004)

    def test_an_unreachable_store_is_tried_again_until_it_is_back(
        self, harness: WriterHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said: list[str] = []
        monkeypatch.setattr(writing, "report", said.append)
        harness.store.faults.extend(["away", "away", "lost", "lost", "away", "done"])

        async def go() -> None:
            async with harness.writer.working(harness.over):
                record = harness.decides("one")
                await eventually_async(lambda: harness.done == [record])

        run(go())
        assert harness.troubles == [
            "it is away; decisions wait until it can be written",
            *harness.troubles[1:],
        ]
        assert harness.troubles[-1] == harness.writer.trouble == ""
        store = "unirun-master: store"
        assert said[0] == f"{store}: it is away; decisions wait until it can be written"
        assert said[-1] == f"{store}: it is back"
        assert all(text != later for text, later in pairwise(said)), "one thing is said again"

    def test_a_store_that_takes_writes_and_renews_no_term_is_not_back(
        self, harness: WriterHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        renewing = threading.Event()

        class Term:
            """The term, of which the lease cannot be renewed until `renewing`."""

            ttl = 0.003

            @staticmethod
            def keep() -> None:
                if not renewing.is_set():
                    raise StoreAway("its leases are away")

            resign = harness.writer._term.resign

        monkeypatch.setattr(harness.writer, "_term", Term)

        async def go() -> None:
            async with harness.writer.working(harness.over):
                await eventually_async(lambda: harness.writer.trouble != "")
                records = [harness.decides(str(number)) for number in range(3)]
                await eventually_async(lambda: harness.done == records)
                assert {*harness.troubles} == {"its leases are away; decisions wait until it can be written"}
                renewing.set()
                await eventually_async(lambda: harness.writer.trouble == "")

        run(go())

    @pytest.fixture
    def back(self, harness: WriterHarness) -> threading.Event:
        """The store is away until this is set."""
        back = threading.Event()

        def refuse() -> None:
            if not back.is_set():
                harness.store.faults.append("away")

        harness.store.interfere = refuse
        return back

    def test_an_unreachable_store_holds_everything_back_but_the_end_that_somebody_wants(
        self, harness: WriterHarness, back: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writing, "STOP_WRITE_TIMEOUT", 0.02)

        async def go() -> None:
            async with harness.writer.working(harness.over):
                one = harness.decides("one")
                await eventually_async(lambda: harness.writer.trouble != "")
                two = harness.decides("two")
                assert harness.done == []
                stop = harness.steps("stop", harness.job.on(Stop(TERM, "enough")).state)
                await eventually_async(lambda: harness.verdicts != [])
                assert harness.done == [one, two, stop]
                last = harness.decides("last")
                assert harness.done == [one, two, stop, last], "from now on nothing waits"
                back.set()
                await eventually_async(lambda: harness.writer.trouble == "")

        run(go())
        assert [verdict.reason for verdict in harness.verdicts] == ["enough"]
        assert stored(harness).phase is JobPhase.STOPPING

    def test_an_unreachable_store_that_has_been_away_for_long_does_not_hold_up_a_stop_any_longer(
        self, harness: WriterHarness, back: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def go() -> None:
            async with harness.writer.working(harness.over):
                harness.decides("one")
                await eventually_async(lambda: harness.writer.trouble != "")
                monkeypatch.setattr(writing, "STOP_WRITE_TIMEOUT", 0.0)
                harness.steps("stop", harness.job.on(Stop(TERM, "enough")).state)
                await eventually_async(lambda: harness.verdicts != [])
                back.set()

        run(go())

    def test_an_unreachable_store_holds_an_end_back_that_nobody_wants_until_it_has_been_away_for_long(
        self, harness: WriterHarness, back: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writing, "STOP_WRITE_TIMEOUT", 0.0)

        async def go() -> None:
            async with harness.writer.working(harness.over):
                one = harness.decides("one")
                end = harness.steps("end", harness.job.exits("actor", 1, 1).state)
                await eventually_async(lambda: harness.writer.trouble != "")
                tried = harness.store.asked
                await eventually_async(lambda: harness.store.asked > tried + 3)
                assert harness.done == []
                monkeypatch.setattr(writing, "END_WRITE_TIMEOUT", 0.0)
                more = harness.decides("more")
                await eventually_async(lambda: harness.done == [one, end, more])
                back.set()
                await eventually_async(lambda: harness.writer.trouble == "")

        run(go())
        assert len(harness.done) == 3, "it was done once"
        assert len(harness.verdicts) == 1
        assert stored(harness).phase is JobPhase.STOPPING

    def test_a_store_that_has_answered_a_moment_ago_holds_an_end_back_for_as_long_as_any(
        self, harness: WriterHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Though something has waited for it without a break."""
        now = 1000.0
        clock: Any = SimpleNamespace(monotonic=lambda: now)
        monkeypatch.setattr(writing, "time", clock)

        async def go() -> None:
            nonlocal now
            harness.decides("one")
            target = harness.writer._ledger.due
            assert target is not None
            harness.steps("end", harness.job.exits("actor", 1, 1).state)
            now += writing.END_WRITE_TIMEOUT - 1
            assert harness.writer._until_unwritten() == 1.0
            await harness.writer._bring_to(target)
            assert harness.writer._until_unwritten() == writing.END_WRITE_TIMEOUT

        run(go())

    def test_an_unreachable_store_holds_back_what_is_no_end_however_long_it_has_been_away(
        self, harness: WriterHarness, back: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writing, "END_WRITE_TIMEOUT", 0.0)

        async def go() -> None:
            async with harness.writer.working(harness.over):
                record = harness.decides("one")
                await eventually_async(lambda: harness.store.asked > 5)
                assert harness.done == []
                back.set()
                await eventually_async(lambda: harness.done == [record])

        run(go())
        assert harness.verdicts == []

    def test_an_unreachable_store_and_that_does_not_answer_holds_the_end_back_for_a_moment_only(
        self, harness: WriterHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writing, "STOP_WRITE_TIMEOUT", 0.02)
        answers = threading.Event()
        harness.store.interfere = lambda: answers.wait(WAIT_TIMEOUT)

        async def go() -> None:
            async with harness.writer.working(harness.over):
                one = harness.decides("one")
                stop = harness.steps("stop", harness.job.on(Stop(TERM, "enough")).state)
                assert harness.done == []
                await eventually_async(lambda: harness.done == [one, stop])
                answers.set()

        run(go())
        assert len(harness.verdicts) == 1
        assert stored(harness).phase is JobPhase.STOPPING

    def test_an_unreachable_store_and_a_disk_that_is_full_of_what_it_says_hold_nothing_back_once_there_is_room(
        self, harness: WriterHarness, back: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The job's directory holds the store and the master's log."""
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stderr", full)

            async def go() -> None:
                async with harness.writer.working(harness.over):
                    record = harness.decides("one")
                    await eventually_async(lambda: harness.store.asked > 5)
                    back.set()
                    await eventually_async(lambda: harness.done == [record])
                    assert not harness.over.is_set()

            run(go())
            monkeypatch.undo()
            with contextlib.suppress(OSError):
                full.close()


class TestAMasterThatIsDeposed:
    def test_a_deposed_master_does_nothing_more_and_leaves(self, harness: WriterHarness) -> None:
        async def go() -> None:
            async with harness.writer.working(harness.over):
                assert campaign(
                    harness.store, ELECTION_PREFIX, UnixAddress("/y", "host"), 8, ttl=60, deposing=1
                )
                harness.decides("late")
                await harness.over.wait()
                assert harness.writer.deposed

        run(go())
        assert harness.done == []
        leader = leader_of(harness.store, ELECTION_PREFIX)
        assert leader is not None
        assert leader.epoch == 2, "it does not resign for another"

    def test_a_deposed_master_learns_it_though_it_has_nothing_to_write(self, harness: WriterHarness) -> None:
        harness.writer._term.ttl = 0.03

        async def go() -> None:
            async with harness.writer.working(harness.over):
                assert campaign(
                    harness.store, ELECTION_PREFIX, UnixAddress("/y", "host"), 8, ttl=60, deposing=1
                )
                await harness.over.wait()

        run(go())
        assert harness.writer.deposed

    @pytest.mark.parametrize("stderr", ["open", "full", "closed"])
    def test_a_deposed_master_is_also_one_that_cannot_go_on_for_another_reason(
        self, harness: WriterHarness, monkeypatch: pytest.MonkeyPatch, stderr: str
    ) -> None:
        monkeypatch.setattr(harness.contexts, "write", lambda *_, **__: 1 / 0)
        file = open("/dev/full" if stderr == "full" else "/dev/null", "w")
        monkeypatch.setattr(sys, "stderr", file)
        if stderr == "closed":
            file.close()

        async def go() -> None:
            async with harness.writer.working(harness.over):
                harness.decides("one")
                await harness.over.wait()

        run(go())
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            file.close()
        assert harness.done == []
        assert harness.writer.deposed
        assert isinstance(harness.writer.error, ZeroDivisionError)
        assert stored(harness).roles["actor"].workers[0].live, (
            "what was not written is for the next master to decide"
        )
        assert leader_of(harness.store, ELECTION_PREFIX) is not None, (
            "it does not say that it has left in good order"
        )

    def test_a_deposed_master_is_not_one_that_cannot_write_the_end_which_goes_on_unwritten(
        self, harness: WriterHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said = io.StringIO()
        monkeypatch.setattr(sys, "stderr", said)
        monkeypatch.setattr(harness.contexts, "write", lambda *_: 1 / 0)
        harness.writer.unwritten = True

        async def go() -> None:
            async with harness.writer.working(harness.over):
                one, two = harness.decides("one"), harness.decides("two")
                assert harness.done == [one, two]
                await eventually_async(lambda: "ZeroDivisionError" in said.getvalue())
                await asyncio.sleep(0)
                assert harness.done == [one, two, harness.decides("three")]

        run(go())
        assert not harness.over.is_set()
        assert not harness.writer.deposed
        assert harness.writer.error is None
