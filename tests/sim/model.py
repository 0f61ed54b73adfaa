"""The model of what is not pure: spawners with their processes, and the shells of agent and master."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from typing import Protocol

from tests.sim.world import JOB, Clock, Habits, Pipe, Plan
from unirun.errors import StoreError
from unirun.launcher import core, events
from unirun.launcher.environment import FRESH, SpawnerKey
from unirun.launcher.orders import Orders
from unirun.launcher.standby import CHECK, PATIENCE
from unirun.launcher.state import AgentState, holdings
from unirun.rendezvous.election import leader_of
from unirun.rendezvous.keys import job_prefix
from unirun.rendezvous.store.protocol import Store
from unirun.wire.messages import ExitKept, Hello, Message, OpenStore, Shutdown, StartRole, StopWorkers, View
from unirun.wire.reports import GroupFormed, Join, Metrics, Serving, WorkerError, WorkerExited
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

Who = tuple[str, int, int]
"""Role, rank, incarnation."""


@dataclass
class Process:
    """A worker's process in the model."""

    pid: int
    who: Who
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
        assert before is None or before.generation < request.generation, f"{role} has {before} already"
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
        process = Process(self.world.next_pid(), who, int(request.env["UNIRUN_GENERATION"]))
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


class Led(Protocol):
    """What a node sees of a master's process."""

    leads: bool
    hangs: bool

    def joined(self, join: Join, pipe: Pipe) -> None:
        """The first message of an agent has arrived."""

    def heard(self, node: str, message: Message) -> None:
        """A message of an agent has arrived."""

    def stream_ended(self, node: str, pipe: Pipe, reason: str) -> None:
        """The stream of an agent has ended; `pipe` is the way back to it."""

    def cut(self, node: str) -> None:
        """What is on its way to an agent is lost."""


LOOK_AGAIN = 0.1
"""Coarser than in truth, so that a history has fewer turns."""


class Node:
    """The shell of one agent, as `unirun.launcher.agent` and `standby` are, without sockets and processes."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.alive = True
        self.spawners: dict[SpawnerKey, Spawner] = {}
        self.exits: list[Who] = []
        self.client = world.client()
        self.master: Led | None = None
        self.to_master: Pipe | None = None
        self._to_agent: Pipe | None = None
        self._looking = False
        self._since = self._not_before = 0.0
        self.orders = Orders(JOB, world.plan.spec, name, "/", {})
        keys = self.orders.spawners
        self.state = AgentState(name, self.orders.in_place, spawners=dict.fromkeys(keys, False))
        for key in keys:
            self.spawners[key] = Spawner(self, key)

    def join(self) -> None:
        """Look for the first master."""
        self._look_from_now()
        self.world.clock.after(CHECK, self._check)

    # the way to the master

    def _look_from_now(self) -> None:
        self._since = self.world.clock.now
        if not self._looking:
            self._looking = True
            self._look()

    def _look(self) -> None:
        if not self.alive or self.master is not None:
            self._looking = False
            return
        try:
            leader = leader_of(self.client, job_prefix("sim"))
            if leader is not None and leader.epoch >= self.state.epoch:
                master = self.world.master_at(leader.address)
                if not master.leads:
                    self._start(leader.epoch)
                elif not master.hangs:
                    self._connect(master, leader.epoch)
            elif self.world.clock.now > self._since + PATIENCE:
                self._start(0)
        except StoreError:
            # The store is away; later.
            pass
        self.world.clock.after(LOOK_AGAIN, self._look)

    def _check(self) -> None:
        """Whether another leads, or the one that leads hangs."""
        if not self.alive:
            return
        self.world.clock.after(CHECK, self._check)
        if self.master is None:
            return
        try:
            leader = leader_of(self.client, job_prefix("sim"))
        except StoreError:
            return
        if leader is None:
            self._start(0)
        elif leader.epoch > self.state.epoch:
            master = self.world.master_at(leader.address)
            if master.leads and not master.hangs:
                self._connect(master, leader.epoch)

    def _start(self, deposing: int) -> None:
        now = self.world.clock.now
        if now >= self._not_before:
            self._not_before = now + 1.0
            delay = self.world.rng.uniform(0.2, 0.6)
            self.world.clock.after(delay, lambda: self.world.start_master(deposing))

    def _connect(self, master: Led, epoch: int) -> None:
        self._disconnect("it follows another")
        world, name = self.world, self.name
        clock, rng, slow = world.clock, world.rng, world.plan.slow
        self.apply(events.Led(epoch))
        to_agent = Pipe(clock, rng, slow, lambda message: self._receive(epoch, message))
        first = True

        def arrived(message: Message) -> None:
            nonlocal first
            if first:
                assert isinstance(message, Join)
                first = False
                master.joined(message, to_agent)
            else:
                master.heard(name, message)

        self.master, self.to_master = master, Pipe(clock, rng, slow, arrived)
        self._to_agent = to_agent
        endpoints = {role.name: f"10.0.0.1:{n + 1}" for n, role in enumerate(world.plan.spec.roles)}
        self.to_master.send(Join(name, 1, name, endpoints, *holdings(self.state)))

    def _disconnect(self, reason: str) -> None:
        master, pipe, back = self.master, self.to_master, self._to_agent
        self.master = self.to_master = self._to_agent = None
        if master is not None and pipe is not None and back is not None:
            pipe.close(lambda error: master.stream_ended(self.name, back, f"{error}: {reason}"))

    def cut_off(self) -> None:
        """The stream breaks though both ends live, and what is on its way is lost."""
        master = self.master
        if master is not None and self.to_master is not None:
            self.to_master.cut = True
            master.cut(self.name)
            self._disconnect("it was cut")
            self._look_from_now()

    def stream_ended(self, master: Led) -> None:
        """A master's stream has ended."""
        if self.alive and self.master is master:
            self.master = self.to_master = self._to_agent = None
            self._look_from_now()

    def _receive(self, epoch: int, message: Message) -> None:
        if not self.alive:
            return
        match message:
            case StartRole():
                self.apply(events.Order(epoch, self.orders.launch(message)))
            case OpenStore():
                self.apply(events.Order(epoch, self.orders.store(message, 5)))
            case StopWorkers() | View() | ExitKept() | Shutdown():
                self.apply(events.Order(epoch, message))
            case _:
                raise AssertionError(f"the master sent an agent {message}")

    def apply(self, event: events.Event) -> None:
        """One step of the real core, and its commands."""
        if not self.alive:
            return
        before = self.state
        self.state, commands = core.step(self.state, event)
        self.world.checked_agent(self, before, event)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: events.Command) -> None:
        match command:
            case events.ToMaster(message):
                if isinstance(message, WorkerExited):
                    self.exits.append((message.role, message.rank, message.incarnation))
                if self.to_master is not None:
                    self.to_master.send(message)
            case events.ToSpawner(key, message):
                if isinstance(message, Kill):
                    self._check_kill(message)
                if key in self.spawners:
                    self.spawners[key].inbox.send(message)
            case events.StartSpawner(key):
                assert key not in self.spawners, "there is such a spawner already"
                self.spawners[key] = Spawner(self, key)
            case events.After(delay, event):
                self.world.clock.after(delay, lambda: self.apply(event))
            case events.KillGroups(pids):
                self.world.kill_pids(pids)
            case events.Leave():
                self.die("it left")
            case events.ToWorkers(View() as view):
                for spawner in self.spawners.values():
                    for number, process in spawner.processes.items():
                        if process.alive and process.welcome and process.who[0] in self.state.in_place:
                            spawner.sees(number, process, view)

    def _check_kill(self, kill: Kill) -> None:
        """A worker that can outlive its peers is killed for an order, for this agent's end, or for its own fault."""
        worker = self.state.workers[kill.id]
        if worker.role in self.state.in_place:
            assert worker.sent is not None or worker.error is not None, f"{worker.who} is killed for a peer"

    def die(self, reason: str) -> None:
        """The agent ends; its workers end with it, and the master sees the end of the stream."""
        if not self.alive:
            return
        self.alive = False
        for spawner in self.spawners.values():
            spawner.alive = False
            for process in spawner.processes.values():
                process.alive = False
            for store in self.world.stores.values():
                store.alive = store.alive and store.spawner is not spawner
        self.world.trace(f"agent {self.name} is gone: {reason}")
        self._disconnect(reason)
