"""Which rank calls which."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.graph.graphs import graphs
from unirun.graph import (
    Edge,
    Graph,
    Role,
    instance_edges,
    instances,
    pair_count,
    sources_of,
    targets_of,
)
from unirun.spec.edges import KINDS, Kind


def pairs(kind: Kind, sources: int, targets: int) -> str:
    graph = Graph((Role("a", sources), Role("b", targets)), (Edge("a", "b", kind=kind),))
    return " ".join(f"{each.source.rank}{each.target.rank}" for each in instance_edges(graph))


@pytest.mark.parametrize(
    ("kind", "sources", "targets", "expected"),
    [
        ("one_to_one", 3, 3, "00 11 22"),
        ("broadcast", 1, 3, "00 01 02"),
        ("scatter", 2, 4, "00 01 12 13"),
        ("scatter", 2, 3, "00 01 12"),
        ("gather", 4, 2, "00 10 21 31"),
        ("gather", 3, 1, "00 10 20"),
        ("all_to_all", 2, 2, "00 01 10 11"),
    ],
)
def test_kinds_pair_ranks(kind: Kind, sources: int, targets: int, expected: str) -> None:
    assert pairs(kind, sources, targets) == expected


def test_ranks_have_the_names_that_logs_have() -> None:
    graph = Graph(
        (Role("actor", 1), Role("rollout", 2)), (Edge("actor", "rollout", kind="scatter", weight=8.0),)
    )
    assert [str(each) for each in instances(graph)] == ["actor:0", "rollout:0", "rollout:1"]
    found = [(str(each.source), str(each.target), each.weight) for each in instance_edges(graph)]
    assert found == [("actor:0", "rollout:0", 4.0), ("actor:0", "rollout:1", 4.0)]


@given(st.sampled_from(KINDS), st.integers(1, 40), st.integers(1, 40))
def test_both_ends_see_the_same_pairs_and_nobody_is_left_out(kind: Kind, sources: int, targets: int) -> None:
    edge = Edge("a", "b", kind=kind)
    graph = Graph((Role("a", sources), Role("b", targets)), (edge,))
    there = {(rank, peer) for rank in range(sources) for peer in targets_of(graph, edge, rank)}
    back = {(peer, rank) for rank in range(targets) for peer in sources_of(graph, edge, rank)}
    assert there == back
    assert len(there) == pair_count(graph, edge)
    assert {rank for rank, _ in there} == set(range(sources))
    assert {rank for _, rank in there} == set(range(targets))


@given(st.integers(1, 40), st.integers(1, 40))
def test_parts_are_even(sources: int, targets: int) -> None:
    edge = Edge("a", "b", kind="scatter")
    graph = Graph((Role("a", sources), Role("b", targets)), (edge,))
    sizes = {len(targets_of(graph, edge, rank)) for rank in range(sources)}
    assert max(sizes) - min(sizes) <= 1


@given(graphs)
def test_the_weights_of_pairs_are_those_of_their_edges(graph: Graph) -> None:
    for edge in graph.edges:
        weight = sum(each.weight for each in instance_edges(graph, edge))
        assert weight == pytest.approx(edge.weight)


def test_a_hundred_million_pairs_are_not_listed_unless_somebody_goes_through_them() -> None:
    edge = Edge("a", "b", kind="all_to_all")
    graph = Graph((Role("a", 10_000), Role("b", 10_000)), (edge,))
    assert pair_count(graph, edge) == 100_000_000
    assert len([*islice(instance_edges(graph), 5)]) == 5
    assert len(sources_of(graph, edge, 3)) == 10_000
