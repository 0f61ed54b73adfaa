"""How a process ended, and what is recorded of a failure."""

from __future__ import annotations

import signal as signals

from unirun.values import Value


class Exit(Value):
    """The end of a process: an exit `code`, or the number of the `signal` that killed it."""

    code: int | None = None
    signal: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the process ended as it should."""
        return self.code == 0

    @property
    def status(self) -> int:
        """As a shell gives it: the code, or 128 + the signal's number."""
        return 128 + self.signal if self.signal is not None else int(self.code or 0)

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code}"
        try:
            return f"killed by {signals.Signals(self.signal).name}"
        except ValueError:
            return f"killed by signal {self.signal}"


class Failure(Value):
    """One worker that ended when it should not have.

    `time` is in seconds since the epoch: when the exception was raised, or, without one, when the exit was
    seen. `message` and `traceback` are empty when the worker left no word. `tail` holds the
    last lines of its stderr then. `log` is its log directory. `decision` is what followed from it, in words; empty
    when that was decided before, as in a role that restarts or stops already.
    """

    role: str
    rank: int
    incarnation: int
    generation: int
    node: str
    time: float
    exit: Exit
    message: str = ""
    traceback: str = ""
    note: str = ""
    tail: str = ""
    log: str = ""
    decision: str = ""

    @property
    def who(self) -> str:
        """``actor:2``"""
        return f"{self.role}:{self.rank}"
