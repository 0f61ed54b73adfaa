"""The way in which a process ended, and the record of a failure.

The job's context is written to a store after each failure, so it must stay small whatever a worker has printed: a
failure has a limited part of each text. The worker's error file and log have all of it.
"""

from __future__ import annotations

import json
import signal as signals
from bisect import bisect_right
from collections.abc import Callable

from msgspec.structs import replace

from unirun.values import Value, WorkerId

MESSAGE, TRACEBACK, TAIL, NOTE = 4096, 12288, 6144, 1024
"""Bytes of JSON that are kept of each."""

MARK = "…"
"""Stands where something was left out."""


class Exit(Value, omit_defaults=True):
    """The end of a process: an exit `code`, or the number of the `signal` that killed it. `early`: a service has ended
    though it was still needed, which is a failure whatever its code is."""

    code: int | None = None
    signal: int | None = None
    early: bool = False

    @property
    def ok(self) -> bool:
        """True if the process ended as it should."""
        return self.code == 0 and not self.early

    @property
    def status(self) -> int:
        """As a shell gives it: the code, or 128 + the signal's number; 1 for a failure with code 0."""
        return 128 + self.signal if self.signal is not None else int(self.code or self.early)

    @property
    def predicate(self) -> str:
        """The predicate of a sentence whose subject is the name of the process."""
        return f"ended with {self}" if self.signal is None else f"was {self}"

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code}{', too early' if self.early and not self.code else ''}"
        try:
            return f"killed by {signals.Signals(self.signal).name}"
        except ValueError:
            return f"killed by signal {self.signal}"


class Failure(Value):
    """One worker that ended when it should not have.

    `time` is in seconds since the epoch: when the exception was raised, or, without one, when the exit was
    seen. `message` and `traceback` are empty when the worker reported no error. `tail` holds the last lines
    of its output then. `log` is its log directory. `decision` is what followed from it, in words; empty when
    that was decided before, as in a role that restarts or stops already. An `inferred` one has not failed
    itself, but is taken for the cause of others; `note` says why.
    """

    worker: WorkerId
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
    inferred: bool = False


def brief(failure: Failure) -> Failure:
    """`failure` with the beginnings of its message, note and decision, and the ends of its traceback and tail."""
    return replace(
        failure,
        message=beginning(failure.message, MESSAGE),
        traceback=ending(failure.traceback, TRACEBACK),
        note=beginning(failure.note, NOTE),
        decision=beginning(failure.decision, NOTE),
        tail=ending(failure.tail, TAIL),
    )


def beginning(text: str, limit: int) -> str:
    """As much of the beginning of `text` as has, with a mark, no more than `limit` bytes in JSON (at least 6)."""
    return _cut(text, limit, lambda length: text[:length] + MARK)


def ending(text: str, limit: int) -> str:
    """As much of the end of `text` as has, with a mark, no more than `limit` bytes in JSON (at least 6)."""
    return _cut(text, limit, lambda length: MARK + text[len(text) - length :])


def _cut(text: str, limit: int, part: Callable[[int], str]) -> str:
    if _size(text) <= limit:
        return text
    # Every character has at least one byte.
    return part(bisect_right(range(limit), limit, key=lambda length: _size(part(length))) - 1)


def _size(text: str) -> int:
    return len(json.dumps(text)) - 2
