"""What the agent's state machine is told, and what it asks for; and the worker that both speak of."""

from __future__ import annotations

from enum import StrEnum

from unirun.launcher.environment import SpawnerKey
from unirun.values import Value, WorkerId
from unirun.wire.asking import ToWorker
from unirun.wire.messages import ExitAck, Message, Shutdown, StopWorkers, View
from unirun.wire.reports import CallCount, Cause, Serving, WorkerError
from unirun.wire.spawning import ServeStore, Spawn, StoreEnded


class Phase(StrEnum):
    """`QUEUED`: its spawner is not ready; `FORKING`: ordered; `ALIVE`: has a process."""

    QUEUED = "queued"
    FORKING = "forking"
    ALIVE = "alive"


class Worker(Value):
    """One worker that has not ended. `grace` is the job's `shutdown_timeout` in seconds.

    `cause` says what makes it end, ``own`` as long as nothing else does; `sent` is the last signal that it was sent
    for an order or because the agent leaves. `doom` says what it needs and is gone, when that is the cause.
    `generation` (that it has formed), `met` (whose store it has used), `serving` and `calls` are what it has said of
    itself. `expired` names a timer that it has not released in time.
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
    calls: tuple[CallCount, ...] = ()
    grace: float = 30.0
    doom: str = ""
    expired: str = ""


class Launch(Value):
    """The master wants these workers; others of their roles may live."""

    workers: tuple[Worker, ...]


class Store(Value):
    """The master wants this store, which replaces the one of the role's last generation.

    `sent`: to its spawner; `opened`: it is there. `ended` tells that it is gone, and why.
    """

    spawner: SpawnerKey
    request: ServeStore
    sent: bool = False
    opened: bool = False
    ended: StoreEnded | None = None


class FromSpawner(Value):
    """A spawner says something; of a worker's end, `note` and `tail` (see `WorkerExited`) come with it."""

    key: SpawnerKey
    message: Message
    note: str = ""
    tail: str = ""


class SpawnerDown(Value):
    """A spawner has ended; its workers die with it."""

    key: SpawnerKey
    reason: str
    time: float


class LinkMessage(Value):
    """A worker says something on its link."""

    id: int
    message: Message


class LinkClosed(Value):
    """A worker's link has ended."""

    id: int


class GraceOver(Value):
    """The time that a worker had to end, from when it was told to, is over."""

    id: int


class StillEnding(Value):
    """`waited` seconds have passed since a worker has reported the error that ends it."""

    id: int
    waited: float


class StillWithoutLink(Value):
    """A moment after its link has ended: a worker that lives on has closed it itself."""

    id: int


class TimerExpired(Value):
    """Timers of the process `pid`, in the session of a worker, were not released in time; `signal` is what their owner
    wants to be sent then."""

    pid: int
    session: int
    scopes: tuple[str, ...]
    signal: int


class Led(Value):
    """A master has said that it leads in the term `epoch`."""

    epoch: int


Instruction = Launch | Store | StopWorkers | ExitAck | View | ToWorker | Shutdown
"""What masters want."""


class Order(Value):
    """The master of the term `epoch` wants something."""

    epoch: int
    what: Instruction


class Abandon(Value):
    """The agent cannot or must not go on: the command that the job belongs to is gone, or a part of itself."""

    reason: str


Event = (
    Led
    | Order
    | FromSpawner
    | SpawnerDown
    | LinkMessage
    | LinkClosed
    | GraceOver
    | StillEnding
    | StillWithoutLink
    | TimerExpired
    | Abandon
)


class ToMaster(Value):
    """Tell the master."""

    message: Message


class ToSpawner(Value):
    """Tell a spawner."""

    key: SpawnerKey
    message: Message


class StartSpawner(Value):
    """Start a spawner: there is none, or it has died."""

    key: SpawnerKey


class ToLink(Value):
    """Tell one worker, if it has a link."""

    id: int
    message: Message


class ToLinks(Value):
    """Tell every worker that has a link."""

    message: Message


class After(Value):
    """Come back with `event` after `delay` seconds."""

    delay: float
    event: Event


class KillGroups(Value):
    """SIGKILL the process groups of these pids: what a dead spawner has left."""

    pids: tuple[int, ...]


class Signal(Value):
    """Send `signal` to one process."""

    pid: int
    signal: int


class Leave(Value):
    """Nothing is left to do; the agent ends."""


Command = ToMaster | ToSpawner | StartSpawner | ToLink | ToLinks | After | KillGroups | Signal | Leave
