"""Figures: when they hold, what they are made of, how they are shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from benchmarks.__main__ import load, main, suite_names
from benchmarks.figure import Bar, BenchmarkError, Figure, compared, measured, ratio
from benchmarks.table import quantity, spread, table

FASTER = Bar("start ÷ peer", "ratio", 0.5)
QUICK = Bar("help", "s", 0.2)


def values(*runs: float) -> Callable[[], float]:
    """Gives one of `runs` at each call, then fails as a measurement does."""
    left: Iterator[float] = iter(runs)

    def once() -> float:
        for value in left:
            return value
        raise BenchmarkError("waited 90 s for: more values")

    return once


def test_a_ratio_is_that_of_the_medians() -> None:
    figure = compared(FASTER, "s", 3, values(1.0, 9.0, 2.0), "peer", values(5.0, 4.0, 40.0))
    assert figure.value == 2.0 / 5.0
    assert figure.holds


def test_runs_of_both_sides_alternate() -> None:
    order: list[str] = []

    def note(side: str) -> float:
        order.append(side)
        return 1.0

    compared(FASTER, "s", 2, lambda: note("ours"), "peer", lambda: note("its"))
    assert order == ["ours", "its", "ours", "its"]


def test_a_bar_that_is_met_exactly_holds_and_one_that_is_passed_does_not() -> None:
    assert measured(QUICK, 1, values(0.2)).holds
    assert not measured(QUICK, 1, values(0.201)).holds


def test_a_bar_can_be_a_least_value() -> None:
    many = Bar("calls", "calls/s", 1000, at_least=True)
    assert measured(many, 1, values(1000)).holds
    assert not measured(many, 1, values(999)).holds


def test_without_a_limit_a_figure_is_only_counted() -> None:
    figure = Figure(Bar("classes", "classes"), 846, 1, "classes")
    assert figure.holds
    assert figure.to_json()["bar"] is None
    assert table([figure]).splitlines()[1].split() == ["classes", "846", "classes", "yes", "-"]


def test_a_run_that_fails_keeps_the_runs_before_it_and_the_figure_does_not_hold() -> None:
    figure = measured(QUICK, 3, values(0.1, 0.1))
    assert figure.own == (0.1, 0.1)
    assert figure.value == 0.1
    assert "waited 90 s" in figure.fault
    assert not figure.holds


def test_without_a_run_of_the_peer_there_is_no_value() -> None:
    figure = compared(FASTER, "s", 1, values(1.0), "peer", values())
    assert figure.value is None
    assert not figure.holds


@pytest.mark.parametrize(("own", "theirs"), [((), (1.0,)), ((1.0,), ()), ((1.0,), (0.0,))])
def test_a_ratio_needs_both_sides(own: tuple[float, ...], theirs: tuple[float, ...]) -> None:
    assert ratio(own, theirs) is None


def test_json_has_the_value_the_bar_and_the_medians_of_both_sides() -> None:
    figure = compared(FASTER, "s", 1, values(1.0), "peer", values(4.0))
    shown = json.loads(json.dumps(figure.to_json()))
    expected = {
        "name": "start ÷ peer",
        "value": 0.25,
        "unit": "ratio",
        "bar": 0.5,
        "holds": True,
        "peer": "peer",
        "peer_value": 4.0,
        "runs": 1,
        "own_value": 1.0,
        "own_unit": "s",
    }
    assert expected.items() <= shown.items()


def test_the_table_names_what_does_not_hold_and_why() -> None:
    good = Figure(FASTER, 0.25, 1, "s", (1.0,), "peer", (4.0,))
    bad = Figure(QUICK, None, 1, "s", fault="the launcher ended with 1\nlast words")
    header, first, second, *fault = table([good, bad]).splitlines()
    assert header.split() == ["FIGURE", "VALUE", "BAR", "HOLDS", "UNIRUN", "PEER"]
    assert " ".join(first.split()) == "start ÷ peer 0.25 ≤ 0.5 yes 1 s (1–1) peer 4 s (4–4)"
    assert "not measured" in second
    assert second.split()[-2:] == ["NO", "-"]
    assert fault == ["    the launcher ended with 1", "    last words"]


def test_the_table_says_when_the_machine_was_busy_with_something_else() -> None:
    assert "Other" not in table([Figure(QUICK, 0.1, 1, "s", (0.1,), busy=5.0)])
    assert "up to 60 %" in table([Figure(QUICK, 0.1, 1, "s", (0.1,), busy=60.0)])


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.41234, "ratio", "0.412"),
        (1.2678, "s", "1.27 s"),
        (153.2, "MB", "153 MB"),
        (0, "processes", "0"),
        (0.052, "s", "0.052 s"),
    ],
)
def test_quantities_have_three_digits_that_count(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_a_spread_shows_the_median_and_the_range() -> None:
    assert spread([3.0, 1.0, 2.0], "s") == "2 s (1–3)"
    assert spread([1.0, 2.0], "s") == "1.5 s (1–2)"


def test_every_suite_offers_figures() -> None:
    assert "launch" in suite_names()
    assert all(callable(load(name)) for name in suite_names())


@pytest.mark.parametrize(
    ("argv", "said"), [(["--runs", "0"], "--runs must be 1"), (["lunch"], "there is no suite lunch")]
)
def test_a_wrong_command_line_is_refused(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(argv)
    assert refused.value.code == 2
    assert said in capsys.readouterr().err
