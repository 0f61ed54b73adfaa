"""A master that fails by an exception of its own ends its term, and the next one hears of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.launcher.master.harness import (
    ELECTION_PREFIX,
    MasterHarness,
    receive_all,
    receive_until,
    worker_exited,
)
from tests.waiting import eventually_async
from unirun.errors import Fenced, StoreAway
from unirun.failover.crashes import STORY, abort_step, begin_abort
from unirun.failover.draft import Command, Event
from unirun.failover.state import JobPhase, JobState, Verdict
from unirun.failover.step import step
from unirun.launcher.master.shell import Core
from unirun.observe.events import read_events
from unirun.rendezvous.election import leader_of
from unirun.values import WorkerId
from unirun.wire.messages import (
    Attach,
    Ended,
    Shutdown,
)
from unirun.wire.reports import (
    FromWorker,
    Metrics,
    Notice,
    WorkerRunning,
    WorkerStarted,
)


class TestAnErrorOfItsOwn:
    def test_an_error_of_the_master_ends_the_term_and_is_kept_and_told(self, harness: MasterHarness) -> None:
        def breaks(state: JobState, event: Event, now: float) -> tuple[JobState, list[Command]]:
            if isinstance(event, Notice):
                raise KeyError("a bug")
            return step(state, event, now)

        harness.core = replace(harness.core, step=breaks)

        async def others() -> None:
            watcher, agent = await harness.greet(Attach()), await harness.agent()
            for number in range(20):
                agent.send(FromWorker(WorkerId("actor", 0, 0), Metrics({}, float(number))))
            agent.send(Notice("actor:0", "hm"))
            agent.send(worker_exited(0))
            told = await receive_all(watcher)
            assert not [each for each in told if isinstance(each, Ended)]
            assert isinstance(told[-1], Notice)
            assert told[-1].source == "master"
            assert told[-1].text.startswith("an error in the master of term 1: KeyError in ")
            assert told[-1].text.endswith("KeyError: 'a bug'; another master goes on")
            assert not [each for each in await receive_all(agent) if isinstance(each, Shutdown)]

        (crash,) = harness.run(others)
        assert (crash.epoch, crash.cause[:12]) == (1, "KeyError in ")
        assert 0 <= crash.lasted < 60
        assert crash.story[-1] == repr(Notice("actor:0", "hm"))
        assert len(crash.story) == STORY
        assert crash.story[-2] == repr(FromWorker(WorkerId("actor", 0, 0), Metrics({}, 19.0)))
        assert leader_of(harness.store, ELECTION_PREFIX) is not None, "the term is the next master's to end"
        (event,) = [each for each in read_events(harness.job.events) if each.kind == "master"]
        assert event.text.startswith("an error in the master of term 1: KeyError in ")
        assert (event.details["traceback"], event.details["story"]) == (crash.traceback, [*crash.story])
        assert "KeyError: 'a bug'" in crash.traceback

    def test_an_error_of_the_master_in_an_illegal_state_is_kept_with_what_has_led_to_that(
        self, harness: MasterHarness
    ) -> None:
        async def others() -> None:
            agent = await harness.agent()
            agent.send(WorkerStarted(WorkerId("actor", 0, 7), 5))
            await receive_all(agent)

        (crash,) = harness.run(others)
        assert crash.causes == ("start: the job starts, as n0 joined",)

    def test_an_error_of_the_master_of_its_writer_does_so_too(
        self, harness: MasterHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def others() -> None:
            agent = await harness.agent()
            await eventually_async(lambda: harness.status()["roles"][0]["phase"] == "running")
            harness.store.interfere = lambda: 1 / 0
            agent.send(worker_exited(0))
            await receive_all(agent)

        (crash,) = harness.run(others)
        assert crash.cause.startswith("ZeroDivisionError in ")

    def test_an_error_of_the_master_that_cannot_be_kept_is_said(
        self, harness: MasterHarness, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def away(_: object) -> None:
            raise StoreAway("it is away")

        harness.record_crash = away

        async def others() -> None:
            agent = await harness.agent()
            agent.send(WorkerRunning(WorkerId("nobody", 0, 0), 0))
            await receive_all(agent)

        assert harness.run(others) == []
        told = capsys.readouterr().err
        assert "unirun-master: an error in the master of term 1: IllegalTransition in " in told
        assert "unirun-master: the error is not in the store: it is away" in told

    def test_an_error_of_the_master_is_none_when_another_leads(self, harness: MasterHarness) -> None:
        async def others() -> None:
            agent = await harness.agent()
            await eventually_async(lambda: harness.status()["roles"][0]["phase"] == "running")

            def fenced() -> None:
                raise Fenced("another leads")

            harness.store.interfere = fenced
            agent.send(worker_exited(0))
            await receive_all(agent)

        assert harness.run(others) == []


def test_a_job_that_is_not_led_any_more_ends_without_waiting_for_writes(harness: MasterHarness) -> None:
    verdict = Verdict(JobPhase.FAILED, 1, "a bug", report="all about it")
    harness.core = Core(lambda state, now: begin_abort(state, verdict, now), abort_step, writes_first=False)
    harness.store.interfere = lambda: 1 / 0

    async def others() -> None:
        watcher = await harness.greet(Attach())
        agent = await harness.greet(harness.model.join("n0"))
        assert (await receive_until(agent, Shutdown))[-1] == Shutdown(30.0)
        await agent.close()
        assert (await receive_until(watcher, Ended))[-1] == Ended(1, "failed", "all about it", "")
        await watcher.close()

    assert harness.run(others) == []
