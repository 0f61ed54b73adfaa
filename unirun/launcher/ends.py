"""The ends of workers as an agent keeps them: the last lines of output, and messages and tracebacks cut to size.

A worker may report 300 KB; its log and its error file have all of it. While a job has no master, an agent keeps the
ends of all its workers, and sends them to the next master in one message.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

from msgspec.structs import replace

from unirun.failover.state import MESSAGE, NOTE, TAIL, TRACEBACK, beginning, ending
from unirun.spec.secrets import Mask
from unirun.wire.messages import Message
from unirun.wire.reports import EngineWeights, Held, Notice, Stuck, WorkerError, WorkerExited

TAIL_LINES = 12
TAIL_BYTES = 1 << 14
"""Limits of the part of a failed worker's output that goes into the report."""

WORDS = 4 << 20
"""Limit in bytes of JSON of all errors, notes and tails in one `Join`. The rest of it takes as much for 10 000
workers."""

WHOLE = 16
"""Number of failures that are not shortened when not all fit: the first ones, which probably caused the others."""

_TRACKERS = re.compile(
    r"(/[\w.+~@-]+)*/resource_tracker\.py:\d+: UserWarning: resource_tracker: (There appear to be |').*\n?"
    r"(  warnings\.warn\(.*\n?)?"
)
"""Warnings of a resource tracker that removes what a dead process has left: its end is the reason for them. They may
follow a line that has no end, as that of a progress bar."""

_LEAST = 16
_EACH = MESSAGE + TRACEBACK + TAIL + NOTE


def short_error(error: WorkerError, share: float = 1.0) -> WorkerError:
    """Cut `error` to the beginning of its message and the end of its traceback."""
    return replace(
        error,
        message=beginning(error.message, _part(MESSAGE, share)),
        traceback=ending(error.traceback, _part(TRACEBACK, share)),
    )


def short_end(end: WorkerExited, share: float = 1.0) -> WorkerExited:
    """Cut the texts of `end` to their limits, multiplied by `share`."""
    return replace(
        end,
        error=None if end.error is None else short_error(end.error, share),
        note=beginning(end.note, _part(NOTE, share)),
        tail=ending(end.tail, _part(TAIL, share)),
    )


def _part(limit: int, share: float) -> int:
    return max(_LEAST, int(limit * share))


def fitting(held: Iterable[Held]) -> tuple[Held, ...]:
    """Shorten the texts of `held` workers so that all fit into one message."""
    workers = tuple(held)
    failed = sorted((each.exit for each in workers if each.exit is not None and _says(each.exit)), key=_when)
    if len(failed) * _EACH <= WORDS:
        return workers
    whole = {end.worker for end in failed[:WHOLE]}
    share = (WORDS - WHOLE * _EACH) / (len(failed) * _EACH)
    return tuple(
        each if each.exit is None or each.worker in whole else replace(each, exit=short_end(each.exit, share))
        for each in workers
    )


def masked(message: Message, mask: Mask) -> Message:
    """A message of a worker without secrets in its texts."""
    match message:
        case WorkerError():
            return replace(message, message=mask(message.message), traceback=mask(message.traceback))
        case Stuck():
            return replace(message, why=mask(message.why), stack=mask(message.stack))
        case Notice():
            return replace(message, text=mask(message.text))
        case EngineWeights():
            return replace(message, problem=mask(message.problem))
    return message


def _says(end: WorkerExited) -> bool:
    return bool(end.error or end.note or end.tail)


def _when(end: WorkerExited) -> float:
    return end.error.time if end.error is not None else end.time


def last_words(stderr: str) -> str:
    """The last lines of the text, or the stack that faulthandler left; without those that are written after it."""
    lines = _TRACKERS.sub("", stderr).splitlines()
    for at in reversed(range(len(lines))):
        if lines[at].startswith("Fatal Python error"):
            here = [n for n in range(at, len(lines)) if lines[n].startswith("Current thread")]
            # faulthandler prints other threads first, and the innermost frame of each thread first.
            return "\n".join([lines[at], *lines[here[0] if here else at + 1 :]][:TAIL_LINES])
    return "\n".join(lines[-TAIL_LINES:])


def end_of(code: int) -> str:
    """The end of a process, in words, by its `subprocess.Popen.returncode`."""
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
