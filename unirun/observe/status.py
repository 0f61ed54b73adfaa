"""The status of a job: a document that the master writes and everybody else reads."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any, TypeVar

from msgspec import convert, field, to_builtins
from msgspec.structs import replace

from unirun.errors import FrameError, JobError
from unirun.observe.batchjob import is_active
from unirun.observe.jobdir import JobDir
from unirun.values import Value
from unirun.wire.frames import typed

FAILURES = 20
"""Failures in a status; the event log has all of them."""

T = TypeVar("T", bound=Value)

PENDING = "pending"
"""The phase of a job that waits for Slurm."""

ENDED = ("succeeded", "failed", "stopped", "lost")


class WorkerStatus(Value):
    """One worker: its phase, its node, and how it has ended (`exit`, in words).

    `generation` is that of its role's process group which it is in; `metrics` are the latest by name; those that
    are not finite, which JSON has no words for, are text (``"nan"``). `address` is ``host:port`` of a rank that was
    given ports. `ready` is what the probe of a program says, since the time `since`, and `why` if it is not. `step` is
    the one that it was at when it was sampled last, -1 if it reports none, and `gpu` how busy its devices were then, in
    percent, and its memory there in bytes. `slots` are its places on the node.
    """

    rank: int
    phase: str
    node: str
    incarnation: int
    pid: int | None
    exit: str
    memory: int | None = None
    cpu: float | None = None
    generation: int = 0
    metrics: dict[str, float | None] = field(default_factory=dict)
    address: str = ""
    ready: bool | None = None
    since: float = 0.0
    why: str = ""
    step: int = -1
    gpu: tuple[float, int] | None = None
    slots: tuple[str, ...] = ()


NO_LIMIT = 1_000_000
"""Restarts from which on there is no limit in practice, as for the workers of a `Trainer`, which counts them itself."""


class RoleStatus(Value):
    """One role with its workers in rank order. `program` is what a role of programs runs, empty for other entries."""

    name: str
    phase: str
    generation: int
    restarts: int
    max_restarts: int
    workers: tuple[WorkerStatus, ...]
    program: str = ""

    @property
    def used(self) -> str:
        """The restarts that it has had, of those that it may have: ``1 of 3``."""
        return f"{self.restarts} of {self.max_restarts if self.max_restarts < NO_LIMIT else 'any number'}"


class FailureStatus(Value):
    """One failure of a worker: which worker, when (seconds since the epoch), how it ended (`exit`, in words), its
    error, and what was decided.

    `kind` is the class of its likely `cause`, and `rule` that by which it was noticed, at the time `noticed`. `slots`
    are its devices, `affected` other ranks that it concerns, in words. `fault` is the id of the event that has injected
    it. An `inferred` one has not failed itself. `tail` are the last lines of its output. `step` is the one to which it
    had come, -1 if it has reported none. In a status, `message` is the first line, and there is neither `traceback` nor
    `tail`.
    """

    role: str
    rank: int
    incarnation: int
    node: str
    time: float
    exit: str
    message: str = ""
    decision: str = ""
    kind: str = ""
    cause: str = ""
    rule: str = ""
    noticed: float = 0.0
    generation: int = 0
    slots: tuple[str, ...] = ()
    affected: tuple[str, ...] = ()
    fault: str = ""
    inferred: bool = False
    note: str = ""
    traceback: str = ""
    tail: str = ""
    log: str = ""
    step: int = -1

    @property
    def who(self) -> str:
        """``actor:2``"""
        return f"{self.role}:{self.rank}"


class CallStatus(Value):
    """The calls of one `method` that were seen from ranks of `source` to ranks of `target`.

    `kind`, `direction` and `weight`, in bytes per step, are those of the edge in the job's graph. `calls` counts every
    rank that was called; `bytes` went there, `returned` came back; answers took `seconds`, all of them together.
    `latencies` are as in `CallCount`.
    """

    source: str
    target: str
    method: str
    kind: str
    direction: str
    asynchronous: bool
    weight: float
    calls: int
    bytes: int
    returned: int
    seconds: float
    latencies: tuple[int, ...] = ()


class JobStatus(Value):
    """One job. Times are seconds since the epoch; `code` is the exit code once it has ended.

    `epoch` is the term of the master that has written it, `trouble` what keeps it from writing decisions to the store.
    `failures` are the last `FAILURES` of `failed` in all, in order of arrival. `spares` are nodes held in reserve,
    `lost` those that are gone, but for those that were drained and have `left`. `waiting` says in words which ranks a
    debugger holds, and which are blocked until others have restarted.
    `restarts` are those of the whole job, which goes back to the step `committed`, -1 for none. The nodes in `tainted`
    get no more ranks; `sick` says in words why nodes are. `stragglers` says in words which ranks the others wait for in
    collectives.
    """

    run_id: str
    name: str
    phase: str
    reason: str
    started: float
    ended: float | None
    code: int | None
    roles: tuple[RoleStatus, ...]
    epoch: int = 0
    trouble: str = ""
    failures: tuple[FailureStatus, ...] = ()
    failed: int = 0
    calls: tuple[CallStatus, ...] = ()
    spares: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    restarts: int = 0
    max_job_restarts: int = 0
    tainted: tuple[str, ...] = ()
    committed: int = -1
    sick: tuple[str, ...] = ()
    stragglers: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` gives an equal status back."""
        plain: dict[str, Any] = to_builtins(self)
        return plain

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobStatus:
        """The inverse of `to_json`. Raises ValueError for what is none."""
        return convert(data, cls)


class Summary(Value):
    """A summary of one job: `roles` has the number of ranks of each. Times are seconds since the epoch; `code` is the
    exit code once it has ended. `uid` distinguishes the job from others with its id."""

    run_id: str
    uid: str
    name: str
    phase: str
    started: float
    ended: float | None
    code: int | None
    roles: dict[str, int]

    def line(self) -> str:
        """The job's entry in the index."""
        return json.dumps(to_builtins(self))


def shaped(kind: type[T], /, *sources: Value, **given: Any) -> T:
    """The `kind` with the fields that are `given`, and the fields of the same names that `sources` have."""
    fields = {name: getattr(each, name) for each in sources for name in each.__struct_fields__}
    return kind(**{name: value for name, value in (fields | given).items() if name in kind.__struct_fields__})


def write_status(job: JobDir, status: JobStatus) -> None:
    """Write the status of `job` and its summary. Raises OSError."""
    job.write_json(job.state.name, status.to_json())
    sizes = {role.name: len(role.workers) for role in status.roles}
    job.write_json(job.summary.name, to_builtins(shaped(Summary, status, uid="", roles=sizes)))


def write_failure(job: JobDir, reason: str, code: int) -> None:
    """Write that `job` has failed now with exit `code`, for a `reason` that has kept every master from leading it, so
    that none has written its end. Raises `JobError`, OSError."""
    status = read_status(job)
    write_status(job, replace(status, phase="failed", reason=reason, code=code, ended=time.time()))


def runs(job: JobDir) -> bool:
    """Return True if `job` has not ended yet. (Its processes may outlive its end for a moment.)"""
    try:
        return is_alive(job) and read_summary(job).phase not in ENDED
    except JobError:
        # It has only just begun.
        return True


def is_alive(job: JobDir) -> bool:
    """Return True if a process of `job` lives, or its batch job waits or runs. Raises `JobError`."""
    return job.alive() or is_active(job)


def read_summary(job: JobDir) -> Summary:
    """The summary of `job`. Its phase may be ``lost``, and it raises `JobError`, as `read_status`."""
    # Asked first: a job that ends now writes that before its processes end.
    alive = job.alive()
    try:
        summary = typed(Summary, job.read_json(job.summary.name))
    except FrameError as error:
        raise _foreign(str(job.summary)) from error
    gone = summary.phase not in ENDED and not alive and not is_active(job)
    return replace(summary, phase="lost") if gone else summary


def is_between_runs(job: JobDir, error: JobError) -> bool:
    """Return True if a file of `job` was not there (`error`) because its batch job begins, or begins again after Slurm
    has requeued it: its files are made anew then. Raises `JobError`."""
    return isinstance(error.__cause__, FileNotFoundError) and is_active(job)


def read_status(job: JobDir) -> JobStatus:
    """The status of `job`. Raises `JobError` when it has none, or one that unirun of this version has not written.

    The phase of a job that has not ended, though neither its master nor an agent lives, is ``lost``.
    """
    alive = job.alive()
    data = job.read_json(job.state.name)
    try:
        status = JobStatus.from_json(data)
    except ValueError as error:
        raise _foreign(str(job.state)) from error
    times = (status.started, status.ended or 0.0, *(failure.time for failure in status.failures))
    if not all(map(math.isfinite, times)):
        raise _foreign(str(job.state))
    if alive or status.phase in ENDED or is_active(job):
        return status
    never = "its batch job has ended before it began"
    reason = never if status.phase == PENDING else "its processes are gone and left no end"
    return replace(status, phase="lost", reason=reason)


def _foreign(where: str) -> JobError:
    return JobError(
        f"{where} holds no status that unirun of this version has written", "is it another version's?"
    )
