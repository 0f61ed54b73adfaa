"""The model of what is not pure: spawners with their processes, and the world that all share."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tests.sim.world import Clock, Habits, Pipe, Plan
from unirun.launcher import events
from unirun.launcher.environment import FRESH, SpawnerKey
from unirun.launcher.state import AgentState
from unirun.rendezvous.store.protocol import Store
from unirun.wire.messages import Hello, Message, View
from unirun.wire.reports import GroupFormed, Metrics, Serving, WorkerError
from unirun.wire.spawning import (
    Forked,
    Kill,
    Preloaded,
    Reaped,
    ServeStore,
    Spawn,
    SpawnFailed,
    StoreEnded,
    StoreOpened,
)

if TYPE_CHECKING:
    from tests.sim.node import Led, Node

Who = tuple[str, int, int]
"""Role, rank, incarnation."""


@dataclass
class Process:
    """A worker's process in the model."""

    pid: int
    who: Who
    node: str
    generation: int
    """That of the group which it is in, or was started for."""
    forms: int = 0
    """The generation that it is about to form."""
    welcome: bool = False
    serving: bool = False
    failed: bool = False
    alive: bool = True
    deaf: bool = False


@dataclass
class StoreModel:
    """The store that is served at a role's socket, or was served last."""

    spawner: Spawner
    generation: int
    alive: bool = True


def rng_delay(rng: random.Random) -> float:
    """A moment in the life of a worker."""
    return rng.choice((0.001, 0.1, 3.0))


class World(Protocol):
    """What nodes and spawners need of the simulation."""

    clock: Clock
    rng: random.Random
    plan: Plan
    stores: dict[str, StoreModel]

    def next_pid(self) -> int:
        """A pid that was never used."""

    def lost(self, node: str) -> bool:
        """Whether the job goes on without a node."""

    def born(self, process: Process) -> None:
        """A process is there."""

    def peers_see(self, process: Process) -> None:
        """A process has failed: peers of its role may follow."""

    def disturb(self, role: str) -> None:
        """The store of a role is gone: those who wait in it may fail."""

    def kill_pids(self, pids: tuple[int, ...]) -> None:
        """SIGKILL."""

    def trace(self, text: str) -> None:
        """Note something for a failing seed."""

    def client(self) -> Store:
        """A way to the store."""

    def master_at(self, address: str) -> Led:
        """The process of a master, alive or not."""

    def start_master(self, deposing: int) -> None:
        """Start the process of a master."""

    def checked_agent(self, node: Node, before: AgentState, event: events.Event) -> None:
        """Check what must hold after a step of an agent's core."""


class Spawner:
    """Forks processes, kills them when told, reports their ends in the order in which they happen."""

    def __init__(self, node: Node, key: SpawnerKey) -> None:
        self.node, self.key = node, key
        self.world = node.world
        self.alive = True
        self.ready = False
        self.processes: dict[int, Process] = {}
        clock, rng, slow = self.world.clock, self.world.rng, self.world.plan.slow
        self.inbox = Pipe(clock, rng, slow, self._receive)
        self.outbox = Pipe(clock, rng, slow, lambda m: node.apply(events.FromSpawner(key, m)))
        self._held: list[Message] = []
        seconds = 0.01 if key == FRESH else rng.uniform(0.2, 2.0)
        clock.after(seconds, lambda: self._preloaded(seconds))

    def _preloaded(self, seconds: float) -> None:
        if self.alive:
            self.ready = True
            self.outbox.send(Preloaded(seconds))
            for message in self._held:
                self._receive(message)

    def _receive(self, message: Message) -> None:
        if not self.alive:
            return
        if not self.ready:
            self._held.append(message)
            return
        match message:
            case Spawn():
                self._spawn(message)
            case Kill(number, signum):
                if number in self.processes:
                    self._signal(number, signum)
            case ServeStore():
                self._serve_store(message)
            case _:
                raise AssertionError(f"the agent sent a spawner {message}")

    def _serve_store(self, request: ServeStore) -> None:
        role, rng = request.role, self.world.rng
        before = self.world.stores.get(role)
        # Where its node is gone, the store that nobody has met in is served on another.
        newer = before is None or before.generation < request.generation
        assert newer or self.world.lost(before.spawner.node.name), f"{role} has {before} already"
        if before is not None:
            before.alive = False
            self.world.disturb(role)
        store = StoreModel(self, request.generation)
        self.world.stores[role] = store
        if rng.random() < 0.01:
            store.alive = False
            self._tell_store_end(role, store, "no process can be forked")
            return
        self.outbox.send(StoreOpened(role, request.generation))
        if rng.random() < 0.02:
            self.world.clock.after(rng_delay(rng), lambda: self._store_dies(role, store))

    def _store_dies(self, role: str, store: StoreModel) -> None:
        if self.alive and store.alive:
            store.alive = False
            self._tell_store_end(role, store, "its process was killed")

    def _tell_store_end(self, role: str, store: StoreModel, why: str) -> None:
        self.outbox.send(StoreEnded(role, store.generation, self.world.clock.now, why))

    def _spawn(self, request: Spawn) -> None:
        rng, clock = self.world.rng, self.world.clock
        role, _, rank = request.title.partition(":")
        if rng.random() < 0.01:
            self.outbox.send(SpawnFailed(request.id, self.world.clock.now, "no process can be forked"))
            return
        who = role, int(rank), int(request.env["UNIRUN_INCARNATION"])
        generation = int(request.env["UNIRUN_GENERATION"])
        process = Process(self.world.next_pid(), who, self.node.name, generation)
        self.world.born(process)
        self.processes[request.id] = process
        self.outbox.send(Forked(request.id, process.pid))
        habits = self.world.plan.habits[role]
        if request.kind != "program":
            # The link is another stream: its hello may overtake the news of the fork.
            clock.after(rng.expovariate(200), lambda: self._hello(request, process))
        clock.after(rng.expovariate(1 / habits.lifetime), lambda: self._live(request.id, process, habits))

    def _hello(self, request: Spawn, process: Process) -> None:
        if not process.alive:
            return
        rng = self.world.rng
        role, rank, incarnation = process.who
        assert self.node.state.view is not None, f"{process.who} is welcomed without a view"
        self.node.apply(events.FromWorker(request.id, Hello(role, rank, incarnation, process.pid, True)))
        (own,) = (seen for seen in self.node.state.view.roles if seen.name == role)
        assert own.generation >= process.generation, f"{process.who} is welcomed in the past"
        process.generation, process.welcome = own.generation, True
        if role in self.node.state.in_place:
            self.world.clock.after(rng.uniform(0.0, 0.5), lambda: self._serve(request.id, process))
        if rng.random() < 0.02:
            self.node.apply(events.LinkClosed(request.id))

    def _serve(self, number: int, process: Process) -> None:
        """It has formed its group, or will form a later one, and takes calls."""
        if process.alive and not process.failed:
            role, rank, _ = process.who
            process.serving = True
            recoverable = self.world.rng.random() < self.world.plan.habits[role].recovers
            self.node.apply(events.FromWorker(number, Serving({"torch": f"{role}{rank}"}, recoverable)))
            self.node.apply(events.FromWorker(number, Metrics({"loss": 0.5}, self.world.clock.now)))

    def sees(self, number: int, process: Process, view: View) -> None:
        """A worker learns of a later generation of its role: it forms that, in a moment."""
        (seen,) = (role for role in view.roles if role.name == process.who[0])
        if seen.generation > max(process.generation, process.forms):
            store = self.world.stores[seen.name]
            assert store.generation >= seen.generation, f"{process.who} would meet in an old store"
            process.forms = seen.generation
            delay = self.world.rng.choice((0.01, 0.5, 2.0))
            self.world.clock.after(delay, lambda: self._form(number, process, seen.generation))

    def _form(self, number: int, process: Process, generation: int) -> None:
        if process.alive and not process.failed and process.forms == generation:
            process.generation = generation
            self.node.apply(events.FromWorker(number, GroupFormed(generation)))

    def _live(self, number: int, process: Process, habits: Habits) -> None:
        """The process has done what it wanted to: it fails, ends well, or waits to be told."""
        if not process.alive:
            return
        chance = self.world.rng.random()
        if chance < habits.fails:
            self._fail(number, process, "ValueError: of its own")
        elif self.world.rng.random() < habits.finishes:
            self.end(number, 0, None)

    def _fail(self, number: int, process: Process, words: str) -> None:
        rng = self.world.rng
        kind = rng.choice(("error", "code", "signal"))
        if kind == "error":
            error = WorkerError(words, f"Traceback: {words}", self.world.clock.now)
            self.node.apply(events.FromWorker(number, error))
            process.failed = True
            if rng.random() < 0.2:
                # A thread or an exit handler keeps it alive; only SIGKILL ends it.
                process.deaf = True
                return
            self.end(number, 1, None)
        elif kind == "code":
            self.end(number, rng.choice((1, 7, 127, 255)), None)
        else:
            self.end(number, None, rng.choice((signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)))
        self.world.peers_see(process)

    def follow(self, number: int, process: Process) -> None:
        """A peer is gone, and this one trips over it."""
        if process.alive:
            words = "RuntimeError: Connection closed by peer"
            error = WorkerError(words, f"Traceback: {words}", self.world.clock.now)
            self.node.apply(events.FromWorker(number, error))
            self.end(number, 1, None)

    def _signal(self, number: int, signum: int) -> None:
        process, rng = self.processes[number], self.world.rng
        if not process.alive:
            return
        if signum == signal.SIGKILL:
            self.end(number, None, signum)
            return
        habits = self.world.plan.habits[process.who[0]]
        if process.deaf or rng.random() < habits.stubborn:
            return
        code, by = rng.choice(((None, signum), (128 + signum, None), (0, None), (1, None)))
        self.world.clock.after(rng.uniform(0.0, 0.3), lambda: self.end(number, code, by))

    def end(self, number: int, code: int | None, by: int | None) -> None:
        """The process ends, its link closes, and the spawner collects it."""
        process = self.processes[number]
        if not process.alive:
            return
        process.alive = False
        self.node.apply(events.LinkClosed(number))
        self.outbox.send(Reaped(number, self.world.clock.now, code, None if by is None else int(by)))

    def die(self) -> None:
        """SIGKILL: its processes go with it, and the agent sees the end of the stream."""
        if not self.alive:
            return
        self.alive = False
        for process in self.processes.values():
            process.alive = False
        for store in self.world.stores.values():
            store.alive = store.alive and store.spawner is not self
        self.outbox.close(lambda _: self._buried())

    def _buried(self) -> None:
        if self.node.spawners.get(self.key) is self:
            del self.node.spawners[self.key]
            self.node.apply(events.SpawnerDown(self.key, "its spawner was killed", self.world.clock.now))
