"""How a job stands: the document that the master keeps and everybody else reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from msgspec import convert, field, to_builtins
from msgspec.structs import replace

from unirun.errors import FrameError, JobError
from unirun.rendezvous.jobdir import JobDir
from unirun.values import Value
from unirun.wire.codec import typed

FAILURES = 20
"""Failures in a status; the job's events tell of all of them."""

ENDED = ("succeeded", "failed", "stopped", "lost")


class WorkerStatus(Value):
    """One worker: what it does (`phase`), where, and how it ended (`exit`, in words).

    `generation` is that of its role's process group which it is in; `metrics` are the latest by name.
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
    metrics: dict[str, float] = field(default_factory=dict)


class RoleStatus(Value):
    """One role with its workers in rank order."""

    name: str
    phase: str
    generation: int
    restarts: int
    max_restarts: int
    workers: tuple[WorkerStatus, ...]


class FailureStatus(Value):
    """One worker that ended when it should not have: which, when (seconds since the epoch), how (`exit`, in words),
    the first line of what it said, and what was decided."""

    role: str
    rank: int
    incarnation: int
    node: str
    time: float
    exit: str
    message: str = ""
    decision: str = ""

    @property
    def who(self) -> str:
        """``actor:2``"""
        return f"{self.role}:{self.rank}"


class CallStatus(Value):
    """The calls of one `method` that ranks of `source` make of ranks of `target`, as seen.

    `kind`, `direction` and `weight`, in bytes per step, are those of the edge in the job's graph. `calls` counts every
    rank that was called; `bytes` went there, `returned` came back; answers took `seconds`, all of them together.
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


class JobStatus(Value):
    """One job. Times are seconds since the epoch; `code` is the exit code once it has ended.

    `epoch` is the term of the master that says so, `trouble` what keeps it from writing its decisions to the store.
    `failures` are the last `FAILURES` of them, in order of arrival; there were `failed` in all.
    `spares` are nodes that are held back, `lost` those that are gone. `waiting` tells who can do nothing now, in words,
    as it waits for ranks that are being started again.
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
    waiting: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` gives an equal status back."""
        plain: dict[str, Any] = to_builtins(self)
        return plain

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobStatus:
        """The inverse of `to_json`. Raises ValueError for what is none."""
        return convert(data, cls)


class Summary(Value):
    """One job, in few words: `roles` has the number of ranks of each. Times are seconds since the epoch; `code` is the
    exit code once it has ended. `uid` tells the job from others of its id."""

    run_id: str
    uid: str
    name: str
    phase: str
    started: float
    ended: float | None
    code: int | None
    roles: dict[str, int]

    def line(self) -> str:
        """The job's value in the index."""
        return json.dumps(to_builtins(self))


def write_status(job: JobDir, status: JobStatus) -> None:
    """Write how `job` stands, for those who want all of it and for those who want one line. Raises OSError."""
    job.write_json(job.state.name, status.to_json())
    summary = Summary(
        run_id=status.run_id,
        uid="",
        name=status.name,
        phase=status.phase,
        started=status.started,
        ended=status.ended,
        code=status.code,
        roles={role.name: len(role.workers) for role in status.roles},
    )
    job.write_json(job.summary.name, to_builtins(summary))


def runs(job: JobDir) -> bool:
    """Whether `job` has not ended yet; its processes live on for a moment when it has."""
    try:
        return job.alive() and read_summary(job).phase not in ENDED
    except JobError:
        # It has only just begun.
        return True


def read_summary(job: JobDir) -> Summary:
    """`job` in one line; ``lost`` where `read_status` says so. Raises `JobError` as that does."""
    alive = job.alive()
    try:
        summary = typed(Summary, job.read_json(job.summary.name))
    except FrameError as error:
        raise _foreign(str(job.summary)) from error
    return summary if alive or summary.phase in ENDED else replace(summary, phase="lost")


def read_status(job: JobDir) -> JobStatus:
    """The status of `job`. Raises `JobError` when it has none, or one that unirun of this version has not written.

    A job of which neither master nor agent lives, and which has no end, is ``lost``: its record cannot have changed
    since.
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
    if alive or status.phase in ENDED:
        return status
    return replace(status, phase="lost", reason="its processes are gone and left no end")


def verified(status: JobStatus, where: str) -> JobStatus:
    """`status`, which was made of what was found at `where`, when every field of it has the type that unirun gives it.

    Raises `JobError`.
    """
    try:
        return typed(JobStatus, status.to_json())
    except FrameError as error:
        raise _foreign(where) from error


def _foreign(where: str) -> JobError:
    return JobError(
        f"{where} holds no status that unirun of this version has written", "is it another version's?"
    )
