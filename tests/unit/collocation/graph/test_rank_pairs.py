"""The ranks that call each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.collocation.graph.strategies import pairs_of
from unirun.collocation.graph import Edge, Role, RoleGraph
from unirun.spec.job import EDGE_KINDS, EdgeKind


def pairs(kind: EdgeKind, sources: int, targets: int) -> str:
    edge = Edge("a", "b", kind=kind)
    graph = RoleGraph((Role("a", sources), Role("b", targets)), (edge,))
    return " ".join(f"{one[2:]}{other[2:]}" for one, other in pairs_of(graph, edge))


@pytest.mark.parametrize(
    ("kind", "sources", "targets", "expected"),
    [
        ("one_to_one", 3, 3, "00 11 22"),
        ("one_to_one", 1, 3, "00"),
        ("broadcast", 1, 3, "00 01 02"),
        ("scatter", 2, 4, "00 01 12 13"),
        ("scatter", 2, 3, "00 01 12"),
        ("gather", 4, 2, "00 10 21 31"),
        ("gather", 3, 1, "00 10 20"),
        ("all_to_all", 2, 2, "00 01 10 11"),
    ],
)
def test_kinds_pair_ranks(kind: EdgeKind, sources: int, targets: int, expected: str) -> None:
    assert pairs(kind, sources, targets) == expected


@given(st.sampled_from(EDGE_KINDS), st.integers(1, 40), st.integers(1, 40))
def test_both_ends_see_the_same_pairs_and_nobody_is_left_out(
    kind: EdgeKind, sources: int, targets: int
) -> None:
    edge = Edge("a", "b", kind=kind)
    graph = RoleGraph((Role("a", sources), Role("b", targets)), (edge,))
    there = {(rank, peer) for rank in range(sources) for peer in graph.targets_of(edge, rank)}
    back = {(peer, rank) for rank in range(targets) for peer in graph.sources_of(edge, rank)}
    assert there == back
    if kind != "one_to_one":
        assert {rank for rank, _ in there} == set(range(sources))
        assert {rank for _, rank in there} == set(range(targets))


@given(st.integers(1, 40), st.integers(1, 40))
def test_parts_are_even(sources: int, targets: int) -> None:
    edge = Edge("a", "b", kind="scatter")
    graph = RoleGraph((Role("a", sources), Role("b", targets)), (edge,))
    sizes = {len(graph.targets_of(edge, rank)) for rank in range(sources)}
    assert max(sizes) - min(sizes) <= 1


def test_a_hundred_million_pairs_are_ranges_and_not_lists() -> None:
    edge = Edge("a", "b", kind="all_to_all")
    graph = RoleGraph((Role("a", 10_000), Role("b", 10_000)), (edge,))
    assert graph.sources_of(edge, 3) == range(10_000)
