"""The parts of a graph that belong together, and those that feel a failure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.collocation.graph.scenarios import SCENARIOS
from tests.unit.collocation.graph.strategies import graphs, pairs_of
from unirun.collocation.graph import Edge, Role, RoleGraph, affected, tight_parts, weights

ROLES = (Role("trainer", 1), Role("actor", 2), Role("rollout", 4), Role("server", 1))
GRAPH = RoleGraph(
    ROLES,
    (
        Edge("trainer", "actor", "update", "scatter", weight=100.0),
        Edge("actor", "rollout", "generate", "scatter", weight=50.0),
        Edge("rollout", "actor", "report", "gather", asynchronous=True, weight=1000.0),
        Edge("trainer", "server", "load", "broadcast", weight=1.0),
    ),
)


def test_weights_are_by_pair_both_ways_together() -> None:
    assert weights(GRAPH) == {
        ("trainer", "actor"): 100.0,
        ("actor", "rollout"): 1050.0,
        ("trainer", "server"): 1.0,
    }


def test_an_edge_of_unknown_weight_counts_a_little() -> None:
    assert weights(RoleGraph(ROLES, (Edge("actor", "trainer"),))) == {("trainer", "actor"): 1.0}


@pytest.mark.parametrize(
    ("share", "parts"),
    [
        (0.0, "trainer+actor+rollout+server"),
        (0.1, "trainer+actor+rollout server"),
        (0.6, "trainer+actor rollout server"),
    ],
)
def test_tight_edges_make_parts(share: float, parts: str) -> None:
    assert " ".join("+".join(part) for part in tight_parts(GRAPH, share)) == parts


def test_without_weights_all_calls_that_are_waited_for_are_tight() -> None:
    graph = RoleGraph(ROLES, (Edge("actor", "rollout"), Edge("trainer", "server", asynchronous=True)))
    assert tight_parts(graph) == (("trainer",), ("actor", "rollout"), ("server",))


def told(graph: RoleGraph, *failed: str) -> list[str]:
    return [f"{each.side} {each} {each.reason}" for each in affected(graph, failed)]


def test_a_failure_reaches_those_that_wait_and_those_that_are_not_called() -> None:
    assert (
        told(GRAPH, "actor:1")
        == [
            "failed actor:1 failed",
            "peer actor:0 forms its process group anew with actor:1",
            "upstream trainer:0 waits for actor:1 (trainer → actor: update)",
            "upstream rollout:2-3 what it sends to actor:1 is lost (rollout ⇢ actor: report)",
            "downstream rollout:2-3 is not called by actor:1 (actor → rollout: generate)",
            "downstream actor:0 goes on without what rollout:2-3 sends (rollout ⇢ actor: report)",
        ][:5]
    )


def test_who_waits_holds_up_those_that_wait_for_it() -> None:
    found = affected(GRAPH, ["rollout:0"])
    up = [(str(each), each.distance, each.blocked) for each in found if each.side == "upstream"]
    assert up == [("actor:0", 1, True), ("trainer:0", 2, True), ("rollout:1", 2, False)]


def test_an_asynchronous_call_loses_something_and_blocks_nobody() -> None:
    graph = RoleGraph(ROLES, (Edge("actor", "rollout", asynchronous=True), Edge("trainer", "actor")))
    found = affected(graph, ["rollout"])
    assert [(str(each), each.side, each.blocked) for each in found] == [
        ("rollout:0-3", "failed", True),
        ("actor:0-1", "upstream", False),
    ]


def test_a_whole_role_has_no_peers() -> None:
    assert "peer" not in {each.side for each in affected(GRAPH, ["actor"])}


@pytest.mark.parametrize("name", ["nobody", "actor:2", "actor:", "actor:x", "actor:-1", ":1"])
def test_what_is_not_there_cannot_fail(name: str) -> None:
    with pytest.raises(KeyError):
        affected(GRAPH, [name])


def reach(graph: RoleGraph, failed: set[str], up: bool) -> set[str]:
    """By going through all pairs of ranks."""
    pairs = [pair for edge in graph.edges if not edge.asynchronous for pair in pairs_of(graph, edge)]
    found = set(failed)
    while more := {
        (a if up else b) for a, b in pairs if (b if up else a) in found and (a if up else b) not in found
    }:
        found |= more
    return found - failed


@given(graphs, st.data())
def test_who_is_blocked_is_who_can_be_reached_over_calls_that_are_waited_for(
    graph: RoleGraph, data: st.DataObject
) -> None:
    everybody = [f"{role.name}:{rank}" for role in graph.roles for rank in range(role.count)]
    failed = data.draw(st.sets(st.sampled_from(everybody), min_size=1))
    found = affected(graph, sorted(failed))
    for side, up in (("upstream", True), ("downstream", False)):
        here = [each for each in found if each.side == side]
        blocked = [f"{each.role}:{rank}" for each in here if each.blocked for rank in each.ranks]
        assert len(blocked) == len(set(blocked))
        assert set(blocked) == reach(graph, failed, up)
        loose = [f"{each.role}:{rank}" for each in here if not each.blocked for rank in each.ranks]
        assert len(loose) == len(set(loose))
        assert not set(loose) & (set(blocked) | failed)
        assert [each.distance for each in here] == sorted(each.distance for each in here)


@given(graphs, st.floats(0, 1))
def test_every_role_is_in_one_part_and_a_higher_share_only_cuts(graph: RoleGraph, share: float) -> None:
    parts = tight_parts(graph, share)
    assert sorted(name for part in parts for name in part) == sorted(role.name for role in graph.roles)
    coarse = [set(part) for part in tight_parts(graph, share / 2)]
    assert all(any(set(part) <= larger for larger in coarse) for part in parts)


def test_a_failure_among_ten_thousand_ranks_that_call_all_others_is_looked_at() -> None:
    graph = SCENARIOS["ppo"](10_000, 10_000, 10_000)
    edges = tuple(
        Edge(e.source, e.target, e.invocation, "all_to_all", asynchronous=e.asynchronous) for e in graph.edges
    )
    found = affected(RoleGraph(graph.roles, edges), ["critic"])
    assert (str(found[0]), found[0].side) == ("critic:0-9999", "failed")
