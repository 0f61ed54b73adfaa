"""What workers and agents report: to the agent, to the master, and from there to who follows the job."""

from __future__ import annotations

from typing import Literal

from unirun.values import Value, WorkerId
from unirun.wire.asking import Ask
from unirun.wire.spawning import StoreEnded

Cause = Literal["own", "order", "leaving", "doom", "stuck"]
"""What made a worker end: itself; the master's order; its agent, which leaves; its agent, because it cannot do its
work any more; its agent, because it waited in a process group that was over and could not be woken."""


class SpawnerReady(Value, tag=True):
    """A spawner can fork workers; it took `seconds` to import torch."""

    node: str
    seconds: float


class ViewWanted(Value, tag=True):
    """What was told last does not follow on what was told before: a whole view is needed.

    `node` is that of the agent that asks; a worker, which asks its agent, leaves it empty.
    """

    node: str = ""


class WorkerStarted(Value, tag=True):
    """A worker has a process."""

    worker: WorkerId
    pid: int


class WorkerRunning(Value, tag=True):
    """A worker is set up and enters the user's code; `generation` is the one of its role that it was told of."""

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
    """A worker is about to meet the others in the store of `generation`: what it writes there from now on, its peers
    may read."""

    generation: int


class Stuck(Value, tag=True):
    """A worker's main thread waits in the process group of `generation`, which is over, and nothing wakes it.

    `stack` is the Python stack of that thread.
    """

    generation: int
    stack: str


class Metrics(Value, tag=True):
    """Figures by name that a worker wants to be seen, as of `time` in seconds since the epoch.

    They may be nan or infinite.
    """

    values: dict[str, float]
    time: float


class Span(Value):
    """Ranks from `first` to `last`, both among them."""

    first: int
    last: int


class CallCount(Value):
    """What a worker has called of one `method` of a `role` since it was started; `ranks` have answered.

    `calls` counts every rank of a call to several. `bytes` went there as arguments, `returned` came back as results;
    `seconds` is how long the answers took, all of them together. Nobody waits at once for an `asynchronous` call.
    `split`: what went to one rank did not go to another.
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
    """What a worker has called so far, method by method."""

    counts: tuple[CallCount, ...]


class FromWorker(Value, tag=True):
    """What a worker has said to its agent, which passes it on to the master."""

    worker: WorkerId
    message: Serving | GroupFormed | Metrics | Calls | Ask


class WorkerError(Value, tag=True):
    """An exception that ended a worker: its last line, its traceback, and when (seconds since the epoch).

    `permanent`: it would come again however often the worker is started.
    """

    message: str
    traceback: str
    time: float
    permanent: bool = False


class WorkerExited(Value, tag=True):
    """A worker has ended, at `time` in seconds since the epoch, by `code` or by `signal`.

    `sent` is the last signal that it was sent for an order or because its agent leaves, None for other causes.
    `note` says what the agent knows besides: that the kernel was out of memory, or that the worker never ran.
    `tail` holds the last lines of its stderr when it failed without an exception.
    `met` is the last generation in whose store it was to meet the others, 0 for none.
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
    """A worker as its agent holds it; `exit` tells how it has ended, until a master has kept that.

    `generation` is the one it is in, and `calls` what it has called, as far as it has said; `addresses` and
    `recoverable` are as in `Serving`.
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
    """The last store that an agent was told to serve for a role, and how far that has come."""

    role: str
    generation: int
    opened: bool
    ended: StoreEnded | None = None


class Ending(Value):
    """How the job ends, as a master has decided that could not write it to the store.

    `by_failure`: `code` is to be that of the root cause.
    """

    phase: str
    code: int
    reason: str
    by_failure: bool = False


class Join(Value, tag=True):
    """An agent is there. `endpoints`: for each role, the ``addr:port`` that it holds for its store.

    `workers` and `stores` are what it holds already: a master that has come in another's place learns it here.
    `ending`: the agent was told that the job ends (see `Shutdown`).
    """

    node: str
    pid: int
    host: str
    endpoints: dict[str, str]
    workers: tuple[Held, ...] = ()
    stores: tuple[HeldStore, ...] = ()
    ending: Ending | None = None


class Notice(Value, tag=True):
    """Something a person should know; no decision hangs on it. `source` is ``role:rank`` or a node."""

    source: str
    text: str


class Sample(Value, tag=True):
    """Memory (resident, bytes) and processor time (seconds) of the workers, by ``role:rank``."""

    node: str
    memory: dict[str, int]
    cpu: dict[str, float]
