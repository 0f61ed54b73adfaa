"""Metrics in bounded memory."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from tests.unit.dashboard.recorded import START, line
from unirun.dashboard import series
from unirun.dashboard.series import BINS, Book, Series

VALUES = st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6)), max_size=300)


def binned(values: list[tuple[float, float]], most: int) -> list[list[float]]:
    """The means of both, and the range, of the values in each bin of the least width with which there are few."""
    width = 0.05
    while len({int(x / width) for x, _ in values}) > most:
        width *= 2
    bins: dict[int, list[tuple[float, float]]] = {}
    for x, value in values:
        bins.setdefault(int(x / width), []).append((x, value))
    rows = []
    for _, pairs in sorted(bins.items()):
        xs, ys = zip(*pairs, strict=True)
        rows.append([sum(xs) / len(xs), sum(ys) / len(ys), min(ys), max(ys)])
    return rows


@examples(100, shrunk=False)
@given(VALUES)
def test_a_series_has_the_means_and_the_range_of_all_values_in_few_bins(
    values: list[tuple[float, float]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(series, "BINS", 16)
        made = Series()
        for x, value in values:
            made.add(x, value)
    points = made.points()
    found = zip(points.x, points.mean, points.low, points.high, strict=True)
    for row, wanted in zip(found, binned(values, 16), strict=True):
        assert row == pytest.approx(wanted, rel=1e-6, abs=1e-3)


def test_a_week_of_points_takes_no_more_than_the_bins() -> None:
    made = Series()
    for second in range(0, 7 * 86400, 5):
        made.add(float(second), 1.0)
    points = made.points()
    assert len(points.x) <= BINS
    assert points.x[-1] > 6.9 * 86400


def test_values_that_are_not_finite_are_counted() -> None:
    made = Series()
    for value in (1.0, None, math.nan, math.inf, 1e300, -(10**400)):
        made.add(0.0, value)
    for x in (math.nan, math.inf, 1e308, 10**400):
        made.add(x, 1.0)
    assert made.points().more == 9
    assert made.points().x == [0]


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e308, 10**400, True, "1"])
def test_any_number_in_a_file_leaves_the_others(number: object) -> None:
    book = Book(START)
    for each in ({**line("actor", 0, START + 1, {}), "time": number}, {"values": {}, "time": number}):
        book.add_line({**each, "values": {"loss": 1.0}})
    book.add_line({**line("actor", 0, START + 1, {}), "values": {"loss": number, "step": number}})
    book.add_line(line("actor", 0, START + 2, {"loss": 0.5}))
    book.add_step({"step": number, "loss": number})
    book.add_step({"step": 1, "loss": 2.0})
    assert 0.5 in book.points("time", [("actor", "loss")])[0]["points"].mean
    assert book.points("step", [("trial", "loss")])[0]["points"].mean == [2]


def test_metrics_have_an_axis_of_steps_if_a_step_was_reported_with_them() -> None:
    book = Book(START)
    book.add_line(line("actor", 0, START + 5, {"loss": 0.5, "step": 3}))
    book.add_line(line("rollout", 0, START + 6, {"reward": 1.0}))
    assert book.points("step", [("actor", "loss")])[0]["points"].x == [3]
    assert book.points("time", [("rollout", "reward")])[0]["points"].x == [6]
    assert [(each["name"], each["axes"]) for each in book.names()] == [
        ("loss", ["time", "step"]),
        ("step", ["time", "step"]),
        ("reward", ["time"]),
    ]


def test_ranks_of_a_role_are_one_line_with_their_range() -> None:
    book = Book(START)
    for rank, value in enumerate((1.0, 2.0, 6.0)):
        book.add_line(line("actor", rank, START + 5, {"loss": value}))
    points = book.points("time", [("actor", "loss")])[0]["points"]
    assert (points.low, points.mean, points.high) == ([1.0], [3.0], [6.0])
    assert book.names()[0]["ranks"] == 3


def test_lines_of_steps_of_a_trial_are_metrics_too() -> None:
    book = Book(START)
    book.add_step({"step": 1, "actorTrain/loss": 0.5, "name": "text", "seconds": None})
    assert book.points("step", [("trial", "actorTrain/loss")])[0]["points"].mean == [0.5]
    assert book.points("step", [("trial", "name")]) == []


def test_names_without_end_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "NAMES", 2)
    book = Book(START)
    book.add_line(line("actor", 0, START, {"a": 1.0, "b": 1.0, "c": 1.0}))
    assert (len(book.names()), book.too_many) == (2, 1)


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"role": 1},
        {"role": "a", "rank": 0, "time": "x", "values": {}},
        {"role": "a", "rank": 0, "time": 1, "values": []},
    ],
)
def test_a_foreign_line_is_left_out(bad: dict[str, object]) -> None:
    book = Book(START)
    book.add_line(bad)
    assert book.names() == []
