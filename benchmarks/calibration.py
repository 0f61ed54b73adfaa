"""The speed of this machine at the moment, as the time of a fixed piece of pure Python.

A bar in seconds says as much of the machine, and of what else runs on it, as of the code. So whatever takes time and
has no peer to be compared with is measured beside this work, in turn, and its bar is a number of units. One unit is
the time of `work`: frozen dataclasses, dicts, sorting with a key, sets of tuples, as in the planner and the master. It
takes `UNIT` seconds on the machine for which the bars were set: two cores of an AMD EPYC, Python 3.11, and nothing
else running.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.figure import Bar, Figure, Once, compared

UNIT = 0.1
ROUNDS = 44

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Item:
    key: str
    number: int


def work(rounds: int = ROUNDS) -> int:
    """The work of one unit. Its result depends only on `rounds`."""
    total = 0
    for _ in range(rounds):
        items = [_Item(f"k{number % 97}", number * 7919 % 10007) for number in range(2000)]
        groups: dict[str, list[_Item]] = {}
        for item in items:
            groups.setdefault(item.key, []).append(item)
        ordered = sorted(items, key=lambda item: (item.number, item.key))
        total += sum(len(group) for group in groups.values()) + ordered[0].number
        total += len({tuple(item.number for item in group) for group in groups.values()})
    return total


def calibrate(clock: Clock = time.perf_counter) -> float:
    """Seconds of one unit now."""
    began = clock()
    work()
    return clock() - began


def bar(name: str, seconds: float) -> Bar:
    """The bar for work that takes at most `seconds` on the machine of `UNIT`."""
    return Bar(name, "units", round(seconds / UNIT, 6))


def in_units(bar: Bar, runs: int, once: Once, clock: Clock = time.perf_counter) -> Figure:
    """The median of `runs` runs of `once`, which measures seconds by `clock`, divided by that of the unit.

    With `time.process_time` for what waits for nothing: then other processes hardly count at all.
    """
    return compared(bar, "s", runs, once, "pure Python", partial(calibrate, clock))
