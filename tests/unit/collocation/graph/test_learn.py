"""The graph that calls show."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from unirun.collocation.graph import (
    Edge,
    ProcessCalls,
    Role,
    RoleGraph,
    added,
    graph_of,
    learn,
    sound,
    without_circles,
)
from unirun.collocation.graph.svg import yaml
from unirun.spec.job import read_edges
from unirun.spec.read import Section
from unirun.spec.yaml import load_job_file
from unirun.wire.reports import CallCount

RANKS = {"a": 3, "b": 3, "c": 6}


def called(
    role: str,
    ranks: list[int],
    method: str = "f",
    *,
    steps: int = 10,
    size: int = 100,
    back: int = 0,
    asynchronous: bool = False,
    split: bool = False,
) -> CallCount:
    """Each of `ranks` is called once a step, with `size` bytes and `back` for an answer."""
    calls = steps * len(ranks)
    spans = tuple((rank, rank) for rank in ranks)
    latencies = (*[0] * 6, calls, *[0] * 7)
    figures = calls, calls * size, calls * back, 0.1 * calls
    return CallCount(role, method, *figures, spans, asynchronous, split, latencies)


def callers(pairs: list[tuple[int, int]], target: str = "b", *, split: bool = False) -> list[ProcessCalls]:
    """Ranks of ``a`` that call ranks of `target`."""
    sources = sorted({source for source, _ in pairs})
    return [
        ("a", source, (called(target, [t for s, t in pairs if s == source], split=split),))
        for source in sources
    ]


def learned(seen: Sequence[ProcessCalls], ranks: dict[str, int] = RANKS) -> Edge:
    (found,) = learn(seen, ranks)
    return found.edge


@pytest.mark.parametrize(
    ("pairs", "counts", "split", "kind"),
    [
        ([(0, 0)], (1, 1), False, "one_to_one"),
        ([(0, 0), (1, 1), (2, 2)], (3, 3), True, "one_to_one"),
        ([(0, 0), (0, 1), (0, 2)], (1, 3), False, "broadcast"),
        ([(0, 0), (0, 1), (0, 2)], (1, 3), True, "scatter"),
        ([(0, 0)], (1, 3), False, "one_to_one"),
        ([(0, 0), (0, 1), (1, 2), (1, 3)], (2, 4), True, "scatter"),
        ([(0, 0), (1, 0), (2, 0)], (3, 1), False, "gather"),
        ([(0, 0), (1, 0), (2, 1), (3, 1)], (4, 2), True, "gather"),
        ([*product(range(3), range(2))], (3, 2), False, "all_to_all"),
    ],
)
def test_the_kind_is_seen_from_who_calls_whom(
    pairs: list[tuple[int, int]], counts: tuple[int, int], split: bool, kind: str
) -> None:
    assert learned(callers(pairs, split=split), dict(zip("ab", counts, strict=True))).kind == kind


@pytest.mark.parametrize(
    ("there", "back", "direction"),
    [(100, 0, "forward"), (100, 11, "forward"), (100, 20, "both"), (1, 100, "back"), (0, 0, "forward")],
)
def test_the_direction_is_where_the_bytes_go(there: int, back: int, direction: str) -> None:
    seen = [("a", 0, (called("b", [0], size=there, back=back),))]
    assert learned(seen).direction == direction


def test_the_weight_is_in_bytes_per_step_of_all_ranks() -> None:
    seen = [("a", 0, (called("b", [0, 1], size=200, back=50, steps=7),))]
    assert learned(seen).weight == 500


def test_a_method_that_is_called_often_weighs_what_it_moves_in_a_step() -> None:
    often = called("c", [0], "g", steps=50)
    seen = [("a", 0, (called("b", [0], steps=5), called("b", [0], "h", steps=5), often))]
    assert [(each.edge.invocation, each.edge.weight) for each in learn(seen, RANKS)] == [
        ("f", 100),
        ("h", 100),
        ("g", 1000),
    ]


def test_a_restart_begins_at_zero_and_nothing_is_lost() -> None:
    first, second = called("b", [0, 1], steps=6), called("b", [1, 2], steps=4, split=True)
    (both,) = added((first,), (second,))
    assert (both.calls, both.bytes, both.ranks, both.split) == (20, 2000, ((0, 2),), True)
    other = called("c", [0])
    assert added((first,), (other,)) == (first, other)
    assert added((), (first,)) == added((first,), ()) == (first,)


def test_figures_are_those_of_all_ranks() -> None:
    seen = callers([(0, 0), (1, 1)])
    (found,) = learn(seen, RANKS)
    assert (found.calls, found.bytes, found.returned) == (20, 2000, 0)
    assert found.seconds == pytest.approx(2.0)


def test_calls_that_nobody_waits_for_are_asynchronous() -> None:
    cast = ("a", 0, (called("b", [0], asynchronous=True),))
    assert learned([cast]).asynchronous
    assert not learned([cast, ("a", 1, (called("b", [0]),))]).asynchronous


def test_a_role_that_calls_itself_has_no_edge() -> None:
    assert learn([("a", 0, (called("a", [1]),))], RANKS) == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": "nobody"},
        {"calls": 0},
        {"calls": -1},
        {"bytes": 1 << 62},
        {"returned": 10**400},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"ranks": ()},
        {"ranks": ((0, 3),)},
        {"ranks": ((-1, 0),)},
        {"ranks": ((2, 1),)},
        {"latencies": (1, 2)},
        {"latencies": (-1, *[0] * 13)},
    ],
)
def test_counts_that_cannot_be_are_left_out(wrong: dict[str, object]) -> None:
    right = called("b", [0])
    assert sound([replace(right, **wrong), right], RANKS) == (right,)


def test_nothing_that_was_seen_is_no_edge() -> None:
    assert learn([], RANKS) == ()


COUNT = st.builds(
    CallCount,
    st.sampled_from("abc"),
    st.sampled_from("fg"),
    st.integers(-1, 1000),
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.floats(0, 10),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=3).map(tuple),
    st.booleans(),
    st.booleans(),
)
CALLERS = st.dictionaries(
    st.tuples(st.sampled_from("abc"), st.integers(0, 2)), st.lists(COUNT, max_size=4).map(tuple), max_size=6
).map(lambda found: [(role, rank, sound(counts, RANKS)) for (role, rank), counts in found.items()])


@given(CALLERS, st.integers())
def test_what_is_learned_is_a_graph_whatever_came_first(seen: list[ProcessCalls], seed: int) -> None:
    shuffled = Random(seed).sample(seen, len(seen))
    found = learn(seen, RANKS)
    assert [replace(each, seconds=0.0) for each in learn(shuffled, RANKS)] == [
        replace(each, seconds=0.0) for each in found
    ]
    for each in found:
        assert each.edge.weight >= 0
        assert each.edge.source != each.edge.target
        assert each.calls > 0
    names = [(each.edge.source, each.edge.target, each.edge.invocation) for each in found]
    assert len(set(names)) == len(names)


@given(seen=CALLERS)
def test_what_is_learned_can_be_written_into_a_job_file(seen: list[ProcessCalls], tmp_path: Path) -> None:
    edges = tuple(each.edge for each in learn(seen, RANKS))
    file = tmp_path / "job.yaml"
    # Calls in a circle that each wait for the next are what a job cannot declare.
    graph = without_circles(RoleGraph(tuple(Role(name, count) for name, count in RANKS.items()), edges))
    file.write_text(yaml(graph))
    again = graph_of(RANKS, read_edges(Section(load_job_file(str(file), ()))))
    assert again.edges == tuple(replace(edge, weight=float(round(edge.weight))) for edge in graph.edges)
    assert [replace(edge, asynchronous=False) for edge in graph.edges] == [
        replace(edge, asynchronous=False) for edge in edges
    ]


def test_latencies_of_all_callers_are_added() -> None:
    (found,) = learn([("a", 0, (called("b", [0]),)), ("a", 1, (called("b", [0, 1]),))], RANKS)
    assert found.latencies == (*[0] * 6, 30, *[0] * 7)
    (both,) = added((called("b", [0]),), (called("b", [1]),))
    assert sum(both.latencies) == both.calls
