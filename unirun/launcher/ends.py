"""What an agent keeps of how workers have ended: as much of their words as tell what happened.

A worker may say 300 KB, its log and its error file have all of that. An agent may hold the ends of all its workers
while a job has no master, and tells them in one message to the next one.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from unirun.job.failures import MESSAGE, NOTE, TAIL, TRACEBACK, beginning, ending
from unirun.wire.reports import Held, WorkerError, WorkerExited

WORDS = 4 << 20
"""Bytes of JSON of what failed workers have said in one `Join`. The rest of it, for 10 000 workers, takes as much."""

WHOLE = 16
"""Of more failures than fit, so many keep all their words: the first ones, which the others follow from."""

_LEAST = 16
_EACH = MESSAGE + TRACEBACK + TAIL + NOTE


def short_error(error: WorkerError, share: float = 1.0) -> WorkerError:
    """`error` with the beginning of its message and the end of its traceback."""
    return replace(
        error,
        message=beginning(error.message, _part(MESSAGE, share)),
        traceback=ending(error.traceback, _part(TRACEBACK, share)),
    )


def short_end(end: WorkerExited, share: float = 1.0) -> WorkerExited:
    """`end` in so many words as are kept; with a `share` below 1 in less."""
    return replace(
        end,
        error=None if end.error is None else short_error(end.error, share),
        note=beginning(end.note, _part(NOTE, share)),
        tail=ending(end.tail, _part(TAIL, share)),
    )


def _part(limit: int, share: float) -> int:
    return max(_LEAST, int(limit * share))


def fitting(held: Iterable[Held]) -> tuple[Held, ...]:
    """The same workers, with so much of their words as fits into one message."""
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


def _says(end: WorkerExited) -> bool:
    return bool(end.error or end.note or end.tail)


def _when(end: WorkerExited) -> float:
    return end.error.time if end.error is not None else end.time
