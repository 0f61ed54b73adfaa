"""The faults of a graph, and its oddities."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.unit.collocation.graph.scenarios import SCENARIOS
from tests.unit.collocation.graph.strategies import any_graphs
from unirun.collocation.graph import Edge, Role, RoleGraph, faults, warnings
from unirun.collocation.graph.values import cycles

ROLES = (Role("actor", 4), Role("rollout", 4), Role("reward", 2))


def said(*edges: Edge, roles: tuple[Role, ...] = ROLES) -> list[str]:
    return [str(fault) for fault in faults(RoleGraph(roles, edges))]


def test_a_cycle_of_calls_that_are_waited_for_is_shown() -> None:
    edges = (Edge("rollout", "reward"), Edge("reward", "actor"), Edge("actor", "rollout"))
    (fault,) = said(*edges)
    assert fault.startswith("edges: actor → rollout → reward → actor: each waits for the next")
    assert "asynchronous" in fault


def test_a_cycle_with_an_asynchronous_edge_is_how_reinforcement_learning_goes() -> None:
    edges = (Edge("rollout", "reward"), Edge("reward", "actor"), Edge("actor", "rollout", asynchronous=True))
    assert said(*edges) == []


def test_two_cycles_are_two_faults() -> None:
    edges = (
        Edge("actor", "rollout"),
        Edge("rollout", "actor"),
        Edge("reward", "actor"),
        Edge("actor", "reward"),
    )
    assert [fault.split(":")[1] for fault in said(*edges)] == [
        " actor → rollout → actor",
        " actor → reward → actor",
    ]


@pytest.mark.parametrize(
    ("edge", "problem"),
    [
        (
            Edge("actor", "rolout"),
            "edges[0].to: no role is called 'rolout'; did you mean 'rollout'?",
        ),
        (Edge("x", "actor"), "edges[0].from: no role is called 'x'; known: actor, reward, rollout"),
        (
            Edge("actor", "actor"),
            "edges[0]: actor calls itself; leave it out: ranks of one role meet in their process group",
        ),
        (
            Edge("actor", "reward", kind="one_to_one"),
            "edges[0]: one_to_one from 4 ranks of actor to 2 of reward; give both the same count, or use gather",
        ),
        (
            Edge("actor", "reward", weight=-1.0),
            "edges[0].weight: expected 0 or more bytes per step, found -1.0",
        ),
        (
            Edge("actor", "reward", weight=float("nan")),
            "edges[0].weight: expected 0 or more bytes per step, found nan",
        ),
        (
            Edge("actor", "reward", kind="scater"),  # type: ignore[arg-type]
            "edges[0].kind: 'scater' is no kind of edge; did you mean 'scatter'?",
        ),
        (
            Edge("actor", "reward", direction="up"),  # type: ignore[arg-type]
            "edges[0].direction: 'up' is no direction; known: back, both, forward",
        ),
    ],
)
def test_a_fault_says_where_it_is_and_what_to_do(edge: Edge, problem: str) -> None:
    assert said(edge) == [problem]


def test_an_edge_is_there_once_for_each_invocation() -> None:
    edges = (Edge("actor", "reward", "f"), Edge("actor", "reward", "g"), Edge("actor", "reward", "f"))
    assert said(*edges) == ["edges[2]: actor → reward: f is edges[0] again; leave one of them out"]


def test_all_faults_are_told_at_once() -> None:
    edges = (
        Edge("actor", "actor"),
        Edge("y", "z", weight=-1),
        Edge("actor", "rollout"),
        Edge("rollout", "actor"),
    )
    assert len(said(*edges, roles=(*ROLES, Role("actor"), Role("none", 0)))) == 7


def test_a_role_that_nothing_leads_to_is_odd() -> None:
    graph = RoleGraph((*ROLES, Role("critic"), Role("reference")), (Edge("actor", "rollout"),))
    assert [warning.split(":")[0] for warning in warnings(graph)] == [
        "role reward has no edge",
        "role critic has no edge",
        "role reference has no edge",
    ]


def test_a_circle_that_nobody_starts_is_odd() -> None:
    circle = (Edge("rollout", "reward"), Edge("reward", "rollout", asynchronous=True))
    graph = RoleGraph((*ROLES, Role("critic")), (Edge("actor", "critic"), *circle))
    assert warnings(graph) == (
        "role rollout is called only in a circle that no role outside of it starts",
        "role reward is called only in a circle that no role outside of it starts",
    )


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_ready_graphs_are_right(name: str) -> None:
    assert faults(SCENARIOS[name]()) == ()
    assert warnings(SCENARIOS[name]()) == ()


@given(any_graphs())
def test_cycles_are_cycles_and_without_them_nothing_is_one(graph: RoleGraph) -> None:
    names = [role.name for role in graph.roles]
    pairs = {(edge.source, edge.target) for edge in graph.edges}
    found = [*cycles(names, graph.edges)]
    for circle in found:
        assert len(set(circle)) == len(circle) >= 2
        assert min(circle, key=names.index) == circle[0]
        assert {*zip(circle, (*circle[1:], circle[0]), strict=True)} <= pairs
    # Nobody is left who waits when those who wait for nobody go, one after the other.
    left = set(names)
    while free := {name for name in left if not any(a == name and b in left for a, b in pairs)}:
        left -= free
    assert bool(left) == bool(found)


def test_a_chain_of_thousands_of_roles_is_no_trouble() -> None:
    names = [str(number) for number in range(5000)]
    edges = [Edge(a, b) for a, b in zip(names, [*names[1:], names[0]], strict=True)]
    assert [len(circle) for circle in cycles(names, edges)] == [5000]
