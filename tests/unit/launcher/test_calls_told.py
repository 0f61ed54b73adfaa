"""Call counts of a worker go to the master, and to its successor."""

from __future__ import annotations

from tests.unit.launcher.agent import Agent
from unirun.launcher.events import LinkMessage, holdings
from unirun.values import WorkerId
from unirun.wire.messages import Hello
from unirun.wire.reports import CallCount, Calls, FromWorker, Reaped

ONCE, TWICE = (Calls((CallCount("rollout", "play", n, 10 * n, n, 0.1, ((0, 0),)),)) for n in (1, 2))


def test_call_counts_are_forwarded_with_their_worker() -> None:
    agent = Agent().alive().on(LinkMessage(1, ONCE))
    assert agent.told(Calls) == [FromWorker(WorkerId("actor", 0, 0), Calls(ONCE.counts))]


def test_a_new_master_gets_the_latest_call_counts() -> None:
    agent = (
        Agent()
        .alive()
        .on(
            LinkMessage(1, Hello(WorkerId("actor", 0, 0))),
            LinkMessage(1, ONCE),
            LinkMessage(1, TWICE),
        )
    )
    assert {held.worker.rank: held.calls for held in holdings(agent.state)[0]} == {0: TWICE.counts, 1: ()}


def test_an_ended_worker_is_held_with_its_call_counts() -> None:
    agent = Agent().alive().on(LinkMessage(1, ONCE)).spawner(Reaped(1, 9.0, 0, None))
    assert {held.worker.rank: held.calls for held in holdings(agent.state)[0]} == {0: ONCE.counts, 1: ()}
