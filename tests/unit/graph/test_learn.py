"""The graph that calls show."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.graph import CallReport, Edge, Observed, learn


def calls(
    pairs: list[tuple[int, int]], sizes: list[int] | None = None, steps: int = 10, returned: int = 0
) -> Observed:
    """Each of `pairs` calls once a step, with arguments of its size."""
    return Observed.of(
        CallReport(
            "a",
            "b",
            "f",
            steps,
            steps * size,
            returned=steps * returned,
            source_rank=source,
            target_rank=target,
        )
        for (source, target), size in zip(pairs, sizes or [100] * len(pairs), strict=True)
    )


def learned(observed: Observed) -> Edge:
    (edge,) = learn(observed).edges
    return edge


@pytest.mark.parametrize(
    ("pairs", "sizes", "kind"),
    [
        ([(0, 0)], [100], "one_to_one"),
        ([(0, 0), (1, 1), (2, 2)], [100, 200, 300], "one_to_one"),
        ([(0, 0), (0, 1), (0, 2)], [100, 100, 100], "broadcast"),
        ([(0, 0), (0, 1), (0, 2)], [100, 120, 90], "scatter"),
        ([(0, 0), (0, 1), (1, 2), (1, 3)], [100, 120, 90, 1], "scatter"),
        ([(0, 0), (1, 0), (2, 0)], [100, 100, 100], "gather"),
        ([*product(range(3), range(2))], [100] * 6, "all_to_all"),
    ],
)
def test_the_kind_is_seen_from_who_calls_whom(
    pairs: list[tuple[int, int]], sizes: list[int], kind: str
) -> None:
    assert learned(calls(pairs, sizes)).kind == kind


@pytest.mark.parametrize(
    ("there", "back", "direction"),
    [(100, 0, "forward"), (100, 11, "forward"), (100, 20, "both"), (1, 100, "back"), (0, 0, "forward")],
)
def test_the_direction_is_where_the_bytes_go(there: int, back: int, direction: str) -> None:
    assert learned(calls([(0, 0)], [there], returned=back)).direction == direction


def test_the_weight_is_in_bytes_per_step_of_all_ranks() -> None:
    observed = calls([(0, 0), (0, 1)], [100, 300], steps=7, returned=50)
    assert learned(observed).weight == 500
    assert learn(observed, steps=14).edges[0].weight == 250


def test_a_method_that_is_called_often_weighs_what_it_moves_in_a_step() -> None:
    once = [CallReport("t", role, "f", 5, 500) for role in ("a", "b")]
    often = CallReport("t", "c", "g", 50, 5000)
    assert {edge.target: edge.weight for edge in learn(Observed.of([*once, often])).edges} == {
        "a": 100,
        "b": 100,
        "c": 1000,
    }


def test_a_restart_begins_at_zero_and_nothing_is_lost() -> None:
    first = CallReport("a", "b", "f", 6, 600)
    second = replace(first, calls=4, bytes=400, incarnation=1)
    assert [each.calls for each in Observed.of([first, second]).totals().values()] == [10]


def test_an_older_report_changes_nothing() -> None:
    old, new = CallReport("a", "b", "f", 6, 600), CallReport("a", "b", "f", 9, 900)
    assert Observed.of([new, old]) == Observed.of([old, new]) == Observed.of([new])


def test_counts_are_those_of_the_job_or_what_was_seen() -> None:
    observed = calls([(0, 0), (0, 3)])
    assert [(role.name, role.count) for role in learn(observed).roles] == [("a", 1), ("b", 4)]
    assert [(role.name, role.count) for role in learn(observed, {"b": 8, "c": 1}).roles] == [
        ("b", 8),
        ("c", 1),
        ("a", 1),
    ]


def test_calls_that_nobody_waits_for_are_asynchronous() -> None:
    cast = CallReport("a", "b", "f", 5, 0, asynchronous=True)
    assert learned(Observed.of([cast])).asynchronous
    assert not learned(Observed.of([cast, replace(cast, asynchronous=False, source_rank=1)])).asynchronous


def test_nothing_that_was_observed_is_a_graph_without_edges() -> None:
    assert learn(Observed(), {"a": 2}).edges == ()
    assert learn(Observed.of([CallReport("a", "b", "f", 0, 0)])).edges == ()


ROLE = st.sampled_from("abc")
RANK = st.integers(0, 2)
COUNT = st.integers(0, 1000)
REPORT = st.builds(
    CallReport,
    ROLE,
    ROLE,
    st.sampled_from("fg"),
    COUNT,
    COUNT,
    st.floats(0, 10),
    COUNT,
    RANK,
    RANK,
    RANK,
    st.booleans(),
)
REPORTS = st.lists(REPORT, max_size=12)


@given(REPORTS, REPORTS, REPORTS)
def test_what_is_observed_may_be_merged_in_any_order(
    one: list[CallReport], two: list[CallReport], three: list[CallReport]
) -> None:
    a, b, c = Observed.of(one), Observed.of(two), Observed.of(three)
    assert a | b == b | a
    assert (a | b) | c == a | (b | c) == Observed.of([*one, *two, *three])
    assert a | a == a | Observed() == a


@given(REPORTS, st.randoms())
def test_the_graph_does_not_depend_on_the_order_of_reports(reports: list[CallReport], random: object) -> None:
    shuffled = [*reports]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert learn(Observed.of(reports)) == learn(Observed.of(shuffled))
    for edge in learn(Observed.of(reports)).edges:
        assert edge.weight >= 0
        assert edge.source != edge.target
