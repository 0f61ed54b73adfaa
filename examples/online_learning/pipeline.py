"""Stages that work on different items at the same time, from calls that do not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import unirun

Stage = Callable[[int, Any], "unirun.InvocationRef[Any]"]
"""Starts the work on item ``t``, given the result of the previous stage (None for the first stage)."""


@dataclass
class _Item:
    """One item in the pipeline: its stage, and the open call there or the last result."""

    t: int
    stage: int = 0
    ref: unirun.InvocationRef[Any] | None = None
    value: Any = None


def pipelined(items: range, stages: list[Stage], depth: int) -> Iterator[tuple[int, Any]]:
    """Send the items through the stages, at most ``depth`` of them at a time; yields each with its last result.

    An item enters the last stage only after the one before it has done so, whoever was ready first: this is where
    the order counts. With a ``depth`` of 1 nothing overlaps.
    """
    waiting = iter(items)
    inside = [_Item(t) for t in islice(waiting, depth)]
    last = len(stages) - 1
    while inside:
        for place, item in enumerate(inside):
            if item.ref is None and (
                item.stage < last or (item.stage == last and _in_order(inside[:place], last))
            ):
                item.ref = stages[item.stage](item.t, item.value)
        unirun.wait([item.ref for item in inside if item.ref is not None])
        for item in inside:
            if item.ref is not None and item.ref.done():
                item.value, item.ref = item.ref.result(), None
                item.stage += 1
        while inside and inside[0].stage > last:
            done = inside.pop(0)
            yield done.t, done.value
            inside += [_Item(t) for t in islice(waiting, 1)]


def _in_order(earlier: list[_Item], last: int) -> bool:
    """Return True if all of these have been sent to the last stage."""
    return all(item.stage > last or (item.stage == last and item.ref is not None) for item in earlier)
