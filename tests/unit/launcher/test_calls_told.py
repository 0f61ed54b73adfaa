"""What a worker says of its calls goes to the master, and to the one that comes in its place."""

from __future__ import annotations

from tests.unit.launcher.test_core import Agent
from unirun.launcher.events import FromWorker
from unirun.launcher.state import holdings
from unirun.wire.messages import Hello
from unirun.wire.reports import CallCount, Calls, Span, WorkerCalls
from unirun.wire.spawning import Reaped

ONCE, TWICE = (Calls((CallCount("rollout", "play", n, 10 * n, n, 0.1, (Span(0, 0),)),)) for n in (1, 2))


def test_it_is_passed_on_with_who_said_it() -> None:
    agent = Agent().alive().on(FromWorker(1, ONCE))
    assert agent.told(WorkerCalls) == [WorkerCalls("actor", 0, 0, ONCE.counts)]


def test_a_new_master_is_told_the_latest() -> None:
    agent = (
        Agent()
        .alive()
        .on(FromWorker(1, Hello("actor", 0, 0, 101, True)), FromWorker(1, ONCE), FromWorker(1, TWICE))
    )
    assert {held.rank: held.calls for held in holdings(agent.state)[0]} == {0: TWICE.counts, 1: ()}


def test_a_worker_that_has_ended_is_held_with_its_calls() -> None:
    agent = Agent().alive().on(FromWorker(1, ONCE)).spawner(Reaped(1, 9.0, 0, None))
    assert {held.rank: held.calls for held in holdings(agent.state)[0]} == {0: ONCE.counts, 1: ()}
