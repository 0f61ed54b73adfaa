"""The model of an agent's shell: how it finds its masters, and carries out what the real core of an agent asks for."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from tests.sim.network import ContactModel, Pipe
from tests.sim.processes import Process, Who
from tests.sim.protocols import SimulationOfNodes
from tests.sim.scenario import JOB
from tests.sim.spawner import SpawnerModel
from unirun.errors import StoreError
from unirun.launcher import core, events
from unirun.launcher.environment import SpawnerKey
from unirun.launcher.events import AgentState, holdings
from unirun.launcher.orders import Orders
from unirun.launcher.standby import BACKOFF_RESET_SECONDS, CANDIDACY_DELAY, CandidateAttempts, start_at, turns
from unirun.rendezvous.election import job_prefix, leader_of
from unirun.values import Engine, RankAddress
from unirun.wire.messages import (
    AgentTask,
    ExitAck,
    FollowSteps,
    Heartbeat,
    Reserve,
    Shutdown,
    StartRole,
    StopWorkers,
    View,
)
from unirun.wire.reports import (
    EngineWeights,
    Join,
    Kill,
    LocalEngines,
    Message,
    OpenStore,
    Placed,
    Reaped,
    WorkerExited,
)


class MasterProcess(Protocol):
    """A node's view of a master's process."""

    node: str

    @property
    def leads(self) -> bool:
        """True if it answers, and believes that it leads."""

    @property
    def hangs(self) -> bool:
        """True if it does nothing now."""

    def joined(self, join: Join, pipe: Pipe) -> None:
        """The first message of an agent has arrived."""

    def heard(self, node: str, message: Message, pipe: Pipe) -> None:
        """A message of an agent has arrived; `pipe` is the way back to it."""

    def stream_ended(self, node: str, pipe: Pipe, reason: str) -> None:
        """The stream of an agent has ended; `pipe` is the way back to it."""

    def cut(self, node: str) -> None:
        """Lose all messages that are on their way to an agent."""


LOOK_INTERVAL = 0.1
CHECK_INTERVAL = 3.0
"""Seconds between two looks at who leads, without a master and with one. A watch tells it sooner; so a history has fewer
steps."""


class NodeModel:
    """The shell of one agent, as `unirun.launcher.agent` and `standby` are, without sockets and processes."""

    def __init__(self, simulation: SimulationOfNodes, name: str) -> None:
        self.simulation, self.name = simulation, name
        self.alive = True
        self.spawners: dict[SpawnerKey, SpawnerModel] = {}
        self.exits: list[Who] = []
        self.ports: dict[tuple[str, int], RankAddress] = {}
        self.client = simulation.client(name)
        self.master: MasterProcess | None = None
        self.to_master: Pipe | None = None
        self._to_agent: Pipe | None = None
        # A silent stream to the same master: the way back, and what it closes.
        self._silent: list[tuple[MasterProcess, Pipe, Pipe]] = []
        self._looking = False
        self._frozen_until = 0.0
        self._since = self._connected = 0.0
        # The term whose master was found dead, and when.
        self._dead = (0, 0.0)
        self._attempts, self._coming_up_until = CandidateAttempts(), 0.0
        self.orders = Orders(JOB, AgentTask(simulation.scenario.spec, name, (name,), "/", "127.0.0.1"), {})
        self.contact = ContactModel(self)
        about = AgentState(name, self.orders.in_place, self.orders.companions)
        self.state, commands = core.start_spawners(about, self.orders.spawners)
        for command in commands:
            self._carry_out(command)

    def join(self) -> None:
        """Look for the first master."""
        self._look_from_now()
        self.simulation.clock.after(CHECK_INTERVAL, self._check)

    @property
    def hangs_for(self) -> float:
        """Seconds for which the agent still does nothing."""
        return max(0.0, self._frozen_until - self.simulation.clock.now)

    def hang(self, seconds: float) -> None:
        """SIGSTOP to the agent, and SIGCONT later."""
        self._frozen_until = self.simulation.clock.now + seconds

    def awake(self, do: Callable[[], None]) -> None:
        """Do something now, or when the agent does not hang any more."""
        if self.hangs_for > 0:
            self.simulation.clock.after(self.hangs_for, lambda: self.awake(do))
        elif self.alive:
            do()

    # the way to the master

    def _look_from_now(self) -> None:
        self._since = self.simulation.clock.now
        if not self._looking:
            self._looking = True
            self._look()

    def _look(self) -> None:
        self.awake(self._look_now)

    def _look_now(self) -> None:
        if not self.alive or self.master is not None:
            self._looking = False
            return
        try:
            leader = leader_of(self.client, job_prefix("sim"))
            if leader is not None and leader.epoch >= self.state.epoch:
                master = self.simulation.master_at(leader.pid)
                if not self.simulation.network.joins(self.name, master.node):
                    pass
                elif not master.leads:
                    if self._dead[0] != leader.epoch:
                        self._dead = (leader.epoch, self.simulation.clock.now)
                    self._start_in_turn(self._dead[1], leader.epoch)
                elif not master.hangs:
                    self._connect(master, leader.epoch)
            else:
                self._start_in_turn(self._since + CANDIDACY_DELAY, 0)
        except StoreError:
            # The store is away; later.
            pass
        self.simulation.clock.after(LOOK_INTERVAL, self._look)

    def _check(self) -> None:
        """Check whether another leads, or the one that leads hangs."""
        self.awake(self._check_now)

    def _check_now(self) -> None:
        self.simulation.clock.after(CHECK_INTERVAL, self._check)
        if self.master is None:
            return
        try:
            leader = leader_of(self.client, job_prefix("sim"))
        except StoreError:
            return
        if leader is None:
            self._start_in_turn(0.0, 0)
        elif leader.epoch > self.state.epoch:
            master = self.simulation.master_at(leader.pid)
            here = self.simulation.network.joins(self.name, master.node)
            if here and master.leads and not master.hangs:
                self._connect(master, leader.epoch)

    def _start_in_turn(self, vacant: float, deposing: int) -> None:
        now, placement = self.simulation.clock.now, self.simulation.scenario.placement
        nodes = {*placement.nodes, *placement.spares, self.name}
        attempts = replace(self._attempts, coming_up=now < self._coming_up_until)
        if now >= start_at(vacant, turns(sorted(nodes), self.state.epoch)[self.name], attempts, len(nodes)):
            delay = self.simulation.rng.uniform(0.2, 0.6)
            self._attempts, self._coming_up_until = CandidateAttempts(attempts.number + 1, now), now + delay
            self.simulation.clock.after(delay, lambda: self.simulation.start_master(deposing))

    def connect_anew(self) -> None:
        """The stream is silent: try another one to the same master. The old one is open until that one speaks."""
        master, pipe, back = self.master, self.to_master, self._to_agent
        if master is None or pipe is None or back is None or not master.leads or master.hangs:
            return
        if self.simulation.network.joins(self.name, master.node):
            self._silent.append((master, pipe, back))
            self.master = None
            self._connect(master, self.state.epoch)

    def _connect(self, master: MasterProcess, epoch: int) -> None:
        self._disconnect("it follows another")
        simulation, name = self.simulation, self.name
        clock, rng, slow = simulation.clock, simulation.rng, simulation.scenario.slow
        if clock.now >= self._connected + BACKOFF_RESET_SECONDS:
            self._attempts = CandidateAttempts()
        self._connected = clock.now
        self.apply(events.Led(epoch))
        ways, host = simulation.network, master.node

        def answered(message: Message) -> None:
            self.awake(lambda: self._heard(epoch, message, to_agent))

        to_agent = Pipe(clock, rng, slow, answered, lambda: ways.until(host, name))
        first = True

        def arrived(message: Message) -> None:
            nonlocal first
            if first:
                assert isinstance(message, Join)
                first = False
                master.joined(message, to_agent)
            else:
                master.heard(name, message, to_agent)

        self.master = master
        self.to_master = Pipe(clock, rng, slow, arrived, lambda: ways.until(name, host))
        self._to_agent = to_agent
        endpoints = {role.name: f"10.0.0.1:{n + 1}" for n, role in enumerate(simulation.scenario.spec.roles)}
        self.to_master.send(Join(name, 1, name, endpoints, *holdings(self.state), self.state.ending))
        self.contact.begin()

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
            self.simulation.broken(self.name)
            self._disconnect("it was cut")
            self._look_from_now()

    def lose_one_way(self, *, to_master: bool, seconds: float) -> None:
        """Lose the messages of one end of the stream; after a while the stream breaks."""
        master = self.master
        if master is None or self.to_master is None:
            return
        if to_master:
            self.to_master.cut = True
        else:
            master.cut(self.name)
        self.simulation.clock.after(seconds, lambda: self.awake(lambda: self._break(master)))

    def _break(self, master: MasterProcess) -> None:
        if self.master is master:
            self.simulation.broken(self.name)
            self._disconnect("it was broken")
            self._look_from_now()

    def stream_ended(self, master: MasterProcess) -> None:
        """A master's stream has ended."""

        def end() -> None:
            if self.master is master:
                self.master = self.to_master = self._to_agent = None
                self._look_from_now()

        self.awake(end)

    def _heard(self, epoch: int, message: Message, pipe: Pipe) -> None:
        """A message of a master, on the stream whose way back is `pipe`. Streams that were left are not read."""
        if pipe is self._to_agent:
            for master, there, back in self._silent:
                there.close(lambda error, m=master, b=back: m.stream_ended(self.name, b, f"{error}"))  # type: ignore[misc]
            self._silent.clear()
            self.contact.heard(message)
            self._handle(epoch, message)

    def _handle(self, epoch: int, message: Message) -> None:
        match message:
            case StartRole() | OpenStore() if not self.contact.leads(epoch):
                self._disconnect("another leads")
                self._look_from_now()
            case StartRole():
                self.apply(events.Order(epoch, self.orders.launch(message)))
            case Reserve():
                self._reserve(message)
            case OpenStore():
                self.apply(events.Order(epoch, self.orders.store(message, 5)))
            case StopWorkers() | View() | ExitAck() | Shutdown():
                self.apply(events.Order(epoch, message))
            case Heartbeat() | FollowSteps():
                # Its workers report no steps.
                pass
            case _:
                raise AssertionError(f"the master sent an agent {message}")

    def apply(self, event: events.Event) -> None:
        """One step of the real core, and its commands, now or when the agent does not hang any more."""
        if not self.alive:
            return
        if self.hangs_for > 0:
            self.awake(lambda: self.apply(event))
            return
        before = self.state
        self.state, commands = core.step(self.state, event)
        self.simulation.checked_agent(self, before, event)
        for command in commands:
            self._carry_out(command)

    def told_by(self, key: SpawnerKey, message: Message) -> None:
        """A message of a spawner. Of a program that has ended before it was ready another process may have the port."""
        taken = False
        if isinstance(message, Reaped) and (worker := self.state.workers.get(message.id)) is not None:
            unready = worker.ready is not None and not worker.was_ready and worker.cause != "order"
            here = unready and worker.who[:2] in self.ports
            taken = here and self.simulation.takes_port(worker.who)
            if taken:
                del self.ports[worker.who[:2]]
        self.apply(events.FromSpawner(key, message, taken=taken))

    def _reserve(self, order: Reserve) -> None:
        for rank in order.ranks:
            if (order.role, rank) not in self.ports:
                count = len(self.simulation.scenario.spec.role(order.role).ports)
                numbers = tuple(self.simulation.next_pid() for _ in range(count))
                self.ports[order.role, rank] = RankAddress(self.name, numbers)
        places = tuple(self.ports[order.role, rank] for rank in order.ranks)
        if self.to_master is not None:
            self.to_master.send(Placed(self.name, order.role, order.ranks, places))

    def _probe(self, number: int, *, never: bool) -> None:
        """Ask a program until it is ready, then from time to time."""
        worker = self.state.workers.get(number)
        if worker is None or not self.alive:
            return
        rng, clock = self.simulation.rng, self.simulation.clock
        ok = not never and self.simulation.answers(worker.who, ready=worker.was_ready)
        why = "" if ok else rng.choice(("status 503", "it does not answer"))
        self.apply(events.Probed(number, ok, why, self.simulation.wall(self.name)))
        worker = self.state.workers.get(number)
        if worker is not None and (not worker.was_ready or worker.alive is not None):
            pause = worker.alive.every if worker.was_ready and worker.alive is not None else 0.5
            clock.after(pause, lambda: self.awake(lambda: self._probe(number, never=never)))

    def _carry_out(self, command: events.Command) -> None:
        match command:
            case events.StartProbing(number):
                never = self.simulation.unlikely(0.03)
                self.simulation.clock.after(
                    0.01, lambda: self.awake(lambda: self._probe(number, never=never))
                )
            case events.ToMaster(message):
                if isinstance(message, WorkerExited):
                    self.exits.append(message.worker)
                if self.to_master is not None:
                    self.to_master.send(message)
            case events.ToSpawner(key, message):
                if isinstance(message, Kill):
                    self._check_kill(message)
                if key in self.spawners:
                    self.spawners[key].wake()
                    self.spawners[key].inbox.send(message)
            case events.StartSpawner(key):
                assert key not in self.spawners, "there is such a spawner already"
                self.spawners[key] = SpawnerModel(self, key)
            case events.SignalSpawner(key, signum) if key in self.spawners:
                assert signum == signal.SIGCONT, "an import has no end"
                self.spawners[key].wake()
            case events.CallLater(delay, event):
                self.simulation.clock.after(delay, lambda: self.apply(event))
            case events.KillGroups(pids):
                self.simulation.kill_pids(pids)
            case events.Leave():
                self.die("it left")
            case events.ToLinks(View() as view):
                for spawner, number, process in self.linked():
                    if (
                        self.simulation.scenario.disorder
                        and self.simulation.rng.random() < self.simulation.scenario.disorder
                    ):
                        spawner.told(number, process, view)
                    spawner.told(number, process, view)
            case events.ToLink(only, LocalEngines(engines)):
                self._bring(only, engines)
            case events.ToLink(only, View() as view):
                for spawner, number, process in self.linked():
                    if number == only:
                        spawner.told(number, process, view)

    def _bring(self, companion: int, engines: tuple[Engine, ...]) -> None:
        """A companion brings a version into each engine that answers. It may take long, and an engine may refuse it."""
        rng = self.simulation.rng
        for engine in engines:
            if engine.ready:
                version = rng.choice((None, 1, 2))
                problem = "it refused" if self.simulation.unlikely(0.05) else ""
                said = EngineWeights("policy", engine.rank, engine.incarnation, version, 1.0, problem)
                self.simulation.clock.after(
                    rng.choice((0.01, 0.5, 3.0)), partial(self._brought, companion, said)
                )

    def _brought(self, companion: int, said: EngineWeights) -> None:
        if any(process.alive for s in self.spawners.values() if (process := s.processes.get(companion))):
            self.apply(events.LinkMessage(companion, said))

    def linked(self) -> list[tuple[SpawnerModel, int, Process]]:
        """The workers with a link."""
        return [
            (spawner, number, process)
            for spawner in self.spawners.values()
            for number, process in spawner.processes.items()
            if process.alive and process.view is not None
        ]

    def _check_kill(self, kill: Kill) -> None:
        """A worker that can outlive its peers is killed for an order, for this agent's end, or for its own fault."""
        worker = self.state.workers[kill.id]
        if worker.who.role in self.state.in_place:
            own = (
                worker.sent is not None
                or worker.error is not None
                or worker.cause in ("unready", "silent", "torn", "hung", "stuck")
            )
            assert own, f"{worker.who} is killed for a peer"

    def says(self, message: Message) -> None:
        """The agent tells its master something that its core does not decide."""
        if self.alive and self.to_master is not None:
            self.to_master.send(message)

    def die(self, reason: str) -> None:
        """The agent ends; its workers end with it, and the master sees the end of the stream."""
        if not self.alive:
            return
        self.alive = False
        for spawner in self.spawners.values():
            spawner.alive = False
            for process in spawner.processes.values():
                process.alive = False
            for store in self.simulation.stores.values():
                store.alive = store.alive and store.spawner is not spawner
        self.simulation.trace(f"agent {self.name} is gone: {reason}")
        self._disconnect(reason)
