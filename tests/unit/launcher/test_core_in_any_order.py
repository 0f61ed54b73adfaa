"""Invariants of an agent for any order of events."""

from __future__ import annotations

import random

import pytest

from tests.unit.launcher.agent import KILL, OTHER, TERM, TORCH, Agent, store, worker
from unirun.launcher.environment import FRESH
from unirun.launcher.events import (
    Abandon,
    CallLater,
    Event,
    FromSpawner,
    Hung,
    Instruction,
    Launch,
    Leave,
    LinkClosed,
    LinkMessage,
    Phase,
    Probed,
    SpawnerDown,
    TimerExpired,
    ToMaster,
)
from unirun.wire.messages import Hello, Inject, Shutdown, StopWorkers, View
from unirun.wire.reports import (
    Forked,
    GroupMeets,
    MasterReply,
    MasterRequest,
    Reaped,
    SpawnerReady,
    SpawnFailed,
    StoreEnded,
    Stuck,
    WorkerError,
    WorkerExited,
)


class RandomHistory:
    """A spawner and a master that follow the protocol and act in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.agent = Agent(spawners={TORCH: False, OTHER: False}, in_place=frozenset({"rollout"}))
        self.ids = 0
        self.incarnations: dict[tuple[str, int], int] = {}
        self.launched: set[tuple[str, int, int]] = set()
        self.ended: list[tuple[str, int, int]] = []
        self.timers: list[Event] = []
        self.asks: set[tuple[int, int]] = set()
        """The requests of workers to the master that are not answered, by worker and number."""
        self.ready: dict[int, tuple[bool, float]] = {}
        """The readiness of programs, and the time since which they have it."""
        self.time = 0.0
        self.left = False

    def feed(self, event: Event | Instruction) -> None:
        if isinstance(event, Launch):
            for one in event.workers:
                self.incarnations[one.who[:2]] = one.who.incarnation
                self.launched.add(one.who)
        before = self.agent.state
        self.agent.on(event)
        match event:
            case LinkMessage(number, MasterRequest(ask)):
                self.asks.add((number, ask))
            case MasterReply(who, ask):
                self.asks -= {(w.id, ask) for w in before.workers.values() if w.who == who}
            case Probed(number, time=time):
                if (health := self.agent.state.workers[number].health) is not None:
                    since = self.ready.get(number)
                    kept = since is not None and since[0] == health.ready
                    self.ready[number] = since if kept and since else (health.ready, time)
                    assert (health.ready, health.since) == self.ready[number]
        if isinstance(event, StopWorkers):
            asked = [self.agent.state.find(event.role, rank) for rank in event.ranks]
            ends = [one is None or one.sent is not None or one.cause == "hung" for one in asked]
            assert all(ends), "a worker was not asked to end"
        for command in self.agent.commands:
            if isinstance(command, ToMaster) and isinstance(command.message, WorkerExited):
                self.ended.append(command.message.worker)
                if command.message.code == 0 and command.message.cause == "own":
                    assert not command.message.note, "a worker has succeeded, and is said to have failed"
            elif isinstance(command, CallLater):
                self.timers.append(command.event)
            elif isinstance(command, Leave):
                assert not self.agent.state.workers, "it leaves workers behind"
                self.left = True
        self.check()

    def check(self) -> None:
        assert len(set(self.ended)) == len(self.ended), "an end is told twice"
        alive = {w.who for w in self.agent.state.workers.values()}
        assert not alive & set(self.ended), "a worker has ended and is kept"
        assert alive | set(self.ended) == self.launched, "a worker was forgotten"
        self.asks = {ask for ask in self.asks if ask[0] in self.agent.state.workers}
        assert self.agent.state.asks.keys() == self.asks, "a request is forgotten, or asked again"

    def launch(self) -> Launch | None:
        role = self.rng.choice(["actor", "rollout"])
        ranks = [r for r in range(3) if self.agent.state.find(role, r) is None]
        if not ranks:
            return None
        key = self.rng.choice([TORCH, OTHER, FRESH])
        workers = []
        for rank in ranks:
            self.ids += 1
            incarnation = self.incarnations.get((role, rank), -1) + 1
            workers.append(worker(self.ids, role, rank, key=key, incarnation=incarnation))
        return Launch(tuple(workers))

    def next_event(self) -> Event | Instruction | None:
        rng, state = self.rng, self.agent.state
        forking = [w for w in state.workers.values() if w.phase is Phase.FORKING]
        alive = [w for w in state.workers.values() if w.phase is Phase.ALIVE]
        choices: list[Event | Instruction | None] = [
            self.launch() if rng.random() < 0.3 else None,
            StopWorkers(rng.choice(["actor", "rollout"]), (0, 2), rng.choice([TERM, KILL]), 1.0),
            View(()),
            store(rng.choice(["actor", "rollout"]), rng.randrange(3), rng.choice([TORCH, OTHER])),
        ]
        for role, kept in state.stores.items():
            if kept.sent:
                end = StoreEnded(role, kept.request.generation - rng.randrange(2), 1.0, "gone")
                choices.append(FromSpawner(kept.spawner, end))
        choices += [FromSpawner(key, SpawnerReady(1.0)) for key, ready in state.spawners.items() if not ready]
        choices += [SpawnerDown(key, "down", 1.0) for key in state.spawners if rng.random() < 0.1]
        if forking:
            one = rng.choice(forking)
            choices.append(FromSpawner(one.spawner, Forked(one.id, 1000 + one.id)))
            choices.append(FromSpawner(one.spawner, SpawnFailed(one.id, 1.0, "no")))
        if alive:
            one = rng.choice(alive)
            choices.append(FromSpawner(one.spawner, Reaped(one.id, 1.0, rng.choice([0, 1]), None)))
            choices += [
                LinkMessage(one.id, Hello(one.who)),
                LinkClosed(one.id),
                LinkMessage(one.id, Stuck("it waits for ever", "in wait")),
                LinkMessage(one.id, GroupMeets(rng.randrange(3))),
                LinkMessage(one.id, WorkerError("ValueError: x", "in step", 1.0)),
                Hung(one.id, "hangs"),
                Inject(*one.who[:2], rng.choice(["slow", "sigstop", "exit"]), 2.0, one.who.incarnation),
            ]
            choices.append(LinkMessage(one.id, MasterRequest(rng.randrange(3), "load_state")))
            choices.append(MasterReply(one.who, rng.randrange(3)))
            choices.append(TimerExpired(one.pid or 0, one.pid or 0, ("batch",), KILL))
            self.time += 1.0
            choices.append(Probed(one.id, rng.random() < 0.5, rng.choice(["no", "never"]), self.time))
        if self.timers:
            choices.append(self.timers.pop(rng.randrange(len(self.timers))))
        return rng.choice(choices)

    def run(self) -> None:
        for _ in range(150):
            event = self.next_event()
            if event is not None:
                self.feed(event)
        ends: list[Event | Instruction] = [Shutdown(), Abandon("gone")]
        self.feed(self.rng.choice(ends))
        late = self.launch()
        if late is not None:
            self.feed(late)
        for one in list(self.agent.state.workers.values()):
            self.feed(FromSpawner(one.spawner, Reaped(one.id, 2.0, None, 9)))
        assert self.left, "it does not leave"
        assert set(self.ended) == self.launched


@pytest.mark.parametrize("block", range(4))
def test_in_any_order_each_worker_ends_once_and_the_agent_leaves_when_none_is_left(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        RandomHistory(seed).run()
