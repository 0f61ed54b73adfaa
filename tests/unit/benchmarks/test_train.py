"""The figures that the suite of training makes of its runs, and its words where Ray Train or a run is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import raytrain
from benchmarks.digits import parameters
from benchmarks.figure import Bar, BenchmarkError
from benchmarks.suites import train
from benchmarks.suites.train import Results, Rounds
from benchmarks.table import table

HALF = Bar("start ÷ peer", "ratio", 0.5)


def results(*runs: Results | None) -> Callable[[], Results]:
    """Gives one of `runs` at each call; None: the measurement fails."""
    left = iter(runs)

    def measure() -> Results:
        found = next(left)
        if found is None:
            raise BenchmarkError("waited 90 s for: a report")
        return found

    return measure


def test_medians_of_what_both_sides_have_measured_are_compared() -> None:
    own = results({"start": 1.0, "second": 0.1}, {"start": 9.0, "second": 0.3}, {"start": 2.0, "second": 0.2})
    rounds = Rounds("start", 3, {"unirun": own, "peer": results(*({"start": 8.0},) * 3)})
    assert rounds.compared(HALF, "start", "s", "peer").value == 0.25
    assert rounds.figure(Bar("second", "s", 0.2), "second").own == (0.1, 0.3, 0.2)


def test_a_run_that_fails_is_a_fault_of_the_figures_of_its_side_only() -> None:
    sides = {"unirun": results({"start": 1.0}, {"start": 1.0}), "peer": results(None, {"start": 4.0})}
    rounds = Rounds("start", 2, sides)
    compared = rounds.compared(HALF, "start", "s", "peer")
    assert compared.value == 0.25
    assert compared.fault == "peer: waited 90 s for: a report"
    assert not compared.holds
    assert rounds.figure(Bar("start", "s", 2.0), "start").holds


def test_without_ray_train_a_figure_tells_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "installed", lambda: False)
    monkeypatch.setattr(train, "trainer", lambda what: {what: 1.0})
    rounds = train.beside_ray("start", 1)
    figure = train.against_ray(rounds, HALF, "start", train.without_init(rounds))
    assert figure.own == (1.0,)
    assert figure.missing == "Ray Train is not installed: pip install 'ray[train]'"
    assert figure.to_json()["holds"] is None


def test_a_figure_says_what_else_was_measured() -> None:
    rounds = Rounds("reports", 1, {"unirun": results({"p50": 0.5, "p99": 0.912, "rate": 1600.4})})
    figure = rounds.figure(
        Bar("report", "ms", 1.0), "p50", train.also(rounds, p99="p99 {:.2f} ms", rate="{:.0f} rounds/s")
    )
    assert figure.to_json()["note"] == "p99 0.91 ms, 1600 rounds/s"
    # On a busy machine more lines follow.
    assert table([figure]).splitlines()[2].strip() == "p99 0.91 ms, 1600 rounds/s"


def test_reports_of_ray_are_read_line_by_line(tmp_path: Path) -> None:
    assert raytrain.heard(tmp_path) == []
    report = {"time": 17.5, "metrics": [{"step": 1}]}
    (tmp_path / "heard").write_text(json.dumps(report) + '\n{"time": 18')
    assert raytrain.heard(tmp_path) == [report]


def test_a_trial_has_the_same_parameters_in_a_study_and_in_a_job() -> None:
    assert parameters(3) == parameters(3) != parameters(4)
