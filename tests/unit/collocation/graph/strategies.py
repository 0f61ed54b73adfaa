"""Graphs for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from unirun.collocation.graph import Edge, Role, RoleGraph, faults
from unirun.spec.job import DIRECTIONS, EDGE_KINDS

NAMES = [*"abcdef"]


@st.composite
def any_graphs(draw: st.DrawFn, names: list[str] = NAMES) -> RoleGraph:
    """Graphs of known roles, with cycles, and edges that may be there twice; no role calls itself."""
    roles = tuple(Role(name, draw(st.integers(1, 5))) for name in names[: draw(st.integers(1, len(names)))])
    counts = {role.name: role.count for role in roles}
    ends = st.sampled_from([role.name for role in roles])
    edges = draw(
        st.lists(
            st.builds(
                Edge,
                ends,
                ends,
                st.sampled_from(["", "f", "g"]),
                st.sampled_from(EDGE_KINDS),
                st.sampled_from(DIRECTIONS),
                st.booleans(),
                st.sampled_from([0.0, 1.0, 50.0, 1e9]),
            ),
            max_size=10,
        )
    )
    meant = (
        each
        for each in edges
        if each.source != each.target
        and (each.kind != "one_to_one" or counts[each.source] <= counts[each.target])
    )
    return RoleGraph(roles, tuple(meant))


graphs = any_graphs().filter(lambda graph: not faults(graph))
"""Graphs without faults."""


def pairs_of(graph: RoleGraph, edge: Edge) -> list[tuple[str, str]]:
    """The ranks that `edge` joins, as ``actor:0`` and ``rollout:2``."""
    return [
        (f"{edge.source}:{rank}", f"{edge.target}:{peer}")
        for rank in range(graph.count(edge.source))
        for peer in graph.targets_of(edge, rank)
    ]
