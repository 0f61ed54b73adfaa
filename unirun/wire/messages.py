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
    """One worker to start. `devices` are the indices for its device mask, None to leave the mask as it is; it has the
    part `share` of each of its devices."""

    rank: int
    local_rank: int
    incarnation: int
    devices: tuple[str, ...] | None = None
    cpus: tuple[int, ...] | None = None
    share: float = 1.0


class Appointed(Value, tag=True):
    """A master's first message on a stream: it leads in the term `epoch`. An agent obeys no earlier term."""

    epoch: int


class ExitAck(Value, tag=True):
    """The end of a worker is in the store, so its agent may forget it."""

    worker: WorkerId


class OpenStore(Value, tag=True):
    """Orders a new, empty rendezvous store for a generation of a role, at the endpoint of the one before."""

    role: str
    generation: int


class StartRole(Value, tag=True):
    """Orders the start of `members` of a role for a generation of its process group; its other workers live on.

    `mask` is the environment variable with the device mask (``CUDA_VISIBLE_DEVICES``), empty when there is none.
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
    """Orders the end of these ranks: `signal` at once, SIGKILL to their process groups `grace` seconds later."""

    role: str
    ranks: tuple[int, ...]
    signal: int
    grace: float


class WorkerView(Value):
    """What all workers know of one.

    `phase` is ``starting``; ``running`` (in the user's code, takes no calls); ``serving`` (takes calls at `addresses`,
    by transport); ``lost`` (ended, other than with code 0); or ``ended`` (with code 0).
    """

    rank: int
    incarnation: int
    phase: str
    addresses: dict[str, str]


class RoleView(Value):
    """What all workers know of a role; `workers` in rank order. A view of changes has only those that have changed."""

    name: str
    world_size: int
    generation: int
    endpoint: str
    phase: str
    workers: tuple[WorkerView, ...]


class View(Value, tag=True):
    """The state of all roles; or, unless `since` is None, what has changed since the view of that number.

    The views of a master are numbered consecutively; `unirun.wire.views` applies changes.
    """

    roles: tuple[RoleView, ...]
    number: int = 0
    since: int | None = None


class Shutdown(Value, tag=True):
    """The job ends or has ended: the agent ends its workers, and then itself.

    Workers that were not told to end yet get SIGTERM and `grace` seconds; when it is None, all are killed at once.
    `ending` is how the job ends, for the next master, when this one could not write it.
    """

    grace: float | None = None
    ending: Ending | None = None


class Hello(Value, tag=True):
    """A worker's first message. `running`: it enters the user's code now."""

    worker: WorkerId
    pid: int
    running: bool


class RoleBrief(Value):
    """What workers know of the spec of a role: what it runs (`kind`, `target`), and what restarts (`restart`)."""

    name: str
    kind: str
    target: str
    count: int
    per_node: int | None
    restart: str


class Welcome(Value, tag=True):
    """The answer to `Hello`: a whole view, and what workers need of the spec.

    `config` is the user's, as a JSON text, in which integers may have any size. `name` is the job's. `collocations` are
    the groups of roles that share devices. `call_timeout` is in seconds.
    """

    view: View
    config: str
    name: str
    roles: tuple[RoleBrief, ...]
    collocations: tuple[tuple[str, ...], ...]
    call_timeout: float
    transport: str


class Attach(Value, tag=True):
    """A command wants to follow the job. Its `owner` is the one that the job must not outlive: the end of that stream
    is the end of the job."""

    owner: bool = False


class Stop(Value, tag=True):
    """Asks for the end of the job: workers get `signal`, and SIGKILL after `grace` seconds (None: the job's).

    `code` is the exit code of the job, None for 128 + `signal`.
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
    """The progress of a role: `running` of `total` workers are in the user's code."""

    role: str
    phase: str
    generation: int
    running: int
    total: int


class WorkerOutput(Value, tag=True):
    """A worker has a process, so its output can be shown."""

    worker: WorkerId
    local_rank: int


class Ended(Value, tag=True):
    """The job has ended with `code`; `report` is for people, `error_file` the path of the root cause's, or empty."""

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
