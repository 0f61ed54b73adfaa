"""From roles to their ranks: ``actor:0`` calls ``rollout:2``.

An ``all_to_all`` joins every rank with every other. All other kinds pair ranks in proportion to the counts, so that
each rank of the smaller role has an even and consecutive part of the larger: with one source everything starts there,
with one target everything ends there, and with equal counts rank meets rank. The kinds differ in what goes along a
pair: the same to all (``broadcast``), to each its part (``scatter``), from each its part (``gather``).

Pairs are generated lazily: ten thousand ranks that all call each other have a hundred million pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

from unirun.graph.values import Graph
from unirun.spec.edges import Edge
from unirun.values import Value


class Instance(Value):
    """One rank of a role."""

    role: str
    rank: int

    def __str__(self) -> str:
        return f"{self.role}:{self.rank}"


class InstanceEdge(Value):
    """One rank calls another; `weight` is this pair's even part of the edge's bytes per step."""

    source: Instance
    target: Instance
    edge: Edge
    weight: float


def instances(graph: Graph) -> Iterator[Instance]:
    """Every rank of every role, in their order."""
    return (Instance(role.name, rank) for role in graph.roles for rank in range(role.count))


def instance_edges(graph: Graph, edge: Edge | None = None) -> Iterator[InstanceEdge]:
    """The pairs of `edge`, or of all edges, one after the other, ordered by source and then by target."""
    for each in graph.edges if edge is None else (edge,):
        weight = each.weight / max(pair_count(graph, each), 1)
        for rank in range(graph.count(each.source)):
            source = Instance(each.source, rank)
            for peer in targets_of(graph, each, rank):
                yield InstanceEdge(source, Instance(each.target, peer), each, weight)


def pair_count(graph: Graph, edge: Edge) -> int:
    """How many pairs `edge` has, without going through them."""
    sources, targets = graph.count(edge.source), graph.count(edge.target)
    return sources * targets if edge.kind == "all_to_all" else max(sources, targets)


def targets_of(graph: Graph, edge: Edge, rank: int) -> range:
    """The ranks that rank `rank` of the source calls."""
    sources, targets = graph.count(edge.source), graph.count(edge.target)
    return range(targets) if edge.kind == "all_to_all" else _facing(rank, sources, targets)


def sources_of(graph: Graph, edge: Edge, rank: int) -> range:
    """The ranks that call rank `rank` of the target."""
    sources, targets = graph.count(edge.source), graph.count(edge.target)
    return range(sources) if edge.kind == "all_to_all" else _facing(rank, targets, sources)


def _facing(rank: int, here: int, there: int) -> range:
    """The ranks of a role of `there` ranks that face one of a role of `here`: pair k joins k·here/m with k·there/m."""
    if there <= here:
        return range(rank * there // here, rank * there // here + 1)
    return range(-(-rank * there // here), -(-(rank + 1) * there // here))
