"""A master with its sockets: whom it tells what, above all at its end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unit.failover.job import Job
from tests.unit.launcher.master.harness import (
    ELECTION_PREFIX,
    MasterHarness,
    end_well,
    receive_all,
    receive_until,
)
from tests.waiting import eventually_async
from unirun.failover.context import load
from unirun.launcher.master import shell
from unirun.launcher.master.notifying import Notifier
from unirun.observe.events import LoggedEvent, read_events
from unirun.rendezvous.election import campaign, leader_of
from unirun.values import WorkerId
from unirun.wire.address import UnixAddress
from unirun.wire.messages import Attach, Ended, ExitAck, Shutdown, StopWorkers
from unirun.wire.reports import WorkerExited


def worker_exited(rank: int, code: int) -> WorkerExited:
    return WorkerExited(WorkerId("actor", rank, 0), 1.0, code, None, "own")


@pytest.fixture
def harness(tmp_path: Path) -> MasterHarness:
    return MasterHarness(tmp_path)


def test_at_the_end_of_the_job_everybody_is_told_and_the_seat_is_free(harness: MasterHarness) -> None:
    async def others() -> None:
        watcher = await harness.greet(Attach())
        agent = await harness.agent()
        for rank in (0, 1):
            agent.send(worker_exited(rank, 0))
        assert (await receive_until(agent, Shutdown))[-1] == Shutdown()
        (finished,) = [each for each in await receive_until(watcher, Ended) if isinstance(each, Ended)]
        assert finished.code == 0
        await agent.close()
        await watcher.close()

    assert harness.run(others) == []
    state = load(harness.store, "job-1")
    assert state is not None
    assert state.phase == "succeeded"
    assert leader_of(harness.store, ELECTION_PREFIX) is None


def test_an_end_is_kept_before_its_agent_may_forget_it(harness: MasterHarness) -> None:
    async def others() -> None:
        agent = await harness.agent()
        agent.send(worker_exited(0, 0))
        assert (await receive_until(agent, ExitAck))[-1] == ExitAck(WorkerId("actor", 0, 0))
        state = load(harness.store, "job-1")
        assert state is not None
        assert state.roles["actor"].workers[0].ended_well
        agent.send(worker_exited(1, 0))
        await receive_until(agent, Shutdown)
        await agent.close()

    assert harness.run(others) == []


def test_a_master_that_was_deposed_says_nothing_and_ends(harness: MasterHarness) -> None:
    """Even though, as it sees things, the job has just ended: its agents follow another master."""

    async def others() -> None:
        watcher, agent = await harness.greet(Attach()), await harness.agent()
        assert campaign(harness.store, ELECTION_PREFIX, UnixAddress("/y", "host"), 8, ttl=60, deposing=1)
        harness.job.state.write_text("of the next master")
        agent.send(worker_exited(0, 1))
        told = await receive_all(agent)
        assert not [each for each in told if isinstance(each, Shutdown | ExitAck)]
        assert not [each for each in await receive_all(watcher) if isinstance(each, Ended)]

    assert harness.run(others) == []
    assert harness.job.state.read_text() == "of the next master"
    state = load(harness.store, "job-1")
    assert state is not None
    assert state.roles["actor"].workers[0].live, "it has written nothing"
    leader = leader_of(harness.store, ELECTION_PREFIX)
    assert leader is not None
    assert leader.epoch == 2, "the seat is the next one's"


def test_a_master_that_gets_sigterm_stops_the_job_and_lets_stopped_agents_go_on_from_then_on(
    harness: MasterHarness,
) -> None:
    async def others() -> None:
        agent = await harness.agent()
        await eventually_async(lambda: harness.status()["roles"][0]["phase"] == "running")
        assert harness.master._waking is None
        os.kill(os.getpid(), signal.SIGTERM)
        (*_, order) = await receive_until(agent, StopWorkers)
        assert isinstance(order, StopWorkers)
        assert order == StopWorkers("actor", (0, 1), int(signal.SIGTERM), 30.0)
        assert harness.master._waking is not None
        for rank in (0, 1):
            ended = WorkerId("actor", rank, 0)
            agent.send(WorkerExited(ended, 1.0, None, order.signal, "order", order.signal))
        await receive_until(agent, Shutdown)
        await agent.close()

    assert harness.run(others) == []
    assert harness.events("stop") == ["the master got SIGTERM"]


def test_a_master_tells_each_event_of_the_log_to_the_notifier_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[LoggedEvent] = []

    class KeepingNotifier(Notifier):
        """It runs nothing."""

        def tell(self, event: LoggedEvent) -> None:
            assert (self._command, self._run_id) == ("tell-me", "job-1")
            told.append(event)

    monkeypatch.setattr(shell, "Notifier", KeepingNotifier)
    model = Job({"actor": 2})
    model.state = replace(model.state, spec=replace(model.state.spec, notify_command="tell-me"))
    harness = MasterHarness(tmp_path, model)

    async def others() -> None:
        await end_well(await harness.agent())

    assert harness.run(others) == []
    kinds = [event.kind for event in read_events(harness.job.events) if event.kind != "order"]
    assert [event.kind for event in told] == kinds
