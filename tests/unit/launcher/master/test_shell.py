"""A master with its sockets: whom it tells what, above all at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.launcher.master.harness import ELECTION_PREFIX, MasterHarness, receive_all, receive_until
from unirun.failover.context import load
from unirun.rendezvous.election import campaign, leader_of
from unirun.values import WorkerId
from unirun.wire.address import UnixAddress
from unirun.wire.messages import Attach, Ended, ExitAck, Shutdown
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
