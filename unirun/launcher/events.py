"""Events and commands of the agent's state machine."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from signal import SIGTERM

from msgspec import field
from msgspec.structs import replace

from unirun.failover.state import MESSAGE, NOTE, OWNER_LOST_GRACE_SECONDS, TAIL, TRACEBACK, beginning, ending
from unirun.launcher.environment import SpawnerKey
from unirun.spec.job import Probe
from unirun.values import Value, WorkerId
from unirun.wire.messages import ExitAck, Inject, PassOn, Shutdown, StopWorkers, View
from unirun.wire.reports import (
    CallCount,
    Cause,
    Ending,
    EngineWeights,
    FromWorker,
    Health,
    HeldWorker,
    MasterReply,
    Message,
    Notice,
    OpenStore,
    Serving,
    Spawn,
    StoreEnded,
    StoreOpened,
    Stuck,
    WorkerError,
    WorkerExited,
)


class Phase(StrEnum):
    """`QUEUED`: its spawner is not ready; `FORKING`: requested from the spawner; `ALIVE`: has a process."""

    QUEUED = "queued"
    FORKING = "forking"
    ALIVE = "alive"


class Worker(Value):
    """A worker that has not ended. `grace` is the job's `shutdown_timeout` in seconds.

    `cause` is the reason for its end, ``own`` until there is another; `sent` is the last signal that it was sent by
    order or because the agent leaves. `kill_reason` explains the causes ``lost_dependency`` and ``stuck``. The worker
    itself reports `generation` (which it has formed), `met` (whose store it has used), `serving`, `calls`, and the
    `addresses` at which it listens. `expired` names a timer that it has not released in time. `ready` and `alive` are
    the probes of a program, `health` is what they say, and `was_ready` whether it was ever ready; `misses` counts
    answers in a row that did not come. An engine has a `url`, and a `companion`, the role that brings weights into it;
    it is ready when it is `current` besides, as its companion says.
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
    kill_reason: str = ""
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
    resilient: bool | None = None


class Launch(Value):
    """Start these workers; others of their roles may be running."""

    workers: tuple[Worker, ...]


class RendezvousStore(Value):
    """Open this rendezvous store, in place of that of the role's previous generation.

    `sent`: requested from the spawner; `opened`: it listens; `ended` is set when it is gone.
    """

    spawner: SpawnerKey
    request: OpenStore
    sent: bool = False
    opened: bool = False
    ended: StoreEnded | None = None


class FromSpawner(Value):
    """A message of a spawner; for the end of a worker with `note`, `tail`, `taken` and `step` (see `WorkerExited`)."""

    key: SpawnerKey
    message: Message
    note: str = ""
    tail: str = ""
    taken: bool = False
    step: int = -1


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


class Throttle(Value):
    """A worker that is to be `factor` times as slow: it stops now, or (`stop` False) goes on."""

    id: int
    factor: float
    stop: bool


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


class StillImporting(Value):
    """The import of a spawner, the one that was started as number `start`, began `waited` seconds ago. It may have
    ended."""

    key: SpawnerKey
    waited: float
    start: int = 0


class Hung(Value):
    """A worker hangs, and `why`."""

    id: int
    why: str


class Led(Value):
    """A master announced that it leads in the term `epoch`."""

    epoch: int


Instruction = (
    Launch | RendezvousStore | StopWorkers | PassOn | Inject | ExitAck | View | MasterReply | Shutdown
)
"""Instructions of a master."""


class Order(Value):
    """An instruction of the master of the term `epoch`."""

    epoch: int
    what: Instruction


class Abandon(Value):
    """The agent must end: the owner of the job is gone, or the agent has failed or was told to. Its workers get
    `signal`, and SIGKILL after `grace` seconds; with 0 they are killed at once."""

    reason: str
    grace: float = OWNER_LOST_GRACE_SECONDS
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
    | Throttle
    | StillEnding
    | StillWithoutLink
    | TimerExpired
    | Probed
    | ReadyDue
    | StillImporting
    | Hung
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


class SignalSpawner(Value):
    """Send `signal` to a spawner, if it is there."""

    key: SpawnerKey
    signal: int


class ToLink(Value):
    """Send to one worker, if it has a link."""

    id: int
    message: Message


class ToLinks(Value):
    """Send to every worker that has a link."""

    message: Message


class CallLater(Value):
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


class SendFault(Value):
    """Write `text` to the file for faults in `folder`, and let the worker, which has the process `pid`, read it."""

    worker: WorkerId
    pid: int
    folder: str
    text: str


class StartProbing(Value):
    """Ask the worker's probes from now on."""

    id: int


class StopProbing(Value):
    """Ask them no more."""

    id: int


class Leave(Value):
    """End the agent."""


Command = (
    ToMaster
    | ToSpawner
    | StartSpawner
    | SignalSpawner
    | ToLink
    | ToLinks
    | CallLater
    | KillGroups
    | Signal
    | SendFault
    | StartProbing
    | StopProbing
    | Leave
)


# The ends of workers as an agent keeps them: the last lines of output, and messages and tracebacks cut to size.
#
# A worker may report 300 KB; its log and its error file have all of it. While a job has no master, an agent keeps the
# ends of all its workers, and sends them to the next master in one message.

TAIL_LINES = 12
TAIL_BYTES = 1 << 14
"""Limits of the part of a failed worker's output that goes into the report."""

WORDS = 4 << 20
"""Limit in bytes of JSON of all errors, notes and tails in one `Join`. The rest of it takes as much for 10 000
workers."""

WHOLE = 16
"""Number of failures that are not shortened when not all fit: the first ones, which probably caused the others."""

_TRACKERS = re.compile(
    r"(/[\w.+~@-]+)*/resource_tracker\.py:\d+: UserWarning: resource_tracker: (There appear to be |').*\n?"
    r"(  warnings\.warn\(.*\n?)?"
)
"""Warnings of a resource tracker that removes what a dead process has left: its end is the reason for them. They may
follow a line that has no end, as that of a progress bar."""

_LEAST = 16
_EACH = MESSAGE + TRACEBACK + TAIL + NOTE


def short_error(error: WorkerError, share: float = 1.0) -> WorkerError:
    """Cut `error` to the beginning of its message and the end of its traceback."""
    return replace(
        error,
        message=beginning(error.message, _part(MESSAGE, share)),
        traceback=ending(error.traceback, _part(TRACEBACK, share)),
    )


def short_end(end: WorkerExited, share: float = 1.0) -> WorkerExited:
    """Cut the texts of `end` to their limits, multiplied by `share`."""
    return replace(
        end,
        error=None if end.error is None else short_error(end.error, share),
        note=beginning(end.note, _part(NOTE, share)),
        tail=ending(end.tail, _part(TAIL, share)),
    )


def _part(limit: int, share: float) -> int:
    return max(_LEAST, int(limit * share))


def fitting(held: Iterable[HeldWorker]) -> tuple[HeldWorker, ...]:
    """Shorten the texts of `held` workers so that all fit into one message."""
    workers = tuple(held)
    failed = sorted((each.exit for each in workers if each.exit is not None and _says(each.exit)), key=_when)
    if len(failed) * _EACH <= WORDS:
        return workers
    whole = {end.worker for end in failed[:WHOLE]}
    share = (WORDS - WHOLE * _EACH) / (len(failed) * _EACH)
    return tuple(
        each if each.exit is None or each.worker in whole else replace(each, exit=short_end(each.exit, share))
        for each in workers
    )


def masked(message: Message, mask: Callable[[str], str]) -> Message:
    """A message of a worker without secrets in its texts."""
    match message:
        case WorkerError():
            return replace(message, message=mask(message.message), traceback=mask(message.traceback))
        case Stuck():
            return replace(message, why=mask(message.why), stack=mask(message.stack))
        case Notice():
            return replace(message, text=mask(message.text))
        case EngineWeights():
            return replace(message, problem=mask(message.problem))
    return message


def _says(end: WorkerExited) -> bool:
    return bool(end.error or end.note or end.tail)


def _when(end: WorkerExited) -> float:
    return end.error.time if end.error is not None else end.time


def error_tail(stderr: str) -> str:
    """The last lines of the text, or the stack that faulthandler left; without those that are written after it."""
    lines = _TRACKERS.sub("", stderr).splitlines()
    for at in reversed(range(len(lines))):
        if lines[at].startswith("Fatal Python error"):
            here = [n for n in range(at, len(lines)) if lines[n].startswith("Current thread")]
            # faulthandler prints other threads first, and the innermost frame of each thread first.
            return "\n".join([lines[at], *lines[here[0] if here else at + 1 :]][:TAIL_LINES])
    return "\n".join(lines[-TAIL_LINES:])


def end_of(code: int) -> str:
    """The end of a process, in words, by its `subprocess.Popen.returncode`."""
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


# The agent's state: what runs on its node, and what was not acknowledged by a master.


class AgentState(Value):
    """The state of an agent. `spawners`: whether each is ready; `starts`: how often each was started; `stores`: the
    last requested store of each role.

    `in_place`: the roles whose workers survive the loss of a peer or of the store, by their spec; `companions`: those
    that bring weights into engines. `epoch` is the term of the latest master. `launched` is the last ordered
    incarnation of each rank. `ended` are exits without an acknowledgement, `asks` requests of workers without an
    answer. `ending` is the decided end of the job, from a master that could not write it to the store.
    """

    node: str
    in_place: frozenset[str] = frozenset()
    companions: frozenset[str] = frozenset()
    workers: Mapping[int, Worker] = field(default_factory=dict)
    spawners: Mapping[SpawnerKey, bool] = field(default_factory=dict)
    starts: Mapping[SpawnerKey, int] = field(default_factory=dict)
    stores: Mapping[str, RendezvousStore] = field(default_factory=dict)
    view: View | None = None
    leaving: bool = False
    epoch: int = 0
    launched: Mapping[tuple[str, int], int] = field(default_factory=dict)
    ended: Mapping[WorkerId, HeldWorker] = field(default_factory=dict)
    asks: Mapping[tuple[int, int], FromWorker] = field(default_factory=dict)
    ending: Ending | None = None

    def with_worker(self, worker: Worker) -> AgentState:
        """This state with one worker replaced."""
        return replace(self, workers={**self.workers, worker.id: worker})

    def survives(self, role: str) -> bool:
        """Return True if workers of `role` survive the loss of a peer or of the store."""
        return role in self.in_place or any(w.who.role == role and w.resilient for w in self.workers.values())

    def find(self, role: str, rank: int) -> Worker | None:
        """The worker of a rank, or None."""
        return next((w for w in self.workers.values() if (w.who.role, w.who.rank) == (role, rank)), None)


def holdings(
    state: AgentState,
) -> tuple[tuple[HeldWorker, ...], tuple[OpenStore | StoreOpened | StoreEnded, ...]]:
    """The workers and stores of this node, for a new master."""
    live = (held(worker) for worker in state.workers.values())
    stores = (
        store.ended or (StoreOpened if store.opened else OpenStore)(role, store.request.generation)
        for role, store in state.stores.items()
    )
    return fitting((*state.ended.values(), *live)), tuple(stores)


def held(worker: Worker) -> HeldWorker:
    """The report of a worker that has not ended."""
    serving = worker.serving
    return HeldWorker(
        worker=worker.who,
        pid=worker.pid,
        running=worker.running,
        generation=worker.generation,
        addresses=dict(worker.addresses),
        serving=serving is not None,
        recoverable=serving is not None and serving.recoverable,
        calls=worker.calls,
        health=worker.health,
        resilient=worker.resilient,
    )
