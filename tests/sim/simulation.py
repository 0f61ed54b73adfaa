"""One history: the master's core and the agents' cores against each other, with invariants after every step.

All is in one process: the real cores, a model of everything around them, and fake time. One `random.Random` decides, so a
seed is a history. Streams deliver in order after a random delay; between two streams nothing is ordered. Every message
goes through its JSON form on the way.
"""

from __future__ import annotations

import itertools
import random
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import import_module

import pytest

from tests.sim.accidents import Accidents
from tests.sim.fake_clock import FakeClock
from tests.sim.masters import MasterModel
from tests.sim.network import LOOK_INTERVAL, Network
from tests.sim.node import NodeModel
from tests.sim.processes import Process, StoreModel, Who
from tests.sim.scenario import Scenario, make_scenario
from tests.sim.store import FencedStore, StoreClient
from tests.sim.views import ViewChecks
from unirun.failover import context, silence
from unirun.failover.context import encode
from unirun.failover.draft import Command, Event, Finish, JobDraft, ToAgent, ToAgents, ToGuest
from unirun.failover.state import JOB_ENDS, JobState, new_job
from unirun.wire.messages import Ready, Stop, View
from unirun.wire.reports import Join, StoreOpened

deciding = import_module("unirun.failover.step")
"""The module, which the package hides behind its function."""

handle = deciding._handle

HISTORY_TIMEOUT = 300.0
"""Seconds after which somebody stops a job that does not end of itself."""


class Simulation(Accidents):
    """The history of one seed. `run` raises AssertionError or IllegalTransition when something is wrong."""

    def __init__(self, seed: int, scenario: Scenario | None = None) -> None:
        self.scenario = scenario or make_scenario(seed)
        self.rng = random.Random(f"history {seed}")
        self.clock = FakeClock()
        self._log: list[tuple[float, str, tuple[object, ...]]] = []
        self.stores: dict[str, StoreModel] = {}
        self.queues: dict[str, list[Callable[[], None]]] = {}
        self.opened: dict[str, int] = {}
        self.viewed = self.clock.now
        self.processes: list[Process] = []
        self._pids = itertools.count(100)
        self._began = self.troubled = self.clock.now
        self._away_until = 0.0
        self._epoch = 0
        self._orders_lost = False
        self.orderly: Counter[str] = Counter()
        self.bugs = 0
        self.aborted = False
        self._clients: list[StoreClient] = []
        self.network = Network(self.clock)
        self._broken: set[str] = set()
        self.store = FencedStore(lambda: self.clock.now)
        self.state = self.first_state()
        self.finish: Finish | None = None
        self.end: JobState | None = None
        self.waived = False
        self.masters: list[MasterModel] = []
        self.views = ViewChecks()
        self.nodes = {name: NodeModel(self, name) for name in self.state.nodes}

    # what the model asks for

    def next_pid(self) -> int:
        """A pid that was never used."""
        return next(self._pids)

    def unlikely(self, chance: float) -> bool:
        """Return True if trouble with this chance comes."""
        return self.rng.random() < chance * self.scenario.trouble

    def answers(self, who: Who, *, ready: bool) -> bool:
        """Return True if a program answers its probe. One that was `ready` fails now and then."""
        return self.rng.random() < (0.9 if ready else 0.4)

    def takes_port(self, who: Who) -> bool:
        """Return True if another process has a port of a program that has ended before it was ready."""
        return self.unlikely(0.1)

    def lost(self, node: str) -> bool:
        """Return True if the job goes on without a node."""
        return self.state.given_up(node)

    def drained(self, node: str) -> bool:
        """Return True if a node is to leave, so that roles meet elsewhere."""
        return node in self.state.draining

    def born(self, process: Process) -> None:
        """A process is there: nobody else may hold its rank."""
        rank = process.who[:2]
        # One whose stream has ended is sent away when it comes back, and ends its workers then. One that is silent has
        # ended them before.
        sent_away = {
            node.name
            for node in self.nodes.values()
            if self.state.given_up(node.name) and (node.name in self._broken or not self.scenario.hosts)
        }
        holders = [p.who for p in self.processes if p.alive and p.who[:2] == rank and p.node not in sent_away]
        assert not holders, f"{process.who} is started while {holders} lives"
        own = self._slots(process)
        for other in self.processes:
            if other.alive and other.node == process.node and not self.lost(other.node):
                assert own.isdisjoint(self._slots(other)), f"{process.who} has a device of {other.who}"
        assert all(p.who != process.who for p in self.processes), f"{process.who} is started twice"
        self.processes.append(process)

    def _slots(self, process: Process) -> set[str]:
        """The slots that a process has on its node, as far as the master knows of it."""
        role, rank, incarnation = process.who
        worker = next(iter(self.state.roles[role].workers[rank : rank + 1]), None)
        known = worker is not None and worker.live and worker.incarnation == incarnation
        return {*worker.own} if worker is not None and known else set()

    def peers_see(self, process: Process) -> None:
        """A process has failed: peers of its role may fail because of that."""
        for node in self.nodes.values():
            for spawner in node.spawners.values():
                for number, peer in spawner.processes.items():
                    if (
                        peer.alive
                        and peer.who[0] == process.who[0]
                        and self.rng.random() < self._follows(peer)
                    ):
                        delay = self.rng.uniform(0.0, 0.05)
                        self.clock.after(delay, partial(spawner.follow, number, peer))

    def size(self, role: str) -> int:
        """The number of ranks of a role."""
        return len(self.state.roles[role].workers)

    def disturb(self, role: str) -> None:
        """The store of a role is gone: those who wait in it fail, or are past it and wait for each other."""
        store = self.stores.get(role)
        for spawner, number, process in store.present.values() if store else ():
            if process.waits is store and self.unlikely(0.7):
                self.clock.after(self.rng.uniform(0.0, 0.05), partial(spawner.trips, number, process))

    def left(self, process: Process, store: StoreModel) -> None:
        """A process has died while it waited in a store: its peers notice that, or do not."""
        for spawner, number, peer in store.present.values():
            if peer is not process and peer.waits is store and self.unlikely(0.5):
                self.clock.after(self.rng.uniform(0.0, 0.05), partial(spawner.trips, number, peer))

    def _follows(self, process: Process) -> float:
        return self.scenario.behaviours[process.who[0]].follows

    def kill_pids(self, pids: tuple[int, ...]) -> None:
        """SIGKILL."""
        for process in self.processes:
            if process.pid in pids:
                process.alive = False

    def trace(self, text: str, *about: object) -> None:
        """Note something for a failing seed."""
        self._log.append((self.clock.now - 1_000_000.0, text, about))

    @property
    def log(self) -> list[str]:
        """The notes as lines, which only a failing seed needs."""
        return [f"{when:10.4f}  {' '.join(map(str, (text, *about)))}" for when, text, about in self._log]

    # what masters ask for

    def client(self, host: str) -> StoreClient:
        """A way to the store for a new process."""
        client = StoreClient(self.store, self.clock, self.rng, self.scenario)
        client.away_until = self._away_until
        client.host_away = lambda: self.network.away(host)
        self._clients.append(client)
        return client

    def first_state(self) -> JobState:
        """The state of the job before anything happened."""
        scenario = self.scenario
        return new_job(
            scenario.spec, scenario.placement, started=self._began, logs="/logs", inventory=scenario.inventory
        )

    def wall(self, node: str) -> float:
        """The wall clock of a node."""
        return self.clock.now + self.scenario.skews.get(node, 0.0)

    def hit_bug(self) -> None:
        """An error of its own ends a master."""
        self.bugs += 1
        self.troubled = max(self.troubled, self.clock.now + 60.0)

    def crashed(self) -> None:
        """A master is killed around a write. Whatever it has decided may be lost."""
        self.troubled = max(self.troubled, self.clock.now)

    def aborting(self, epoch: int, state: JobState) -> None:
        """A master ends a job that none can lead."""
        self._epoch, self.state, self.aborted = max(epoch, self._epoch), state, True

    def broken(self, node: str) -> None:
        """The stream of a node ends though its agent lives: it is given up at once."""
        self._broken.add(node)

    def fenced(self, node: str) -> None:
        """The agent of a node ends as it may have been given up."""
        assert not self.steady, f"the workers of {node} are killed without need"

    def given_up_silent(self, node: str) -> None:
        """A master gives up a node that is silent."""
        assert not self.steady, f"{node} is given up without need"

    def start_master(self, deposing: int) -> None:
        """Start the process of a master."""
        self.masters.append(MasterModel(self, len(self.masters), deposing))
        if deposing:
            self.troubled = max(self.troubled, self.clock.now)

    def master_at(self, number: int) -> MasterModel:
        """The process of a master, alive or not."""
        return self.masters[number]

    def stepped(
        self, epoch: int, before: JobState, event: Event, after: JobState, commands: list[Command]
    ) -> None:
        """Check what must hold after a step of a master's core."""
        self.views.told(epoch, before, after)
        if epoch < self._epoch:
            # It does not know yet that its term is over: whatever it decides is not written.
            return
        self._epoch, self.state = epoch, after
        self._orders_lost = self._orders_lost or (isinstance(event, Join) and bool(before.agents))
        if isinstance(event, StoreOpened):
            self.opened[event.role] = max(event.generation, self.opened.get(event.role, 0))
        if isinstance(event, Join):
            for store in event.stores:
                if isinstance(store, StoreOpened):
                    self.opened[store.role] = max(store.generation, self.opened.get(store.role, 0))
        self._check_master(before, event)
        self._check_budgets(before, event)
        self._check_places(before, event)
        self._check_optional(before, event)
        self._check_reforming(before, event)
        self._watch_promptness(before)
        for command in commands:
            if isinstance(command, ToAgent | ToAgents):
                self._check_order(before, event, command.message)
        self._check_news(before, event, commands)

    def kept(self, state: JobState) -> None:
        """A master has written `state`."""
        if self.end is not None:
            assert encode(self.end) == encode(state), "a job that has ended is written again"
        if state.phase in JOB_ENDS:
            self.end = state

    def carried_out(self, master: MasterModel, command: Command) -> None:
        """A master does something: it is the one that leads, and what it does follows from what is in the store."""
        if isinstance(command, ToGuest) and isinstance(command.message, Ready):
            node = self.nodes[command.node] = NodeModel(self, command.node)
            self.clock.after(self.rng.uniform(0.0, 1.0), node.join)
        if isinstance(command, ToAgents) and isinstance(command.message, View) and master.term is not None:
            self.views.sent(master.term.epoch, command.message.number, self.scenario.spec.transport)
        if isinstance(command, Finish):
            self.trace(f"the job ends with {command.verdict}")
            if self.finish is not None and not self.waived:
                assert self.finish.verdict == command.verdict, "the job ends in two ways"
            self.finish = command

    def tell(self, event: Event) -> None:
        """Somebody tells whoever leads, now or as soon as there is one."""
        leading = [master for master in self.masters if master.leads and not master.over]
        if leading:
            leading[-1].apply(event)
        elif self.finish is None and not self._hopeless:
            self.clock.after(0.2, lambda: self.tell(event))

    # the whole history

    def run(self) -> None:
        """Let everything happen, then check how it ended."""
        for name, node in self.nodes.items():
            if name not in self.scenario.absent:
                self.clock.after(self.rng.uniform(0.0, 0.2), node.join)
        self.start_master(0)
        for when, what in self.scenario.accidents:
            self.clock.after(when, partial(self.accident, what))
        self.clock.after(HISTORY_TIMEOUT - 1.0, self._must_have_stores)
        self.clock.after(HISTORY_TIMEOUT - 1.0, self._must_know)
        self.clock.after(HISTORY_TIMEOUT, self._lose_patience)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(context, "MAX_BYTES", self.scenario.piece_bytes)
            patch.setattr(silence, "SILENCE_POLL_INTERVAL", LOOK_INTERVAL)
            if self.scenario.planted:
                patch.setattr(deciding, "_handle", self._handle)
            while self.clock.run_next():
                assert self.clock.steps < 100_000, "the history does not end"
        self._check_end()

    def _handle(self, draft: JobDraft, event: Event) -> None:
        """The branch of a step that `event` takes, which may have a bug."""
        self.scenario.break_at(event)
        handle(draft, event)

    def _lose_patience(self) -> None:
        """Somebody stops the job, and asks again when that master dies before it has written so.

        An end that was not written is forgotten when no agent had joined that could tell the next master: the job begins
        again.
        """
        self.tell(Stop(signal.SIGTERM, "it takes too long"))
        if (self.finish is None or self.waived) and not self._hopeless:
            self.clock.after(60.0, self._lose_patience)
