"""A failure as it is remembered: with as much of its words as tell what happened.

The error file and the log of the worker have all of them; the job's context, which is written to a store after each
failure, must stay small whatever a worker has said.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable

from msgspec.structs import replace

from unirun.failover.exits import Failure

MESSAGE, TRACEBACK, TAIL, NOTE = 4096, 12288, 6144, 1024
"""Bytes of JSON that are kept of each."""

MARK = "…"
"""Stands where something was left out."""


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
