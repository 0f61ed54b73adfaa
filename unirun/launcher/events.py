"""Events and commands of the agent's state machine."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from signal import SIGTERM

from msgspec import field

from unirun.launcher.environment import SpawnerKey
from unirun.spec.job import Probe
from unirun.values import Value, WorkerId
from unirun.wire.asking import ToWorker
from unirun.wire.messages import ExitAck, Message, PassOn, Shutdown, StopWorkers, View
from unirun.wire.reports import CallCount, Cause, Health, Serving, WorkerError
from unirun.wire.spawning import ServeStore, Spawn, StoreEnded


class Phase(StrEnum):
    """`QUEUED`: its spawner is not ready; `FORKING`: requested from the spawner; `ALIVE`: has a process."""

    QUEUED = "queued"
    FORKING = "forking"
    ALIVE = "alive"


class Worker(Value):
    """A worker that has not ended. `grace` is the job's `shutdown_timeout` in seconds.

    `cause` is the reason for its end, ``own`` until there is another; `sent` is the last signal that it was sent by
    order or because the agent leaves. `doom` explains the causes ``doom`` and ``stuck``. The worker itself reports
    `generation` (which it has formed), `met` (whose store it has used), `serving`, `calls`, and the `addresses` at
    which it listens. `expired` names a timer that it has not released in time. `ready` and `alive` are the probes of a
    program, `health` is what they say, and `was_ready` whether it was ever ready; `misses` counts answers in a row that
    did not come. An engine has a `url`, and a `companion`, the role that brings weights into it; it is ready when it is
    `current` besides, as its companion says.
    """

    id: int
    who: WorkerId
    spawner: SpawnerKey
    request: Spawn
    phase: Phase = Phase.QUEUED
    pid: int | None = None
    cause: Cause = "own"
    sent: int | None = None
    error: WorkerError | None = None
    running: bool = False
    generation: int = 0
    met: int = 0
    serving: Serving | None = None
    addresses: Mapping[str, str] = field(default_factory=dict)
    calls: tuple[CallCount, ...] = ()
    grace: float = 30.0
    doom: str = ""
    expired: str = ""
    ready: Probe | None = None
    ready_timeout: float = 0.0
    alive: Probe | None = None
    health: Health | None = None
    was_ready: bool = False
    misses: int = 0
    url: str = ""
    companion: str = ""
    current: bool = False


class Launch(Value):
    """Start these workers; others of their roles may be running."""

    workers: tuple[Worker, ...]


class Store(Value):
    """Open this rendezvous store, in place of that of the role's previous generation.

    `sent`: requested from the spawner; `opened`: it listens; `ended` is set when it is gone.
    """

    spawner: SpawnerKey
    request: ServeStore
    sent: bool = False
    opened: bool = False
    ended: StoreEnded | None = None


class FromSpawner(Value):
    """A message of a spawner; for the end of a worker with `note`, `tail` and `taken` (see `WorkerExited`)."""

    key: SpawnerKey
    message: Message
    note: str = ""
    tail: str = ""
    taken: bool = False


class Probed(Value):
    """A worker was asked at `time`, in seconds since the epoch, and has answered (`ok`), or not, and `why`."""

    id: int
    ok: bool
    why: str
    time: float


class ReadyDue(Value):
    """The time in which a worker had to become ready is over."""

    id: int


class SpawnerDown(Value):
    """A spawner has ended; its workers die with it."""

    key: SpawnerKey
    reason: str
    time: float


class LinkMessage(Value):
    """A message of a worker on its link."""

    id: int
    message: Message


class LinkClosed(Value):
    """A worker's link has ended."""

    id: int


class GraceOver(Value):
    """The grace period of a worker that was told to end is over."""

    id: int


class StopDue(Value):
    """The end of the delay of `StopWorkers`: tell the worker to end, if it lives and was not told before."""

    id: int
    signal: int
    grace: float


class StillEnding(Value):
    """`waited` seconds have passed since a worker reported the error that ends it."""

    id: int
    waited: float


class StillWithoutLink(Value):
    """Some time after the end of a worker's link: if the worker still lives, it has closed the link itself."""

    id: int


class TimerExpired(Value):
    """Timers of the process `pid`, in the session of a worker, were not released in time; `signal` is to be sent to
    it."""

    pid: int
    session: int
    scopes: tuple[str, ...]
    signal: int


class Led(Value):
    """A master announced that it leads in the term `epoch`."""

    epoch: int


Instruction = Launch | Store | StopWorkers | PassOn | ExitAck | View | ToWorker | Shutdown
"""Instructions of a master."""


class Order(Value):
    """An instruction of the master of the term `epoch`."""

    epoch: int
    what: Instruction


LOST_GRACE = 0.4
"""Seconds between SIGTERM and SIGKILL when the command is gone: workers must end within one second."""


class Abandon(Value):
    """The agent must end: the owner of the job is gone, or the agent has failed or was told to. Its workers get
    `signal`, and SIGKILL after `grace` seconds; with 0 they are killed at once."""

    reason: str
    grace: float = LOST_GRACE
    signal: int = SIGTERM


Event = (
    Led
    | Order
    | FromSpawner
    | SpawnerDown
    | LinkMessage
    | LinkClosed
    | GraceOver
    | StopDue
    | StillEnding
    | StillWithoutLink
    | TimerExpired
    | Probed
    | ReadyDue
    | Abandon
)


class ToMaster(Value):
    """Send to the master."""

    message: Message


class ToSpawner(Value):
    """Send to a spawner."""

    key: SpawnerKey
    message: Message


class StartSpawner(Value):
    """Start a spawner."""

    key: SpawnerKey


class ToLink(Value):
    """Send to one worker, if it has a link."""

    id: int
    message: Message


class ToLinks(Value):
    """Send to every worker that has a link."""

    message: Message


class After(Value):
    """Apply `event` after `delay` seconds."""

    delay: float
    event: Event


class KillGroups(Value):
    """SIGKILL the process groups of these pids, which a dead spawner has left."""

    pids: tuple[int, ...]


class Signal(Value):
    """Send `signal` to one process; with `handled` only if it handles or awaits it, so that the signal ends nothing."""

    pid: int
    signal: int
    handled: bool = False


class Watch(Value):
    """Ask the worker's probes from now on."""

    id: int


class Unwatch(Value):
    """Ask them no more."""

    id: int


class Leave(Value):
    """End the agent."""


Command = (
    ToMaster
    | ToSpawner
    | StartSpawner
    | ToLink
    | ToLinks
    | After
    | KillGroups
    | Signal
    | Watch
    | Unwatch
    | Leave
)
