"""What can go wrong, as a tree that one can read and catch.

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
    │   ├── FrameError          bytes that are no frame, or a frame that is no known message
    │   ├── AuthError           the peer did not prove the job's token
    │   └── ConnectionLost      the peer is gone
    ├── CallError               a call to a workload could not be completed
    │   ├── EncodingError       an argument or a result cannot be sent
    │   ├── InvocationTimeout   workers had not answered at the deadline; names them, has the other results
    │   ├── WorkerLost          a worker died before it answered
    │   └── RemoteError         the method raised something that cannot be rebuilt here
    ├── StoreError              the store of job contexts cannot do what it was asked for
    │   ├── StoreAway           it cannot be reached; nothing was changed                     exit code 4
    │   ├── OutcomeUnknown      a write was sent, and whether it was done is not known
    │   ├── StoreRefused        wrong password, certificate or permission; foreign data
    │   ├── StoreBroken         its file is corrupt, or cannot be written
    │   ├── LeaseExpired        the lease is over, and its keys are gone
    │   └── Fenced              another master leads the job now
    ├── ChannelError            a connection between a caller and a worker failed (inside the transports)
    ├── JobFailed               a job that was submitted did not succeed
    ├── Refused                 a peer has sent what cannot be; nothing is lost when it is not taken
    └── IllegalTransition       a state machine was given an event that its state does not allow (a bug)

An exception that a workload's method raises keeps its type; `RemoteTraceback` is its ``__cause__`` then.

The exit codes are those of the `unirun` command; `EXIT_BUDGET` belongs to a job's end, not to an exception.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    "ConnectionLost",
    "EncodingError",
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
    "PlacementError",
    "Refused",
    "RemoteError",
    "RemoteTraceback",
    "RendezvousError",
    "SpecError",
    "StoreAway",
    "StoreBroken",
    "StoreError",
    "StoreRefused",
    "UnirunError",
    "UsageError",
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

    `problem` says what was expected and what was found, `remedy` what to do about it; the message has both. `exit_code`
    is that of the command when the error ends it.
    """

    exit_code = EXIT_FAILURE

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem}; {remedy}" if remedy else problem)


class UsageError(UnirunError):
    """A command, an option or a call of the API asks for something that is not possible."""

    exit_code = EXIT_USAGE


class Fault(Value):
    """One thing that is wrong with a spec: `where` (``roles.actor.count``), the `problem`, and a `remedy` or none."""

    where: str
    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.problem}" if self.where else self.problem
        return f"{text}; {self.remedy}" if self.remedy else text


class SpecError(UnirunError):
    """The spec of a job is wrong. All faults that were found are in `faults`."""

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
    """What is asked for can only be done on `host`, where the job runs, or ran."""

    def __init__(self, problem: str, remedy: str = "", *, host: str) -> None:
        self.host = host
        super().__init__(problem, remedy)


class PlacementError(UnirunError):
    """The ranks of `role` do not fit: it needs `needed`, and there is room for `available`.

    `constraint` is what stands in the way, in words, and `nearest` are changes of which each makes the job fit, the
    smallest first. `faults` are all that were found; the other fields are those of the first one.
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
    """Bytes that are no frame, a frame over the size cap, or a frame that is no known message."""


class AuthError(WireError):
    """The peer did not prove that it knows the job's token."""


class ConnectionLost(WireError):
    """The peer closed the stream, or died."""


class CallError(UnirunError):
    """A call to a workload could not be completed."""


class EncodingError(CallError):
    """An argument or a result cannot be pickled, and nothing was sent; or it cannot be unpickled at the other end."""


class InvocationTimeout(CallError, TimeoutError):
    """Workers had not answered when the call's deadline came.

    `missing` names them (``actor:2``); `results` has what the others returned, by ``role:rank``.
    """

    def __init__(
        self, problem: str, remedy: str = "", *, missing: tuple[str, ...], results: Mapping[str, Any]
    ) -> None:
        self.missing, self.results = missing, dict(results)
        super().__init__(problem, remedy)


class WorkerLost(CallError):
    """`worker` (``actor:2``) died, or was started again, before it answered. Whether it ran the method is unknown."""

    def __init__(self, problem: str, remedy: str = "", *, worker: str) -> None:
        self.worker = worker
        super().__init__(problem, remedy)


class RemoteError(CallError):
    """A method raised an exception that cannot be rebuilt here: its class is not known, or does not pickle.

    `kind` is the name of its class, `worker` where it was raised (``actor:2``), `traceback` the text from there.
    """

    def __init__(self, kind: str, message: str, *, worker: str, traceback: str) -> None:
        self.kind, self.worker, self.traceback = kind, worker, traceback
        super().__init__(f"{worker} raised {kind}: {message}")


class RemoteTraceback(Exception):
    """The ``__cause__`` of an exception that a worker raised: `worker` (``actor:2``) and its `traceback` there."""

    def __init__(self, worker: str, traceback: str) -> None:
        self.worker, self.traceback = worker, traceback
        super().__init__(worker, traceback)

    def __str__(self) -> str:
        return f"raised in {self.worker}\n\n{self.traceback.rstrip()}"


class StoreError(UnirunError):
    """The store of job contexts cannot do what it was asked for."""

    exit_code = EXIT_RENDEZVOUS


class StoreAway(StoreError):
    """The store cannot be reached within the deadline; nothing was changed by the call."""


class OutcomeUnknown(StoreError):
    """A write was sent, and no answer came: read back before it is repeated."""


class StoreRefused(StoreError):
    """The store does not let this user in, or not do this; or what lies there is not unirun's."""


class StoreBroken(StoreError):
    """The store's file is corrupt, or the disk does not take what is written."""


class LeaseExpired(StoreError):
    """The lease is over, and the keys that it kept are gone."""


class Fenced(StoreError):
    """Another master leads the job now; what this one wanted to write was not written."""


class ChannelError(UnirunError):
    """A transport cannot connect to a worker, or the connection has ended."""


class JobFailed(UnirunError):
    """A job that was submitted did not succeed; its exit `code` and what is known of the cause."""

    def __init__(self, problem: str, remedy: str = "", *, code: int) -> None:
        self.code = code
        super().__init__(problem, remedy)


class Refused(UnirunError):
    """A peer has sent a state machine what cannot be. The state is as before, and nothing that matters is lost.

    For what a peer can get wrong, or what a user's code can make it say. What must not be lost, as the end of a worker,
    is never refused: if it cannot be taken, that is an `IllegalTransition`.
    """


class IllegalTransition(UnirunError):
    """A state machine was given an event that its state does not allow. This is a bug in unirun.

    `cause` is the id of the last event in the job's event log that led here; empty when there is none.
    """

    cause = ""
