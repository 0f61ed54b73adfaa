"""Edges as people write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.collocation.graph.strategies import graphs
from unirun.collocation.graph import Edge, RoleGraph, faults, graph_of
from unirun.errors import SpecError
from unirun.spec.job import read_edges
from unirun.spec.read import Section

COUNTS = {"trainer": 1, "actor": 4, "rollout": 4, "reward": 2}


def from_edges(counts: Mapping[str, int], raw: Any) -> RoleGraph:
    """The graph of the edges in a job file. Raises `SpecError`."""
    job = Section({"edges": raw})
    edges = read_edges(job)
    if job.faults:
        raise SpecError(job.faults)
    return graph_of(counts, edges)


def edge(raw: Any) -> Edge:
    (found,) = from_edges(COUNTS, [raw]).edges
    return found


def test_an_edge_is_read_from_a_job_file() -> None:
    text = "- {from: actor, to: rollout, invocation: update, kind: broadcast, async: true, weight: 64MB}"
    assert from_edges(COUNTS, yaml.safe_load(text)).edges == (
        Edge("actor", "rollout", "update", "broadcast", "forward", True, 64e6),
    )


@pytest.mark.parametrize(
    "text",
    ['- "trainer -> actor: update"', "- trainer -> actor: update", "- trainer→actor:update"],
)
def test_the_short_form_needs_no_quotes(text: str) -> None:
    assert from_edges(COUNTS, yaml.safe_load(text)).edges == (Edge("trainer", "actor", "update", "scatter"),)


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        ("actor -> rollout", "one_to_one"),
        ("trainer -> rollout", "scatter"),
        ("rollout -> trainer", "gather"),
        ("rollout -> reward", "all_to_all"),
    ],
)
def test_the_kind_follows_from_the_counts_when_none_is_written(raw: str, kind: str) -> None:
    assert edge(raw).kind == kind


@pytest.mark.parametrize(
    ("weight", "size"), [(None, 0.0), (12, 12.0), (1.5, 1.5), ("1GiB", 2.0**30), ("64 MB", 64e6)]
)
def test_weights_are_bytes(weight: Any, size: float) -> None:
    assert edge({"from": "actor", "to": "reward", "weight": weight}).weight == size


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ("edges", "edges: expected a list of edges, found 'edges'"),
        ({"from": "actor", "to": "reward"}, "edges: expected a list of edges"),
        ([7], "edges[0]: expected an edge, found 7"),
        (["actor, reward"], "edges[0]: 'actor, reward' is no edge"),
        ([{"from": "actor"}], "edges[0].to: it names no role"),
        ([{"from": "", "to": "reward"}], "edges[0].from: it names no role"),
        ([{"from": 3, "to": "reward"}], "edges[0].from: expected a text, found 3"),
        (
            [{"from": "actor", "to": "reward", "wieght": 1}],
            "edges[0].wieght: unknown key; did you mean 'weight'?",
        ),
        (
            [{"from": "actor", "to": "reward", "weight": "much"}],
            "edges[0].weight: 'much' is no number of bytes",
        ),
        ([{"from": "actor", "to": "reward", "weight": True}], "edges[0].weight: expected a number of bytes"),
        (
            [{"from": "actor", "to": "reward", "weight": 10**400}],
            "edges[0].weight: expected a number of bytes",
        ),
        ([{"from": "actor", "to": "reward", "weight": -3}], "edges[0].weight: expected 0 or more bytes"),
        (
            [{"from": "actor", "to": "reward", "async": "no"}],
            "edges[0].async: expected true or false, found 'no'",
        ),
        (
            [{"from": "actor", "to": "reward", "kind": "all"}],
            "edges[0].kind: expected one of one_to_one, broadcast",
        ),
        (["actor -> critic"], "edges[0].to: no role is called 'critic'"),
    ],
)
def test_a_fault_is_told_with_its_place(raw: Any, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        from_edges(COUNTS, raw)
    assert [str(fault)[: len(problem)] for fault in caught.value.faults] == [problem]


@pytest.mark.parametrize(
    ("raw", "wheres"),
    [
        (["actor -> reward", 7, {"from": "a"}], {"edges[1]", "edges[2].to"}),
        (
            ["actor -> reward", "actor -> actor", "actor -> reward", "reward -> actor"],
            {"edges[1]", "edges[2]", "edges"},
        ),
    ],
)
def test_all_faults_are_told_at_once_with_the_places_that_were_written(raw: Any, wheres: set[str]) -> None:
    """First those of what is written, then those of the graph that it gives."""
    with pytest.raises(SpecError) as caught:
        from_edges(COUNTS, raw)
    told = {fault.where: fault.problem for fault in caught.value.faults}
    assert set(told) == wheres
    if "edges" in told:
        assert told["edges[2]"] == "actor → reward is edges[0] again"
        assert told["edges"].startswith("actor → reward → actor")


def test_no_edges_are_no_fault() -> None:
    assert from_edges(COUNTS, None).edges == ()
    assert [role.count for role in from_edges(COUNTS, []).roles] == [1, 4, 4, 2]


@given(graphs)
def test_what_is_written_of_a_graph_gives_it_back(graph: RoleGraph) -> None:
    raw = [
        {
            "from": each.source,
            "to": each.target,
            "invocation": each.invocation,
            "kind": each.kind,
            "direction": each.direction,
            "async": each.asynchronous,
            "weight": each.weight,
        }
        for each in graph.edges
    ]
    assert from_edges({role.name: role.count for role in graph.roles}, raw) == graph


SCALAR = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([*COUNTS])
)
KEY = st.sampled_from(["from", "to", "invocation", "kind", "direction", "async", "weight"]) | st.text(
    max_size=5
)
SHORT = st.tuples(SCALAR.map(str), st.sampled_from(["->", " -> ", "→", ":"]), SCALAR.map(str)).map("".join)
RAW = SCALAR | SHORT | st.dictionaries(KEY | SHORT, SCALAR | st.lists(SCALAR, max_size=2), max_size=7)


@given(st.lists(RAW, max_size=5) | RAW)
def test_whatever_is_written_gives_a_graph_or_faults(raw: Any) -> None:
    try:
        graph = from_edges(COUNTS, raw)
    except SpecError as error:
        assert all(fault.where.startswith("edges") and fault.problem for fault in error.faults)
    else:
        assert faults(graph) == ()
        assert len(graph.edges) == len(raw or ())
