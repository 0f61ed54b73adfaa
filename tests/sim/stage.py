"""What a simulated master needs of the simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.masters import MasterModel
import random
from typing import Protocol

from tests.sim.node import Node
from tests.sim.store import Client
from tests.sim.world import Clock, Plan
from unirun.job.events import Command, Event
from unirun.job.state import JobState
from unirun.rendezvous.store.memory import MemoryStore


class Stage(Protocol):
    """What masters need of the simulation."""

    clock: Clock
    rng: random.Random
    plan: Plan
    store: MemoryStore
    nodes: dict[str, Node]
    waived: bool
    """Whether a job has ended without that being written."""

    def client(self) -> Client:
        """A way to the store for a new process."""

    def first_state(self) -> JobState:
        """The state of the job before anything happened."""

    def wall(self, node: str) -> float:
        """The wall clock of a node."""

    def trace(self, text: str) -> None:
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

    def aborting(self, epoch: int, state: JobState) -> None:
        """A master ends a job that none can lead."""
