"""All exceptions of unirun, in one tree.

::

    UnirunError                 every error of unirun; has a one-line message, a `remedy`, an `exit_code`
    ├── UsageError              a command, an option or a call of the API is wrong            exit code 2
    ├── SpecError               the job's spec is wrong; carries every `Fault` at once        exit code 2
    ├── JobError                a job's directory cannot be made, found or read               exit code 2
    │   └── JobElsewhere        the job runs on another host, or ran there
    ├── PlacementError          the ranks do not fit on the slots there are                   exit code 3
    ├── RendezvousError         peers did not meet before the deadline                        exit code 4
    │   └── GroupError          a process group across roles could not be formed
    ├── WireError               a stream between two processes of a job failed
    │   ├── FrameError          an invalid frame, or an unknown message
    │   ├── AuthError           the peer did not prove the job's token
    │   └── ConnectionLost      the peer is gone
    ├── CallError               a call to a workload could not be completed
    │   ├── EncodingError       an argument or a result cannot be sent
    │   ├── InvocationTimeout   workers did not answer before the deadline; has the other results
    │   ├── WorkerLost          a worker died before it answered
    │   └── RemoteError         the method raised an exception that cannot be rebuilt in the caller
    ├── StoreError              an operation on the store of job contexts failed
    │   ├── StoreAway           it cannot be reached; nothing was changed                     exit code 4
    │   ├── OutcomeUnknown      a write was sent but not answered; it may have been applied
    │   ├── StoreRefused        wrong password, certificate or permission; foreign data
    │   ├── LeaseExpired        the lease has expired, its keys are deleted
    │   └── Fenced              another master leads the job now
    ├── ChannelError            a connection between a caller and a worker failed (inside the transports)
    ├── WeightsError            weights do not fit their receiver; carries every `Fault` at once
    ├── WeightsTimeout          no version of the weights came before the deadline
    ├── QueueTimeout            a queue was full, or empty, until the deadline
    ├── QueueEnded              a queue is empty, and all of its producers have ended
    ├── PeerLost                a worker died while weights were moved to it or from it
    ├── ServerError             an inference server did not do what it was asked for: it refused, or died
    │   └── ServerTimeout       it did not answer before the deadline
    ├── EpisodeFailed           an agent took too long, or fails for each prompt
    │   └── RewardFailed        a reward function has raised, or did not return before the deadline
    ├── JobFailed               a submitted job did not succeed
    ├── TrainingFailed          a training run could not go on: workers were lost too often, reports did not match
    ├── CheckpointDamaged       a checkpoint cannot be read, or is not as it was written
    ├── Refused                 a peer sent an invalid event; dropping it loses nothing
    └── IllegalTransition       a state machine got an event that its state does not allow (a bug)

An exception that a workload's method raises keeps its type and has a `RemoteTraceback` as its ``__cause__``.

The exit codes are those of the `unirun` command; `EXIT_BUDGET` is a job's exit code and has no exception.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from unirun.values import Value

__all__ = [
    "EXIT_BUDGET",
    "EXIT_FAILURE",
    "EXIT_PLACEMENT",
    "EXIT_RENDEZVOUS",
    "EXIT_USAGE",
    "AuthError",
    "CallError",
    "ChannelError",
    "CheckpointDamaged",
    "ConnectionLost",
    "EncodingError",
    "EpisodeFailed",
    "Fault",
    "Fenced",
    "FrameError",
    "GroupError",
    "IllegalTransition",
    "InvocationTimeout",
    "JobElsewhere",
    "JobError",
    "JobFailed",
    "LeaseExpired",
    "OutcomeUnknown",
    "PeerLost",
    "PlacementError",
    "QueueEnded",
    "QueueTimeout",
    "Refused",
    "RemoteError",
    "RemoteTraceback",
    "RendezvousError",
    "RewardFailed",
    "ServerError",
    "ServerTimeout",
    "SpecError",
    "StoreAway",
    "StoreError",
    "StoreRefused",
    "TrainingFailed",
    "UnirunError",
    "UsageError",
    "WeightsError",
    "WeightsTimeout",
    "WireError",
    "WorkerLost",
]

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_PLACEMENT = 3
EXIT_RENDEZVOUS = 4
EXIT_BUDGET = 5


class UnirunError(Exception):
    """Base of all errors that unirun raises on purpose.

    `problem` states what was expected and what was found, `remedy` what to do; the message has both. `exit_code` is
    the exit code of the command when the error ends it.
    """

    exit_code = EXIT_FAILURE

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem}; {remedy}" if remedy else problem)


class UsageError(UnirunError):
    """A command, an option or a call of the API is invalid."""

    exit_code = EXIT_USAGE


class Fault(Value):
    """One thing that is wrong, as in a spec: `where` (``roles.actor.count``), the `problem`, and a `remedy` or none."""

    where: str
    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.problem}" if self.where else self.problem
        return f"{text}; {self.remedy}" if self.remedy else text


class SpecError(UnirunError):
    """The spec of a job is wrong; `faults` has every fault that was found."""

    exit_code = EXIT_USAGE

    def __init__(self, faults: list[Fault] | tuple[Fault, ...]) -> None:
        if not faults:
            raise ValueError("a SpecError needs at least one fault")
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


class JobError(UnirunError):
    """The directory of a job cannot be made, found, read or written."""

    exit_code = EXIT_USAGE


class JobElsewhere(JobError):
    """The operation is only possible on `host`, where the job runs or ran."""

    def __init__(self, problem: str, remedy: str = "", *, host: str) -> None:
        self.host = host
        super().__init__(problem, remedy)


class PlacementError(UnirunError):
    """The ranks of `role` do not fit: it needs room for `needed` of them, and there is room for `available`.

    The `constraint` says what prevents the placement: ``slots``, ``cpus``, ``memory``, another resource, or in words
    what the job asks for. `nearest` lists changes that each make the job fit, the smallest first. `faults` has all
    faults; the other fields describe the first.
    """

    exit_code = EXIT_PLACEMENT

    def __init__(
        self,
        problem: str,
        remedy: str = "",
        *,
        role: str,
        needed: int,
        available: int,
        constraint: str = "",
        nearest: tuple[str, ...] = (),
        faults: tuple[Fault, ...] = (),
    ) -> None:
        self.role, self.needed, self.available = role, needed, available
        self.constraint, self.nearest = constraint, nearest
        self.faults = faults or (Fault("", problem, remedy),)
        super().__init__(problem, remedy)


class RendezvousError(UnirunError):
    """Peers did not meet before the deadline."""

    exit_code = EXIT_RENDEZVOUS


class GroupError(RendezvousError):
    """A process group across roles could not be formed."""


class WireError(UnirunError):
    """A stream between two processes of a job failed."""


class FrameError(WireError):
    """An invalid frame, a frame over the size limit, or an unknown message."""


class AuthError(WireError):
    """The peer could not prove that it knows the job's token."""


class ConnectionLost(WireError):
    """The peer closed the stream, or died."""


class CallError(UnirunError):
    """A call to a workload could not be completed."""


class EncodingError(CallError):
    """An argument or a result cannot be pickled, so it was not sent, or cannot be unpickled by the receiver."""


class InvocationTimeout(CallError, TimeoutError):
    """Workers did not answer before the call's deadline.

    `missing` names them (``actor:2``); `results` has the results of the others, by ``role:rank``.
    """

    def __init__(
        self, problem: str, remedy: str = "", *, missing: tuple[str, ...], results: Mapping[str, Any]
    ) -> None:
        self.missing, self.results = missing, dict(results)
        super().__init__(problem, remedy)


class WorkerLost(CallError):
    """`worker` (``actor:2``) died or was restarted before it answered. It may have run the method."""

    def __init__(self, problem: str, remedy: str = "", *, worker: str) -> None:
        self.worker = worker
        super().__init__(problem, remedy)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(WorkerLost, self.problem, self.remedy, worker=self.worker), ()


class RemoteError(CallError):
    """A method raised an exception that cannot be rebuilt in the caller: its class is unknown or not picklable.

    `kind` is the name of its class, `worker` the worker that raised it (``actor:2``), `traceback` its traceback there.
    """

    def __init__(self, kind: str, message: str, *, worker: str, traceback: str) -> None:
        self.kind, self.worker, self.traceback = kind, worker, traceback
        super().__init__(f"{worker} raised {kind}: {message}")


class RemoteTraceback(Exception):
    """The ``__cause__`` of an exception that `worker` (``actor:2``) raised, with its `traceback` there. As text, it has
    at most 25 lines of that."""

    def __init__(self, worker: str, traceback: str) -> None:
        self.worker, self.traceback = worker, traceback
        super().__init__(worker, traceback)

    def __str__(self) -> str:
        lines = self.traceback.rstrip().splitlines()
        shown = shortened(lines, "__cause__.traceback of the error has them")
        return "\n".join((f"raised in {self.worker}", "", *shown))


TRACE_LINES = 25
"""The most lines of a traceback that are shown. The errors that it led to have their own."""

_LIBRARY = re.compile(r'  File "(?:.*/(?:(?:site|dist)-packages|lib/python3\.\d+)/|<frozen )([\w-]+)')
"""A frame of Python's library or of an installed package, with the name of that."""


def shortened(lines: Sequence[str], rest: str) -> list[str]:
    """The `lines` of a traceback or another text, at most `TRACE_LINES`.

    Of a traceback that is longer, frames of libraries are folded first, except for those that raised, then the marks
    below the lines of code are dropped. Of what is still longer the middle is left out, and a line says of it what
    `rest` says.
    """
    if len(lines) <= TRACE_LINES:
        return [*lines]
    lines = _without_libraries(lines)
    if len(lines) > TRACE_LINES:
        lines = [line for line in lines if not line.startswith("    ") or line.strip(" ~^")]
    left = len(lines) - TRACE_LINES
    if left <= 0:
        return [*lines]
    first = TRACE_LINES // 4
    return [*lines[:first], f"… {left + 1} lines are left out; {rest}", *lines[first + left + 1 :]]


def _without_libraries(lines: Sequence[str]) -> list[str]:
    """The lines of tracebacks, with one line for each row of frames of libraries that is not the last of its
    traceback."""
    found: list[str] = []
    row: list[list[str]] = []
    for line in lines:
        if _LIBRARY.match(line):
            row.append([line])
        elif line.startswith('  File "'):
            found += [*_folded(row), line]
            row = []
        elif row and line.startswith("  "):
            row[-1].append(line)
        else:
            # The traceback ends with the frame that raised.
            found += [*_folded(row[:-1]), *(row[-1] if row else ()), line]
            row = []
    return found + [line for frame in row for line in frame]


def _folded(row: Sequence[Sequence[str]]) -> list[str]:
    names = dict.fromkeys(match[1] for frame in row if (match := _LIBRARY.match(frame[0])))
    return [f"  … {len(row)} frame{'s' * (len(row) > 1)} of {', '.join(names)}"] if row else []


class StoreError(UnirunError):
    """An operation on the store of job contexts failed: its file is corrupt, for example, or its disk is full."""

    exit_code = EXIT_RENDEZVOUS


class StoreAway(StoreError):
    """The store could not be reached within the deadline; the call changed nothing."""


class OutcomeUnknown(StoreError):
    """A write was sent but not answered; read back before repeating it."""


class StoreRefused(StoreError):
    """The store denied authentication or permission, or holds data that is not unirun's."""


class LeaseExpired(StoreError):
    """The lease has expired, and its keys are deleted."""


class Fenced(StoreError):
    """Another master leads the job now; the write was rejected."""


class ChannelError(UnirunError):
    """A transport cannot connect to a worker, or the connection has ended."""


class WeightsError(UnirunError):
    """Weights do not fit their receiver; `faults` has every tensor that does not, with its name as the place."""

    def __init__(self, problem: str, remedy: str = "", *, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join((f"{problem}:", *map(str, self.faults))), remedy)


class WeightsTimeout(UnirunError, TimeoutError):
    """No version of the weights of `channel` that was new enough came before the deadline."""

    def __init__(self, problem: str, remedy: str = "", *, channel: str) -> None:
        self.channel = channel
        super().__init__(problem, remedy)


class QueueTimeout(UnirunError, TimeoutError):
    """`queue` was full, or had too few items, until the deadline."""

    def __init__(self, problem: str, remedy: str = "", *, queue: str) -> None:
        self.queue = queue
        super().__init__(problem, remedy)


class QueueEnded(UnirunError):
    """`queue` has too few items, and all of its producers have ended."""

    def __init__(self, problem: str, remedy: str = "", *, queue: str) -> None:
        self.queue = queue
        super().__init__(problem, remedy)


class PeerLost(UnirunError):
    """`worker` (``actor:2``) died while weights or items of a queue were moved to it or from it."""

    def __init__(self, problem: str, remedy: str = "", *, worker: str) -> None:
        self.worker = worker
        super().__init__(problem, remedy)


class ServerError(UnirunError):
    """The inference server `server` (``http://127.0.0.1:8000``) did not take weights, or did not answer a request.

    `status` is the HTTP status with which it refused, and the message has its words; 0 when it did not answer. `server`
    is a role when none of its engines was ready.
    """

    def __init__(self, problem: str, remedy: str = "", *, server: str, status: int = 0) -> None:
        self.server, self.status = server, status
        super().__init__(problem, remedy)


class ServerTimeout(ServerError, TimeoutError):
    """The inference server did not answer before the deadline."""


class EpisodeFailed(UnirunError):
    """An episode of an agent took too long, or all episodes of many prompts have failed."""


class RewardFailed(EpisodeFailed):
    """A reward function has raised, or none of its processes returned before the deadline."""


class JobFailed(UnirunError):
    """A submitted job did not succeed. `code` is its exit code; the message states the cause as far as known."""

    def __init__(self, problem: str, remedy: str = "", *, code: int) -> None:
        self.code = code
        super().__init__(problem, remedy)


class TrainingFailed(UnirunError):
    """A training run could not go on, for a reason that is no exception of the user's function."""


class CheckpointDamaged(UnirunError):
    """A checkpoint cannot be read, or is not as it was written."""


class Refused(UnirunError):
    """A peer sent a state machine an invalid event. The state is unchanged, and dropping the event loses nothing.

    For errors that a peer or user code can cause. An event that must not be lost, as the exit of a worker, is never
    refused: when it cannot be applied, that is an `IllegalTransition`.
    """


class IllegalTransition(UnirunError):
    """A state machine got an event that its state does not allow. This is a bug in unirun.

    `cause` is the id of the event in the job's event log that led to it; empty when there is none.
    """

    cause = ""
