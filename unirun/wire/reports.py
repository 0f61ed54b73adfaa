"""The base class of messages; those of workers, spawners and agents upwards, to the agent of their node and to the
master; and the orders for spawners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import field
from msgspec.structs import replace

from unirun.values import Engine, RankAddress, Value, WorkerId


class Message(Value, tag=True):
    """The base class of all messages. In JSON its field ``type`` is the name of the class."""


# Messages between an agent and its spawners, and for borrowing a spawner from a warm process.


class Borrow(Message):
    """Asks a fork of a warm process to become a spawner. Descriptors are passed with it: the agent's output, a pipe,
    and those that the agent has at the numbers `inherited`.

    The other fields are those of a new spawner: working directory, environment, umask, modules to import.
    `descriptors` is the workers' limit on open files.
    """

    cwd: str
    modules: tuple[str, ...]
    env: dict[str, str]
    umask: int
    descriptors: int
    inherited: tuple[int, ...]


class Spawn(Message):
    """Starts one process. `id` is the agent's number for it; `kind` and `target` are those of the role's entry.

    With `fresh` it is a new interpreter, else a fork that keeps the spawner's imports. `env` is its complete
    environment. Output is appended to ``stdout.log`` and ``stderr.log`` in `folder`, relative to the directory `logs`.
    `cpus` is its CPU affinity. `stdin` is an inherited descriptor, None for ``/dev/null``.
    """

    id: int
    title: str
    kind: str
    target: str
    args: tuple[str, ...]
    fresh: bool
    env: dict[str, str]
    cwd: str
    logs: str
    folder: str
    cpus: tuple[int, ...] | None = None
    stdin: int | None = None


class Kill(Message):
    """Orders `signal` to be sent to the process group of a process."""

    id: int
    signal: int


class SpawnerReady(Message):
    """A spawner is ready to fork workers: it has imported its modules in `seconds`. The agent adds its `node`."""

    seconds: float
    node: str = ""


class Forked(Message):
    """The process was started."""

    id: int
    pid: int


class SpawnFailed(Message):
    """A process could not be started, at `time` (seconds since the epoch); with id 0, the spawner itself has failed."""

    id: int
    time: float
    reason: str


class OpenStore(Message):
    """Orders a new, empty rendezvous store for a generation of a role, at the endpoint of its predecessor. For the
    spawner, the agent adds the inherited listening socket `fd`."""

    role: str
    generation: int
    fd: int = -1


class StoreOpened(Message):
    """The rendezvous store of this generation of the role listens; that of the previous generation has ended."""

    role: str
    generation: int


class StoreEnded(Message):
    """The rendezvous store of `role` could not be opened or has exited, at `time` (see `Reaped`)."""

    role: str
    generation: int
    time: float
    reason: str


class Reaped(Message):
    """The process has ended at `time` (seconds since the epoch), and its group was sent SIGKILL."""

    id: int
    time: float
    code: int | None
    signal: int | None


# Requests of workers to the master, and the answers.
#
# An unanswered request is sent again to the next master, so every request must be idempotent.

MasterRequestKind = Literal["save_state", "load_state", "commit_version", "version"]
"""Save bytes for the next incarnation; load them; commit a version of a channel (the highest is kept); get it."""


class MasterRequest(Message):
    """A request. `name` is the channel for versions; `data` is a state in base64, or a version."""

    number: int
    kind: MasterRequestKind
    name: str = ""
    data: str = ""


class CommitJob(Message):
    """A request: the sending rank has what it needs to go on from `step`. `roles` take part, all by default
    (`unirun.failover.generations`). The answer is the step that all ranks of them have, None if there is none."""

    number: int
    step: int
    roles: tuple[str, ...] = ()


class MasterReply(Message):
    """The answer to the `MasterRequest` or `CommitJob` of this number of `worker`, whose agent forwards it: `data`,
    None when there is none, or the `problem`."""

    worker: WorkerId
    number: int
    data: str | None = None
    problem: str = ""


Cause = Literal["own", "order", "leaving", "lost_dependency", "stuck", "unready", "silent", "torn", "hung"]
"""The reason why a worker has ended: by itself (``own``), by the master's order, because its agent leaves,
because something it depends on is gone (``lost_dependency``), because it was blocked in an abandoned process group
(``stuck``), because it was not ready in time (``unready``), because it did not answer any more (``silent``), because it
could not be given weights, which may be half new (``torn``), or because it has made no progress (``hung``)."""


class ViewWanted(Message):
    """Requests a whole view after a gap in the numbers of views.

    `node` is that of the requesting agent; a worker, which asks its agent, leaves it empty.
    """

    node: str = ""


class WorkerStarted(Message):
    """A worker's process was started."""

    worker: WorkerId
    pid: int


class WorkerRunning(Message):
    """A worker enters the user's code; `generation` is that of its role in the view of its `Welcome`."""

    worker: WorkerId
    generation: int


class Serving(Message):
    """A worker takes calls at `addresses`, by transport. `recoverable`: the job can continue without the state in its
    memory."""

    addresses: dict[str, str]
    recoverable: bool


class Listening(Message):
    """A worker can be reached at `addresses`, by what listens there, whether it takes calls or not."""

    addresses: dict[str, str]


class Health(Message):
    """The answer to the probe of a program has changed at `since`, in seconds since the epoch: it is `ready`, or why
    not."""

    ready: bool
    since: float
    why: str = ""


class ProgressPage(Message):
    """The progress of the sending worker is in its descriptor `number` (`unirun.wire.progress`)."""

    number: int


class LocalEngines(Message):
    """All servers of this host that the receiving worker brings weights into, as they are now. `ready` are those that
    have answered their probe, whatever weights they have."""

    engines: tuple[Engine, ...]


class EngineWeights(Message):
    """The server at `rank` has `version` of a `channel` at `time`, in seconds since the epoch. None: nothing has been
    published yet, so that it serves with what it was started with. With a `problem`, it has to be started again."""

    channel: str
    rank: int
    incarnation: int
    version: int | None
    time: float
    problem: str = ""


class Placed(Message):
    """The ports that an agent has chosen for these ranks of a role, in their order; or the `problem`, and what to do,
    if it has none for them."""

    node: str
    role: str
    ranks: tuple[int, ...]
    places: tuple[RankAddress, ...]
    problem: str = ""


class GroupFormed(Message):
    """A worker has formed `generation` of its role's process group with the others."""

    generation: int


class GroupMeets(Message):
    """A worker is about to write to the rendezvous store of `generation`, where its peers may read it."""

    generation: int


class Stuck(Message):
    """A worker's main thread waits and keeps its role from being formed: in a process group that has ended, where it
    cannot be interrupted, or in a call that was given up. Has the reason `why`, and the Python `stack` of that
    thread."""

    why: str
    stack: str


class Resilient(Message):
    """A worker is `inside` a function that survives the loss of a peer (`unirun.resilient`), or has left it."""

    inside: bool


class Boundary(Message):
    """A worker of a role that is to grow has saved what the next generation goes on from; or a trainer is between two
    calls of the `role` that it names."""

    role: str = ""


class Metrics(Message):
    """Metrics of a worker by name, taken at `time` in seconds since the epoch. None stands for nan and infinities."""

    values: dict[str, float | None]
    time: float


FROM = "/from/"
"""In the name of a metric of a receiver of weights, in bytes: ``policy/from/actor:0/shared memory``."""

VERSION = "/version"
"""At the end of the name of a metric: ``policy/version``, the version of the weights that a rank has."""


RankRange = tuple[int, int]
"""The first and the last of consecutive ranks."""


LATENCY_BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds in seconds of the classes of latencies."""


class CallCount(Value):
    """Totals of a worker's calls of one `method` of a `role` since it was started; `ranks` are those that answered.

    A call to several ranks counts once for each. `bytes` is the size of all arguments, `returned` that of all results,
    `seconds` the sum of the latencies. `asynchronous`: the caller does not wait at once. `split`: the arguments differ
    between ranks. `latencies` are the numbers of calls in each class of `LATENCY_BOUNDS`, and of the slower ones.
    """

    role: str
    method: str
    calls: int
    bytes: int
    returned: int
    seconds: float
    ranks: tuple[RankRange, ...]
    asynchronous: bool = False
    split: bool = False
    latencies: tuple[int, ...] = ()


class Calls(Message):
    """Totals of all calls that a worker has made so far, by method, `bounded`."""

    counts: tuple[CallCount, ...]


MAX_COUNTS = 100
"""Methods in a report, and in what is kept of a rank; of more, those with the most bytes."""

MAX_SPANS = 16
"""Ranges of ranks in a count; if there are more, one range from the first rank to the last."""


def bounded(counts: Sequence[CallCount]) -> tuple[CallCount, ...]:
    """`counts` within `MAX_COUNTS` and `MAX_SPANS`."""
    if len(counts) > MAX_COUNTS:
        counts = sorted(counts, key=lambda each: each.bytes + each.returned, reverse=True)[:MAX_COUNTS]
    return tuple(
        each
        if len(each.ranks) <= MAX_SPANS
        else replace(
            each, ranks=((min(first for first, _ in each.ranks), max(last for _, last in each.ranks)),)
        )
        for each in counts
    )


def merged(ranges: Iterable[RankRange]) -> tuple[RankRange, ...]:
    """The same ranks as ascending ranges that do not touch."""
    found: list[RankRange] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)


class Arrivals(Message):
    """The times at which a rank has begun collectives of a group in a `window` (its number since the epoch): pairs of
    the number of a collective and seconds since the epoch. `ranks` are those of the group, as in `Wait`."""

    group: str
    ranks: str
    window: int
    times: tuple[tuple[int, float], ...]


class FromWorker(Message):
    """A worker's message that its agent forwards to the master."""

    worker: WorkerId
    message: (
        Serving
        | Listening
        | GroupFormed
        | Resilient
        | Boundary
        | Metrics
        | Calls
        | MasterRequest
        | CommitJob
        | Health
        | Arrivals
    )


class WorkerError(Message):
    """An exception that ended a worker: its last line, its traceback, and its time in seconds since the epoch.

    `permanent`: every restart would raise it again.
    """

    message: str
    traceback: str
    time: float
    permanent: bool = False


class WorkerExited(Message):
    """A worker has ended at `time`, in seconds since the epoch, with `code` or by `signal`.

    `sent` is the last signal that the agent sent it, by order or because the agent leaves; else None.
    `note` is the agent's explanation, if it has one: out of memory, the worker never ran.
    `tail` has the last lines of its output when it failed without an exception.
    `met` is the last generation whose rendezvous store it was about to write to (`GroupMeets`), 0 for none.
    `taken`: a process that is none of its own listens on one of its ports, so that the rank needs others.
    `step` is the one to which it had come, by its own reports; -1 if there are none.
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
    taken: bool = False
    step: int = -1


class HeldWorker(Value):
    """A worker as its agent knows it; `exit` is set until a master acknowledges it.

    `generation` and `calls` are those it reported last; `addresses` are those of `Serving` and `Listening`, and
    `recoverable` is as in `Serving`. `health` is that of a program with a probe. `resilient` is as in `Resilient`, None
    for a worker that was not inside yet.
    """

    worker: WorkerId
    pid: int | None = None
    running: bool = False
    generation: int = 0
    addresses: dict[str, str] = field(default_factory=dict)
    serving: bool = False
    recoverable: bool = False
    exit: WorkerExited | None = None
    calls: tuple[CallCount, ...] = ()
    health: Health | None = None
    resilient: bool | None = None


class Ending(Value):
    """The end of the job, as decided by a master that could not write it to the store.

    `by_failure`: there is a root cause; a `code` of 0 means the exit code of that.
    """

    phase: str
    code: int
    reason: str
    by_failure: bool = False


class Join(Message):
    """An agent's first message to a master. `endpoints`: by role, the ``addr:port`` bound for its rendezvous store.
    Its workers are reached at `addr`.

    `workers` are those that it already has, for a master that has taken over; `stores` has for each role the last
    rendezvous store that it was ordered to serve: the order, that it listens, or its end.
    `ending` is the decided end of the job, if an earlier master sent one (see `Shutdown`). `followed`: a command on its
    host follows the job, and ends with this agent.
    """

    node: str
    pid: int
    host: str
    endpoints: dict[str, str]
    workers: tuple[HeldWorker, ...] = ()
    stores: tuple[OpenStore | StoreOpened | StoreEnded, ...] = ()
    ending: Ending | None = None
    addr: str = ""
    followed: bool = False


class Notice(Message):
    """A message for users; no decision depends on it. `source` is ``role:rank`` or a node; `kind` that of its event."""

    source: str
    text: str
    kind: Literal["notice", "refused"] = "notice"


class Knock(Message):
    """`node`, at the address `origin`, has proved the token to the agent on the head while no master let it in. Without
    TLS the node is not known."""

    node: str
    origin: str


class Sample(Message):
    """Memory (resident, bytes) and processor time (seconds) of the workers, by ``role:rank``. Of those that have them,
    the steps that they are at, and `gpus`: how busy their devices are, in percent, and their memory there."""

    node: str
    memory: dict[str, int]
    cpu: dict[str, float]
    steps: dict[str, int] = field(default_factory=dict)
    gpus: dict[str, tuple[float, int]] = field(default_factory=dict)


class Sick(Message):
    """A `sign` that `node` is sick: its disk is full, or a device has a fault."""

    node: str
    kind: Literal["disk", "device"]
    sign: str


class Unanswered(Message):
    """The hosts at these addresses do not answer the processes of `node`."""

    node: str
    addresses: tuple[str, ...]


# Hangs: what the agents of a role know of its ranks when one of them is late.


UNKNOWN_RANKS = "?"


class Wait(Value):
    """A collective that a rank has begun and that is not over: the `number` of it in its `group`, and its `name`.
    `ranks` are those of the group, as ``0,2``; empty for all of a role, and `UNKNOWN_RANKS` if they are not known."""

    group: str
    number: int
    name: str
    ranks: str = ""


class RankProgress(Value):
    """The progress of a worker, as its agent sees it. Durations are in seconds.

    It has reported `count` times, the latest `step` last (-1: none), and has begun so many `calls` and `collectives`.
    Since its latest progress it is `quiet`, and `age` old since it has begun. It is `idle` between calls, and may take
    its time for another `allowed` seconds. `waits` are its collectives that are not over. `state` is the letter of
    ``ps``; `traced`: a debugger holds it. For `mute` seconds none of its Python threads has run, as far as that is
    known. `at` is the innermost line of its main thread's stack, empty if it has not answered the signal. It has not
    `begun` until it has a page, which with a time-out is before the user's code.
    """

    worker: WorkerId
    step: int = -1
    count: int = 0
    calls: int = 0
    collectives: int = 0
    quiet: float = 0.0
    age: float = 0.0
    idle: bool = False
    allowed: float = 0.0
    waits: tuple[Wait, ...] = ()
    state: str = ""
    traced: bool = False
    mute: float = 0.0
    at: str = ""
    begun: bool = True


class Late(Message):
    """A rank of `role` on `node` is late."""

    node: str
    role: str


class StepsAgain(Message):
    """The answer of `node` to `FollowSteps`: a rank of `role` has reported the step `first` in `generation`, after the
    `furthest` one before the failure. `past`: a rank has come further than that."""

    node: str
    role: str
    generation: int
    first: int
    furthest: int
    past: bool


class Progress(Message):
    """The answer of `node` to `AskProgress`: its ranks of `role`; with `evidence` if that was asked for."""

    node: str
    role: str
    ranks: tuple[RankProgress, ...]
    evidence: bool = False


# Stacks, for ``unirun stacks``.


class ThreadStack(Value):
    """The Python stack of a thread: lines such as ``train.py:20 in step``, the innermost first. The `main` one is the
    thread that answers signals."""

    name: str
    frames: tuple[str, ...]
    main: bool = False


class RankStacks(Value):
    """The stacks of a worker, as its agent has got them from the `source`: ``the signal``, ``py-spy``, or empty if
    there are none. `kernel` is the function of the kernel in which the main thread waits. `shapes` are those of the
    tensors of `progress.waits`, in their order, empty where they are not known."""

    progress: RankProgress
    pid: int
    source: str = ""
    threads: tuple[ThreadStack, ...] = ()
    kernel: str = ""
    shapes: tuple[str, ...] = ()


class Stacks(Message):
    """The answer of `node` to `AskStacks`."""

    node: str
    number: int
    ranks: tuple[RankStacks, ...]


# Debuggers, for ``unirun debug``.

DEBUGGER = "debugger"
"""In the addresses of a worker: that a debugger holds it, or is waited for, in words; empty when none is any more."""


class Debuggee(Message):
    """A worker's first message on a stream of its own, on which its debugger talks: it answers the request `number`,
    or (0) waits at `where` for one, `patience` seconds at most."""

    worker: WorkerId
    number: int = 0
    where: str = ""
    patience: float = 0.0


class DebugOutput(Message):
    """The output of a debugger, for the command with the request `number`; `asks`: it waits for a line."""

    text: str
    asks: bool = False
    number: int = 0


class DebugEnded(Message):
    """A debugger has let its worker go; with a `problem` there is none, or the worker is gone."""

    number: int = 0
    problem: str = ""


# Profiles, for ``unirun profile``.


class TracePart(Message):
    """The next bytes of a trace of torch's profiler, compressed, for the command with the request `number`."""

    number: int
    data: bytes


class Profiled(Message):
    """The end of the profile with the request `number`: its sampled `stacks`, folded, and their counts. With a
    `problem` there are none. `without_trace` is the reason why there is no trace."""

    number: int
    stacks: tuple[tuple[str, int], ...] = ()
    without_trace: str = ""
    problem: str = ""
