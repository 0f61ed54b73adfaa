"""Every message that crosses a stream, as a frozen value; `unirun.wire.codec` has their form in JSON.

============  =======================================================================
agent→master  Join SpawnerReady StoreOpened StoreEnded Notice Sample
              WorkerStarted WorkerRunning WorkerServing WorkerFormed WorkerMetrics WorkerExited
master→agent  OpenStore StartRole StopWorkers View Shutdown
worker→agent  Hello Serving GroupFormed Metrics WorkerError
agent→worker  Welcome View
CLI→master    Attach Stop
master→CLI    WorkerStarted RoleChanged Notice Ended
agent→spawner Spawn ServeStore Kill (`unirun.wire.spawning`)
spawner→agent Preloaded Forked Reaped SpawnFailed StoreOpened StoreEnded Notice
============  =======================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

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

Figure = Annotated[float, "may be nan or infinite"]
"""A number that a user's code has computed."""

Cause = Literal["own", "order", "leaving", "doom"]
"""What made a worker end: itself; the master's order; its agent, which leaves; its agent, because it cannot do its
work any more."""


@dataclass(frozen=True, slots=True)
class Join:
    """An agent is there. `endpoints`: for each role, the ``addr:port`` that it holds for its store."""

    node: str
    pid: int
    host: str
    endpoints: dict[str, str]


@dataclass(frozen=True, slots=True)
class SpawnerReady:
    """A spawner can fork workers; it took `seconds` to import torch."""

    node: str
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A worker has a process."""

    node: str
    role: str
    rank: int
    incarnation: int
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerRunning:
    """A worker is set up and enters the user's code; `generation` is the one of its role that it was told of."""

    role: str
    rank: int
    incarnation: int
    generation: int


@dataclass(frozen=True, slots=True)
class Serving:
    """A worker takes calls at `addresses`, by transport. `recoverable`: whether the job can go on without what
    it holds in memory."""

    addresses: dict[str, str]
    recoverable: bool


@dataclass(frozen=True, slots=True)
class WorkerServing:
    """`Serving`, with the worker that said it."""

    role: str
    rank: int
    incarnation: int
    addresses: dict[str, str]
    recoverable: bool


@dataclass(frozen=True, slots=True)
class GroupFormed:
    """A worker that lived on has formed its role's process group again, as `generation`."""

    generation: int


@dataclass(frozen=True, slots=True)
class WorkerFormed:
    """`GroupFormed`, with the worker that said it."""

    role: str
    rank: int
    incarnation: int
    generation: int


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures by name that a worker wants to be seen, as of `time` in seconds since the epoch."""

    values: dict[str, Figure]
    time: float


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """`Metrics`, with the worker that said it."""

    role: str
    rank: int
    incarnation: int
    values: dict[str, Figure]
    time: float


@dataclass(frozen=True, slots=True)
class WorkerError:
    """An exception that ended a worker: its last line, its traceback, and when (seconds since the epoch)."""

    message: str
    traceback: str
    time: float


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker has ended, at `time` in seconds since the epoch, by `code` or by `signal`.

    `sent` is the last signal that it was sent for an order or because its agent leaves, None for other causes.
    `note` says what the agent knows besides: that the kernel was out of memory, or that the worker never ran.
    `tail` holds the last lines of its stderr when it failed without an exception.
    """

    role: str
    rank: int
    incarnation: int
    time: float
    code: int | None
    signal: int | None
    cause: Cause = "own"
    sent: int | None = None
    error: WorkerError | None = None
    note: str = ""
    tail: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a person should know; no decision hangs on it. `source` is ``role:rank`` or a node."""

    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory (resident, bytes) and processor time (seconds) of the workers, by ``role:rank``."""

    node: str
    memory: dict[str, int]
    cpu: dict[str, float]


@dataclass(frozen=True, slots=True)
class Member:
    """One worker to be started. `devices` are the indices that its mask shows, None to leave the mask."""

    rank: int
    local_rank: int
    incarnation: int
    devices: tuple[str, ...] | None = None
    cpus: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Serve a new, empty store for a generation of a role, where the one before it was served."""

    role: str
    generation: int


@dataclass(frozen=True, slots=True)
class StartRole:
    """Start these workers of a role for a generation of its process group; those that are not named live on."""

    role: str
    generation: int
    restarts: int
    world_size: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    endpoint: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """End these ranks: `signal` first, SIGKILL to the whole process group `grace` seconds later."""

    role: str
    ranks: tuple[int, ...]
    signal: int
    grace: float


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What every worker may know of another.

    `phase`: ``starting``; ``running``, in the user's code without taking calls; ``serving``, at `addresses`;
    ``lost``, dead, with a successor or without; ``ended``, with exit code 0.
    """

    rank: int
    incarnation: int
    phase: str
    addresses: dict[str, str]


@dataclass(frozen=True, slots=True)
class RoleView:
    """What every worker may know of a role; `workers` in rank order."""

    name: str
    world_size: int
    generation: int
    endpoint: str
    phase: str
    workers: tuple[WorkerView, ...]


@dataclass(frozen=True, slots=True)
class View:
    """All roles as they stand now."""

    roles: tuple[RoleView, ...]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The job is over; the agent ends."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker says who it is. `running`: it enters the user's code now."""

    role: str
    rank: int
    incarnation: int
    pid: int
    running: bool


@dataclass(frozen=True, slots=True)
class RoleBrief:
    """What the spec says of a role: what it runs (`kind`, `target`), and what is started again (`restart`)."""

    name: str
    kind: str
    target: str
    count: int
    per_node: int | None
    restart: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to `Hello`: the roles as they stand, what the spec says of them, and the user's part of it.

    `name` is the job's. `collocations` are the groups of roles that share devices. `call_timeout` is in seconds.
    """

    view: View
    config: dict[str, Any]
    name: str
    roles: tuple[RoleBrief, ...]
    collocations: tuple[tuple[str, ...], ...]
    call_timeout: float
    transport: str


@dataclass(frozen=True, slots=True)
class Attach:
    """A CLI wants to follow the job."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Somebody wants the job to end."""

    signal: int
    reason: str
    grace: float | None = None


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """How far a role is: `running` of `total` workers are in the user's code."""

    role: str
    phase: str
    generation: int
    running: int
    total: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The job has ended with `code`; `report` is for people, `error_file` the root cause's, if it left one."""

    code: int
    phase: str
    report: str
    error_file: str = ""


Message = (
    Join
    | SpawnerReady
    | WorkerStarted
    | WorkerRunning
    | Serving
    | WorkerServing
    | GroupFormed
    | WorkerFormed
    | Metrics
    | WorkerMetrics
    | WorkerError
    | WorkerExited
    | Notice
    | Sample
    | OpenStore
    | StartRole
    | StopWorkers
    | View
    | Shutdown
    | Hello
    | Welcome
    | Attach
    | Stop
    | RoleChanged
    | Ended
    | Spawn
    | ServeStore
    | Kill
    | Preloaded
    | Forked
    | SpawnFailed
    | StoreOpened
    | StoreEnded
    | Reaped
)
