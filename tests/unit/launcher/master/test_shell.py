"""A master with its sockets: whom it tells what, above all at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.launcher.master.court import SEAT, Court, all_of, until
from unirun.failover.persistence.context_store import load
from unirun.rendezvous.election import campaign, leader_of
from unirun.values import WorkerId
from unirun.wire.address import UnixAddress
from unirun.wire.messages import Attach, Ended, ExitAck, Shutdown
from unirun.wire.reports import WorkerExited


def ended(rank: int, code: int) -> WorkerExited:
    return WorkerExited(WorkerId("actor", rank, 0), 1.0, code, None, "own")


@pytest.fixture
def court(tmp_path: Path) -> Court:
    return Court(tmp_path)


def test_at_the_end_of_the_job_everybody_is_told_and_the_seat_is_free(court: Court) -> None:
    async def play() -> None:
        watcher = await court.greet(Attach())
        agent = await court.agent()
        for rank in (0, 1):
            agent.send(ended(rank, 0))
        assert (await until(agent, Shutdown))[-1] == Shutdown()
        (finished,) = [each for each in await until(watcher, Ended) if isinstance(each, Ended)]
        assert finished.code == 0
        await agent.close()
        await watcher.close()

    assert court.run(play) == []
    state = load(court.store, "job-1")
    assert state is not None
    assert state.phase == "succeeded"
    assert leader_of(court.store, SEAT) is None


def test_an_end_is_kept_before_its_agent_may_forget_it(court: Court) -> None:
    async def play() -> None:
        agent = await court.agent()
        agent.send(ended(0, 0))
        assert (await until(agent, ExitAck))[-1] == ExitAck(WorkerId("actor", 0, 0))
        state = load(court.store, "job-1")
        assert state is not None
        assert state.roles["actor"].workers[0].ended_well
        agent.send(ended(1, 0))
        await until(agent, Shutdown)
        await agent.close()

    assert court.run(play) == []


def test_a_master_that_was_deposed_says_nothing_and_ends(court: Court) -> None:
    """Even though, as it sees things, the job has just ended: its agents follow another master."""

    async def play() -> None:
        watcher, agent = await court.greet(Attach()), await court.agent()
        assert campaign(court.store, SEAT, UnixAddress("/y", "host"), 8, ttl=60, deposing=1)
        court.job.state.write_text("of the next master")
        agent.send(ended(0, 1))
        told = await all_of(agent)
        assert not [each for each in told if isinstance(each, Shutdown | ExitAck)]
        assert not [each for each in await all_of(watcher) if isinstance(each, Ended)]

    assert court.run(play) == []
    assert court.job.state.read_text() == "of the next master"
    state = load(court.store, "job-1")
    assert state is not None
    assert state.roles["actor"].workers[0].live, "it has written nothing"
    leader = leader_of(court.store, SEAT)
    assert leader is not None
    assert leader.epoch == 2, "the seat is the next one's"
