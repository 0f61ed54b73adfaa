"""Workers' processes of a simulated job, and the rendezvous stores in which they meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.spawner import SpawnerModel
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unirun.wire.messages import View

Who = tuple[str, int, int]
"""Role, rank, incarnation."""


@dataclass
class Process:
    """A worker's process in the model."""

    pid: int
    who: Who
    node: str
    generation: int
    """The generation of the group which it is in, or was started for."""
    met: int = -1
    """The latest generation in whose store it has been."""
    waits: StoreModel | None = None
    """The store in which it waits for its peers: until all are there, or until something wakes it."""
    formed: bool = False
    """True if the process is in a group, of the present generation or an earlier one."""
    view: View | None = None
    """Its knowledge of all roles, once it is welcome."""
    serving: bool = False
    inside: bool = False
    """True if it is in a function that survives the loss of other ranks (`unirun.resilient`)."""
    returned: int = -1
    """The generation in which it has returned from that function."""
    failed: float | None = None
    """The time at which its code has failed, while it lives on."""
    alive: bool = True
    deaf: bool = False
    stopped: bool = False
    """True if it does nothing, as after SIGSTOP."""

    @property
    def works(self) -> bool:
        """True if its code runs."""
        return self.alive and self.failed is None and not self.stopped


@dataclass
class StoreModel:
    """The store that is served at a role's socket, or was served last; `present` is who has been there, by rank."""

    spawner: SpawnerModel
    generation: int
    alive: bool = True
    present: dict[int, tuple[SpawnerModel, int, Process]] = field(default_factory=dict)


def rng_delay(rng: random.Random) -> float:
    """A moment in the life of a worker."""
    return rng.choice((0.001, 0.1, 3.0))
