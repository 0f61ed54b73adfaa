"""Every message that crosses a stream, as a frozen value; `unirun.wire.codec` has their form in JSON.

============  =======================================================================
agent→master  Join SpawnerReady StoreOpened StoreEnded Notice Sample ViewWanted
              WorkerStarted WorkerRunning WorkerExited FromWorker (Serving GroupFormed Metrics Calls Ask)
master→agent  Appointed OpenStore StartRole StopWorkers ExitAck View ToWorker Shutdown
worker→agent  Hello Serving GroupMeets GroupFormed Stuck Metrics Calls Ask WorkerError ViewWanted
agent→worker  Welcome View Answer
CLI→master    Attach Stop
master→CLI    WorkerOutput RoleChanged Notice Ended
agent→spawner Spawn ServeStore Kill (`unirun.wire.spawning`)
spawner→agent Preloaded Forked Reaped SpawnFailed StoreOpened StoreEnded Notice
============  =======================================================================
"""

from __future__ import annotations

from collections.abc import Mapping

from unirun.values import Value, WorkerId
from unirun.wire.asking import Answer, Ask, ToWorker
from unirun.wire.reports import (
    Calls,
    Ending,
    FromWorker,
    GroupFormed,
    GroupMeets,
    Join,
    Metrics,
    Notice,
    Sample,
    Serving,
    SpawnerReady,
    Stuck,
    ViewWanted,
    WorkerError,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
)
from unirun.wire.spawning import (
    Borrow,
    Declined,
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


class StartWorker(Value):
    """One worker to be started. `devices` are the indices that its mask shows, None to leave the mask; `share` is its
    part of each of its devices."""

    rank: int
    local_rank: int
    incarnation: int
    devices: tuple[str, ...] | None = None
    cpus: tuple[int, ...] | None = None
    share: float = 1.0


class Appointed(Value, tag=True):
    """A master's first word on a stream: it leads in the term `epoch`. An agent obeys no earlier term."""

    epoch: int


class ExitAck(Value, tag=True):
    """The end of a worker is in the store; its agent need not remember it."""

    worker: WorkerId


class OpenStore(Value, tag=True):
    """Serve a new, empty store for a generation of a role, where the one before it was served."""

    role: str
    generation: int


class StartRole(Value, tag=True):
    """Start these workers of a role for a generation of its process group; those that are not named live on.

    `mask` is the variable that shows them their devices; empty when there is none.
    """

    role: str
    generation: int
    restarts: int
    world_size: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    endpoint: str
    members: tuple[StartWorker, ...]
    mask: str = ""


class StopWorkers(Value, tag=True):
    """End these ranks: `signal` first, SIGKILL to the whole process group `grace` seconds later."""

    role: str
    ranks: tuple[int, ...]
    signal: int
    grace: float


class WorkerView(Value):
    """What every worker may know of another.

    `phase`: ``starting``; ``running``, in the user's code without taking calls; ``serving``, at `addresses`;
    ``lost``, dead, with a successor or without; ``ended``, with exit code 0.
    """

    rank: int
    incarnation: int
    phase: str
    addresses: Mapping[str, str]


class RoleView(Value):
    """What every worker may know of a role; `workers` in rank order. In a view of changes it has those that changed."""

    name: str
    world_size: int
    generation: int
    endpoint: str
    phase: str
    workers: tuple[WorkerView, ...]


class View(Value, tag=True):
    """All roles as they stand now; or, unless `since` is None, what has changed since the view of that number.

    A master numbers its views one by one; `unirun.wire.views` puts them together.
    """

    roles: tuple[RoleView, ...]
    number: int = 0
    since: int | None = None


class Shutdown(Value, tag=True):
    """The job is over, or ends: the agent ends its workers and then itself.

    Workers that were not told to end yet get SIGTERM and have `grace` seconds; all are killed at once when it is None.
    `ending` is for the next master, when this one could not write how the job ends.
    """

    grace: float | None = None
    ending: Ending | None = None


class Hello(Value, tag=True):
    """A worker says who it is. `running`: it enters the user's code now."""

    worker: WorkerId
    pid: int
    running: bool


class RoleBrief(Value):
    """What the spec says of a role: what it runs (`kind`, `target`), and what is started again (`restart`)."""

    name: str
    kind: str
    target: str
    count: int
    per_node: int | None
    restart: str


class Welcome(Value, tag=True):
    """The answer to `Hello`: the roles as they stand, what the spec says of them, and the user's part of it.

    `config` is JSON by itself, in which any integer may stand. `name` is the job's. `collocations` are the groups of
    roles that share devices. `call_timeout` is in seconds.
    """

    view: View
    config: str
    name: str
    roles: tuple[RoleBrief, ...]
    collocations: tuple[tuple[str, ...], ...]
    call_timeout: float
    transport: str


class Attach(Value, tag=True):
    """A CLI wants to follow the job."""


class Stop(Value, tag=True):
    """Somebody wants the job to end: workers get `signal`, and SIGKILL after `grace` seconds (None: those of the job).

    `code` is the job's exit code, None for that of the signal.
    """

    signal: int
    reason: str
    grace: float | None = None
    code: int | None = None

    @property
    def exit_code(self) -> int:
        """The job's exit code."""
        return 128 + self.signal if self.code is None else self.code


class RoleChanged(Value, tag=True):
    """How far a role is: `running` of `total` workers are in the user's code."""

    role: str
    phase: str
    generation: int
    running: int
    total: int


class WorkerOutput(Value, tag=True):
    """A worker has a process: what it writes can be shown."""

    worker: WorkerId
    local_rank: int


class Ended(Value, tag=True):
    """The job has ended with `code`; `report` is for people, `error_file` the root cause's, if it left one."""

    code: int
    phase: str
    report: str
    error_file: str = ""


Message = (
    Join
    | SpawnerReady
    | ViewWanted
    | WorkerStarted
    | WorkerRunning
    | Serving
    | GroupFormed
    | GroupMeets
    | Stuck
    | Metrics
    | Calls
    | WorkerError
    | WorkerExited
    | Notice
    | Sample
    | Ask
    | FromWorker
    | Answer
    | ToWorker
    | Appointed
    | ExitAck
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
    | WorkerOutput
    | Ended
    | Borrow
    | Declined
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
