"""Work that takes time is measured in units of work that is always the same; what cannot be measured is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from benchmarks import calibration
from benchmarks.__main__ import main
from benchmarks.calibration import UNIT, bar, calibrate, in_units, work


def clock(*times: float) -> Callable[[], float]:
    """Tells one of `times` at each look."""
    left: Iterator[float] = iter(times)
    return lambda: next(left)


def test_the_work_is_the_same_everywhere() -> None:
    assert work(2) == 2 * work(1) == 4194


def test_a_unit_is_what_the_work_takes_by_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[None] = []
    monkeypatch.setattr(calibration, "work", lambda: done.append(None))
    assert calibrate(clock(5.0, 7.5)) == 2.5
    assert done == [None]


def test_a_bar_is_what_so_many_seconds_are_on_the_machine_for_which_it_was_set() -> None:
    assert bar("plan", 3 * UNIT).limit == 3.0


def test_a_machine_that_is_twice_as_slow_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "work", lambda: None)
    for slow in (1.0, 2.0):
        figure = in_units(bar("plan", 0.5), 1, lambda slow=slow: 0.4 * slow, clock(0.0, 0.1 * slow))  # type: ignore[misc]
        assert figure.value == pytest.approx(4.0)
        assert figure.holds
        assert (figure.own, figure.theirs) == ((0.4 * slow,), (0.1 * slow,))


def test_a_figure_whose_program_is_missing_says_so_in_place_of_a_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["rendezvous", "--json", "--runs", "1"]) == 0
    (figure,) = json.loads(capsys.readouterr().out)["figures"]
    assert figure["value"] == "etcd is not installed: apt-get install etcd-server"
    assert figure["holds"] is None
    assert main(["rendezvous", "--runs", "1"]) == 0
    _, row, why = capsys.readouterr().out.splitlines()
    assert "not measured" in row
    assert why.strip() == figure["value"]
