"""The protocols by which simulated masters, nodes and spawners use the simulation."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tests.sim.fake_clock import FakeClock
    from tests.sim.masters import MasterModel
    from tests.sim.network import Network
    from tests.sim.node import MasterProcess, NodeModel
    from tests.sim.processes import Process, StoreModel, Who
    from tests.sim.scenario import Scenario
    from tests.sim.store import StoreClient
    from unirun.failover.draft import Command, Event
    from unirun.failover.state import JobState
    from unirun.launcher import events
    from unirun.launcher.events import AgentState
    from unirun.rendezvous.store.memory import MemoryStore
    from unirun.rendezvous.store.protocol import Store


class SimulationOfMasters(Protocol):
    """The part of the simulation that masters use."""

    clock: FakeClock
    rng: random.Random
    scenario: Scenario
    nodes: dict[str, NodeModel]
    waived: bool
    """True if a job has ended without that being written."""

    @property
    def store(self) -> MemoryStore:
        """The store that all clients lead to."""

    def client(self, host: str) -> StoreClient:
        """A way to the store for a new process."""

    def given_up_silent(self, node: str) -> None:
        """A master gives up a node that is silent."""

    def first_state(self) -> JobState:
        """The state of the job before anything happened."""

    def wall(self, node: str) -> float:
        """The wall clock of a node."""

    def trace(self, text: str, *about: object) -> None:
        """Note something for a failing seed."""

    def stepped(
        self, epoch: int, before: JobState, event: Event, after: JobState, commands: list[Command]
    ) -> None:
        """Check what must hold after a step of a master's core."""

    def kept(self, state: JobState) -> None:
        """A master has written `state`."""

    def carried_out(self, master: MasterModel, command: Command) -> None:
        """A master does something."""

    def hit_bug(self) -> None:
        """An error of its own ends a master."""

    def crashed(self) -> None:
        """A master is killed around a write."""

    def aborting(self, epoch: int, state: JobState) -> None:
        """A master ends a job that none can lead."""


class SimulationOfNodes(Protocol):
    """The part of the simulation that nodes and spawners use."""

    clock: FakeClock
    rng: random.Random
    scenario: Scenario
    stores: dict[str, StoreModel]
    queues: dict[str, list[Callable[[], None]]]
    """By role, who has connected to its socket while no store is served there."""

    def next_pid(self) -> int:
        """A pid that was never used."""

    def unlikely(self, chance: float) -> bool:
        """Return True if trouble with this chance comes."""

    def answers(self, who: Who, *, ready: bool) -> bool:
        """Return True if a program answers its probe."""

    def takes_port(self, who: Who) -> bool:
        """Return True if another process has a port of a program that has ended before it was ready."""

    def wall(self, node: str) -> float:
        """The wall clock of a node."""

    def drained(self, node: str) -> bool:
        """Return True if a node is to leave, so that roles meet elsewhere."""

    def lost(self, node: str) -> bool:
        """Return True if the job goes on without a node."""

    def born(self, process: Process) -> None:
        """A process is there."""

    def peers_see(self, process: Process) -> None:
        """A process has failed: peers of its role may follow."""

    def disturb(self, role: str) -> None:
        """The store of a role is gone: those who wait in it may fail."""

    def size(self, role: str) -> int:
        """The number of ranks of a role."""

    def killed_while_it_ended(self, node: NodeModel, number: int, since: float) -> None:
        """SIGKILL has come for a process whose code has failed at `since`."""

    def left(self, process: Process, store: StoreModel) -> None:
        """A process has died while it waited in a store."""

    def kill_pids(self, pids: tuple[int, ...]) -> None:
        """SIGKILL."""

    def trace(self, text: str, *about: object) -> None:
        """Note something for a failing seed."""

    network: Network

    def client(self, host: str) -> Store:
        """A way to the store."""

    def fenced(self, node: str) -> None:
        """The agent of a node ends as it may have been given up."""

    def broken(self, node: str) -> None:
        """The stream of a node ends though its agent lives."""

    def master_at(self, number: int) -> MasterProcess:
        """The process of a master, alive or not."""

    def start_master(self, deposing: int) -> None:
        """Start the process of a master."""

    def checked_agent(self, node: NodeModel, before: AgentState, event: events.Event) -> None:
        """Check what must hold after a step of an agent's core."""
