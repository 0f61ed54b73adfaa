"""The figures that the suite of failover makes of its kills."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.figure import BenchmarkError
from benchmarks.suites import failover


def test_kills_in_which_a_survivor_was_killed_too_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "kills", lambda count: iter([(0.1, 1), (0.2, 1), (1.5, 2), (0.3, 1)]))
    median, tail, forgotten = failover.of_workers(1)
    assert (median.value, median.own) == (0.2, (0.1, 0.2, 0.3))
    assert median.note == "3 kills, and 1 counted apart"
    assert tail.value is not None
    assert tail.value > 0.2
    assert (forgotten.value, forgotten.own) == (1.5, (1.5,))


def test_a_job_that_ends_is_a_fault_of_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def kills(count: int) -> Iterator[tuple[float, int]]:
        yield 0.1, 1
        raise BenchmarkError("the launcher ended with 5")

    monkeypatch.setattr(failover, "kills", kills)
    median, tail = failover.of_workers(1)
    assert (median.fault, median.holds, tail.value) == ("the launcher ended with 5", False, None)
