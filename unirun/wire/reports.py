"""What workers report to their agent, and agents to the master."""

from __future__ import annotations

from typing import Literal

from unirun.values import Value, WorkerId
from unirun.wire.asking import Ask
from unirun.wire.spawning import StoreEnded

Cause = Literal["own", "order", "leaving", "doom", "stuck"]
"""Why a worker has ended: by itself (``own``), by the master's order, because its agent leaves, because something that
it needs is gone (``doom``), or because it could not be woken from a process group that is over (``stuck``)."""


class SpawnerReady(Value, tag=True):
    """A spawner can fork workers; it took `seconds` to import torch."""

    node: str
    seconds: float


class ViewWanted(Value, tag=True):
    """Asks for a whole view, as a view of changes does not follow on the one before.

    `node` is the node of the agent that asks; a worker, which asks its agent, leaves it empty.
    """

    node: str = ""


class WorkerStarted(Value, tag=True):
    """A worker has a process."""

    worker: WorkerId
    pid: int


class WorkerRunning(Value, tag=True):
    """A worker enters the user's code; `generation` is the one of its role that it was welcomed with."""

    worker: WorkerId
    generation: int


class Serving(Value, tag=True):
    """A worker takes calls at `addresses`, by transport. `recoverable`: whether the job can go on without what
    it holds in memory."""

    addresses: dict[str, str]
    recoverable: bool


class GroupFormed(Value, tag=True):
    """A worker has formed `generation` of its role's process group with the others."""

    generation: int


class GroupMeets(Value, tag=True):
    """A worker is about to use the rendezvous store of `generation`; its peers may read what it writes from now on."""

    generation: int


class Stuck(Value, tag=True):
    """A worker's main thread is blocked in the process group of `generation`, which is over, and cannot be woken.

    `stack` is the Python stack of that thread.
    """

    generation: int
    stack: str


class Metrics(Value, tag=True):
    """Metrics of a worker by name, at `time` in seconds since the epoch. Values may be nan or infinite."""

    values: dict[str, float]
    time: float


class Span(Value):
    """The ranks from `first` to `last`, inclusive."""

    first: int
    last: int


class CallCount(Value):
    """The calls of one `method` of a `role` that a worker has made since it was started; `ranks` have answered.

    A call to several ranks counts once for each. `bytes` is the size of all arguments, `returned` that of all results,
    `seconds` the sum of the times until the answers. `asynchronous`: the caller does not wait at once. `split`: each
    rank gets other arguments.
    """

    role: str
    method: str
    calls: int
    bytes: int
    returned: int
    seconds: float
    ranks: tuple[Span, ...]
    asynchronous: bool = False
    split: bool = False


class Calls(Value, tag=True):
    """All calls that a worker has made so far, by method."""

    counts: tuple[CallCount, ...]


class FromWorker(Value, tag=True):
    """A message of a worker, which its agent forwards to the master."""

    worker: WorkerId
    message: Serving | GroupFormed | Metrics | Calls | Ask


class WorkerError(Value, tag=True):
    """An exception that ended a worker: its last line, its traceback, and when (seconds since the epoch).

    `permanent`: it would occur again after every restart.
    """

    message: str
    traceback: str
    time: float
    permanent: bool = False


class WorkerExited(Value, tag=True):
    """A worker has ended, at `time` in seconds since the epoch, by `code` or by `signal`.

    `sent` is the last signal that it was sent by order or because its agent leaves, else None.
    `note` is what the agent knows besides: the kernel was out of memory, the worker never ran.
    `tail` has the last lines of its stderr when it failed without an exception.
    `met` is the last generation whose rendezvous store it was about to use (`GroupMeets`), 0 for none.
    """

    worker: WorkerId
    time: float
    code: int | None
    signal: int | None
    cause: Cause = "own"
    sent: int | None = None
    error: WorkerError | None = None
    note: str = ""
    tail: str = ""
    met: int = 0


class Held(Value):
    """A worker as its agent knows it; `exit` is its end, as long as no master has acknowledged that.

    `generation` and `calls` are what it has reported last; `addresses` and `recoverable` are as in `Serving`.
    """

    worker: WorkerId
    pid: int | None = None
    running: bool = False
    generation: int = 0
    addresses: dict[str, str] | None = None
    recoverable: bool = False
    exit: WorkerExited | None = None
    calls: tuple[CallCount, ...] = ()


class HeldStore(Value):
    """The last rendezvous store that an agent was told to serve for a role, and whether it is open or has ended."""

    role: str
    generation: int
    opened: bool
    ended: StoreEnded | None = None


class Ending(Value):
    """How the job ends, as decided by a master that could not write it to the store.

    `by_failure`: the exit code of the root cause replaces `code`.
    """

    phase: str
    code: int
    reason: str
    by_failure: bool = False


class Join(Value, tag=True):
    """An agent's first message to a master. `endpoints`: by role, the ``addr:port`` bound for its rendezvous store.

    `workers` and `stores` are those that it has already, for a master that has taken over from another.
    `ending`: how the job ends, if an earlier master has told so (see `Shutdown`).
    """

    node: str
    pid: int
    host: str
    endpoints: dict[str, str]
    workers: tuple[Held, ...] = ()
    stores: tuple[HeldStore, ...] = ()
    ending: Ending | None = None


class Notice(Value, tag=True):
    """A message for people; no decision depends on it. `source` is ``role:rank`` or a node."""

    source: str
    text: str


class Sample(Value, tag=True):
    """Memory (resident, bytes) and processor time (seconds) of the workers, by ``role:rank``."""

    node: str
    memory: dict[str, int]
    cpu: dict[str, float]
