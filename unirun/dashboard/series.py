"""Metrics as charts show them: any number of points in bounded memory, with the mean, the least and the greatest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeGuard

from unirun.values import Value

BINS = 1024
"""Points of a chart. When there are more, two neighbours become one."""

LARGEST = 1e200
"""The sums of values below it are finite."""

NAMES = 500
"""Metrics of a job that are kept. Others are counted only."""

STEPS = ("step", "global_step", "training_iteration", "_training_iteration", "iteration")
"""Names of metrics that count steps, so that the others of the same report belong to that step."""

Axis = Literal["time", "step"]


class Points(Value):
    """The points of one chart line, in the order of `x`. `more` is the number of values that were not finite."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    more: int


class Series:
    """Values over `x`, which is 0 or more, in at most `BINS` bins of one width. It is doubled when they do not
    suffice."""

    def __init__(self) -> None:
        # In seconds or steps, at first.
        self._width = 0.05
        # By the number of the bin: how many values, the sums of x and of the values, the least, the greatest.
        self._bins: dict[int, list[float]] = {}
        self._more = 0

    def add(self, x: float, value: float | None) -> None:
        """Add one value; None is one that is not finite. Those beyond `LARGEST` count as such."""
        if value is None or not (abs(value) < LARGEST and abs(x) < LARGEST):
            self._more += 1
            return
        number = int(max(x, 0.0) / self._width)
        found = self._bins.get(number)
        if found is None:
            self._bins[number] = [1, x, value, value, value]
            while len(self._bins) > BINS:
                self._halve()
            return
        found[0] += 1
        found[1] += x
        found[2] += value
        found[3] = min(found[3], value)
        found[4] = max(found[4], value)

    def _halve(self) -> None:
        self._width *= 2
        merged: dict[int, list[float]] = {}
        for number, (count, x, total, low, high) in self._bins.items():
            into = merged.setdefault(number // 2, [0, 0.0, 0.0, low, high])
            into[0] += count
            into[1] += x
            into[2] += total
            into[3] = min(into[3], low)
            into[4] = max(into[4], high)
        self._bins = merged

    def points(self) -> Points:
        """The points so far."""
        rows = [
            (x / count, total / count, low, high)
            for _, (count, x, total, low, high) in sorted(self._bins.items())
        ]
        x, mean, low, high = ([_short(row[n]) for row in rows] for n in range(4))
        return Points(x, mean, low, high, self._more)


def _short(value: float) -> float:
    """Seven digits, which a chart does not need more of."""
    return float(f"{value:.7g}")


class Book:
    """The series of one job, by role and name: over the seconds since its start, and over the steps that were reported
    with them."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._series: dict[tuple[str, str, Axis], Series] = {}
        self._ranks: dict[tuple[str, str], set[int]] = {}
        self.too_many = 0
        """Values whose names were too many."""

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Add a line of ``metrics.jsonl``. One that is not as unirun writes it is left out."""
        values, role, rank, when = (line.get(name) for name in ("values", "role", "rank", "time"))
        if not (isinstance(values, dict) and isinstance(role, str) and isinstance(rank, int)):
            return
        if not (_is_number(when) and abs(when) < LARGEST):
            return
        step = next((values[name] for name in STEPS if _is_number(values.get(name))), None)
        for name, value in values.items():
            self._add(role, rank, name, value, {"time": when - self._began, "step": step})

    def add_step(self, line: Mapping[str, Any]) -> None:
        """Add a line of the ``steps.jsonl`` of a trial."""
        step = line.get("step")
        if _is_number(step):
            for name, value in line.items():
                if name != "step" and (value is None or _is_number(value)):
                    self._add("trial", 0, name, value, {"step": step})

    def _add(self, role: str, rank: int, name: str, value: Any, xs: Mapping[Axis, float | None]) -> None:
        if not (value is None or _is_number(value)):
            return
        if (role, name) not in self._ranks and len(self._ranks) >= NAMES:
            self.too_many += 1
            return
        self._ranks.setdefault((role, name), set()).add(rank)
        for axis, x in xs.items():
            if x is not None:
                self._series.setdefault((role, name, axis), Series()).add(x, value)

    def names(self) -> list[dict[str, Any]]:
        """The role and the name of each metric, the number of ranks that report it, and the axes that it has."""
        return [
            {
                "role": role,
                "name": name,
                "ranks": len(ranks),
                "axes": [axis for axis in ("time", "step") if (role, name, axis) in self._series],
            }
            for (role, name), ranks in self._ranks.items()
        ]

    def points(self, axis: Axis, wanted: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
        """The points of some metrics over one axis."""
        return [
            {"role": role, "name": name, "points": series.points()}
            for role, name in wanted
            if (series := self._series.get((role, name, axis))) is not None
        ]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
