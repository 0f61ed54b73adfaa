"""A figure: the measured value, the bar that it must not pass, and the value of the peer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil


class BenchmarkError(RuntimeError):
    """A failure of a measurement: a process failed, or a wait reached its deadline."""


class ProgramMissing(BenchmarkError):
    """The error of a figure that needs a program which is not installed."""

    def __init__(self, program: str, remedy: str) -> None:
        super().__init__(f"{program} is not installed: {remedy}")


@dataclass(frozen=True, slots=True)
class Bar:
    """The maximum of `value` (with `at_least`: the minimum) for a figure to hold. Without a limit every value holds."""

    name: str
    unit: str
    limit: float | None = None
    at_least: bool = False

    def admits(self, value: float) -> bool:
        """Return True if `value` is within the bar."""
        if self.limit is None:
            return True
        return value >= self.limit if self.at_least else value <= self.limit


@dataclass(frozen=True, slots=True)
class Figure:
    """One result. `value` has the unit of `bar` and is None when it could not be measured.

    `own` and `theirs` are the single runs of unirun and of `peer`, in `run_unit`. `busy` is the percentage of this
    machine's processors that others used just before the runs (median). A `fault` says in words why the figure
    does not hold, whatever its value is; `missing` which program is not installed, so that nothing was measured. A
    `note` has what else was measured in the runs.
    """

    bar: Bar
    value: float | None
    runs: int
    run_unit: str
    own: tuple[float, ...] = ()
    peer: str | None = None
    theirs: tuple[float, ...] = ()
    fault: str = ""
    busy: float = 0.0
    missing: str = ""
    note: str = ""

    @property
    def holds(self) -> bool:
        """True if the figure was measured, is within its bar and has no fault."""
        return not self.fault and self.value is not None and self.bar.admits(self.value)

    def to_json(self) -> dict[str, Any]:
        """Plain values. ``value`` and ``bar`` are in ``unit``; ``own_value`` and ``peer_value`` in ``own_unit``.

        Where a program is missing, ``value`` says so and ``holds`` is null.
        """
        return {
            "name": self.bar.name,
            "value": self.missing or self.value,
            "unit": self.bar.unit,
            "bar": self.bar.limit,
            "sense": "at least" if self.bar.at_least else "at most",
            "holds": None if self.missing else self.holds,
            "peer": self.peer,
            "peer_value": median(self.theirs) if self.theirs else None,
            "runs": self.runs,
            "own_value": median(self.own) if self.own else None,
            "own_unit": self.run_unit,
            "own_runs": list(self.own),
            "peer_runs": list(self.theirs),
            "busy_percent": self.busy,
            "fault": self.fault,
            "note": self.note,
        }


Once = Callable[[], float]
"""Measures one run."""


def measured(bar: Bar, runs: int, once: Once) -> Figure:
    """The median of `runs` runs."""
    say(bar.name)
    own: list[float] = []
    busy: list[float] = []
    fault = ""
    try:
        while len(own) < runs:
            busy.append(load_of_others())
            own.append(once())
    except BenchmarkError as error:
        fault = str(error)
    value = median(own) if own else None
    return Figure(bar, value, runs, bar.unit, tuple(own), fault=fault, busy=median(busy))


def compared(bar: Bar, run_unit: str, runs: int, ours: Once, peer: str, its: Once) -> Figure:
    """The median of ours divided by the median of the peer's.

    The runs alternate, so what else the machine does while they last falls on both.
    """
    say(bar.name)
    own: list[float] = []
    theirs: list[float] = []
    busy: list[float] = []
    fault = ""
    try:
        while len(theirs) < runs:
            busy.append(load_of_others())
            own.append(ours())
            theirs.append(its())
    except BenchmarkError as error:
        fault = str(error)
    value = ratio(own, theirs)
    return Figure(bar, value, runs, run_unit, tuple(own), peer, tuple(theirs), fault, median(busy))


def ratio(own: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Median divided by median; None when one of them is missing or the peer's is 0."""
    if not own or not theirs or median(theirs) == 0:
        return None
    return median(own) / median(theirs)


def load_of_others() -> float:
    """The percentage of the processors in use; call it while no measurement runs."""
    return psutil.cpu_percent(interval=0.2)


def say(text: str) -> None:
    """Print progress to stderr. stdout is for the result."""
    print(f"measuring: {text}", file=sys.stderr, flush=True)
