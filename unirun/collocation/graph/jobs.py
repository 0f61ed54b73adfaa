"""The graph of a job, from its spec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from unirun.collocation.graph.checks import faults
from unirun.collocation.graph.values import Graph, Role
from unirun.errors import SpecError
from unirun.spec.edges import Edge, Kind
from unirun.spec.job import Entry, JobSpec


def declared(spec: JobSpec) -> Graph:
    """The roles of `spec` and its edges; without any, a trainer calls each role of workloads. Raises `SpecError`."""
    edges = spec.edges
    if not edges:
        trainers = (role.name for role in spec.roles if role.entry.kind == "trainer")
        workloads = [role.name for role in spec.roles if role.entry.kind == "workload"]
        edges = tuple(Edge(trainer, workload, kind="") for trainer in trainers for workload in workloads)
    graph = graph_of({role.name: role.count for role in spec.roles}, edges)
    programs = {role.name: _program(role.entry) for role in spec.roles}
    return replace(graph, roles=tuple(replace(role, program=programs[role.name]) for role in graph.roles))


def _program(entry: Entry) -> str:
    return entry.target.rpartition("/")[2] if entry.kind == "program" else ""


def graph_of(counts: Mapping[str, int], edges: Iterable[Edge]) -> Graph:
    """The graph of the roles in `counts`, with every fault of it as a `SpecError`.

    An edge without a kind is ``one_to_one`` between equal counts, ``scatter`` from one rank, ``gather`` to one rank,
    and else ``all_to_all``.
    """
    roles = tuple(Role(name, count) for name, count in counts.items())
    graph = Graph(roles, tuple(replace(e, kind=e.kind or _usual_kind(counts, e)) for e in edges))
    if found := faults(graph):
        raise SpecError(found)
    return graph


def _usual_kind(counts: Mapping[str, int], edge: Edge) -> Kind:
    sources, targets = counts.get(edge.source, 1), counts.get(edge.target, 1)
    if sources == targets:
        return "one_to_one"
    if sources == 1:
        return "scatter"
    return "gather" if targets == 1 else "all_to_all"
