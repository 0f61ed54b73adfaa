"""What can go wrong, as a tree that one can read and catch.

::

    UnirunError                 every error of unirun; has a one-line message, a `remedy`, an `exit_code`
    ├── UsageError              the command line asks for something that cannot be            exit code 2
    ├── SpecError               the job's spec is wrong; carries every `Fault` at once        exit code 2
    ├── JobError                a job's directory cannot be made, found or read               exit code 2
    ├── PlacementError          the ranks do not fit on the slots there are                   exit code 3
    ├── RendezvousError         peers did not meet before the deadline                        exit code 4
    │   └── GroupError          a process group across roles could not be formed
    ├── WireError               a stream between two processes of a job failed
    │   ├── FrameError          bytes that are no frame, or a frame that is no known message
    │   ├── AuthError           the peer did not prove the job's token
    │   └── ConnectionLost      the peer is gone
    ├── SpawnError              a worker's process could not be started
    └── IllegalTransition       a state machine was given an event that its state does not allow (a bug)

The exit codes are those of the `unirun` command; `EXIT_BUDGET` belongs to a job's end, not to an exception.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "EXIT_BUDGET",
    "EXIT_FAILURE",
    "EXIT_PLACEMENT",
    "EXIT_RENDEZVOUS",
    "EXIT_USAGE",
    "AuthError",
    "ConnectionLost",
    "Fault",
    "FrameError",
    "GroupError",
    "IllegalTransition",
    "JobError",
    "PlacementError",
    "RendezvousError",
    "SpawnError",
    "SpecError",
    "UnirunError",
    "UsageError",
    "WireError",
]

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_PLACEMENT = 3
EXIT_RENDEZVOUS = 4
EXIT_BUDGET = 5


class UnirunError(Exception):
    """Base of all errors that unirun raises on purpose.

    `problem` says what was expected and what was found, `remedy` what to do about it.
    """

    exit_code = EXIT_FAILURE

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem}; {remedy}" if remedy else problem)


class UsageError(UnirunError):
    """The command line asks for something that cannot be."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a spec: `where` (``roles.actor.count``), what, and what to do."""

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


class PlacementError(UnirunError):
    """The ranks of `role` do not fit: it needs `needed` slots, and `available` are there."""

    exit_code = EXIT_PLACEMENT

    def __init__(self, problem: str, remedy: str = "", *, role: str, needed: int, available: int) -> None:
        self.role, self.needed, self.available = role, needed, available
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


class SpawnError(UnirunError):
    """A worker's process could not be started."""


class IllegalTransition(UnirunError):
    """A state machine was given an event that its state does not allow. This is a bug in unirun."""
