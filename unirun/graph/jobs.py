"""The graph of a job, as its spec has it."""

from __future__ import annotations

from unirun.graph.read import from_edges
from unirun.graph.values import Graph
from unirun.spec import JobSpec


def declared(spec: JobSpec) -> Graph:
    """The roles of `spec` and its edges; without any, a trainer calls each role of workloads. Raises `SpecError`."""
    edges = [*spec.edges]
    if not edges:
        trainers = (role.name for role in spec.roles if role.entry.kind == "trainer")
        workloads = [role.name for role in spec.roles if role.entry.kind == "workload"]
        edges = [{"from": trainer, "to": workload} for trainer in trainers for workload in workloads]
    return from_edges({role.name: role.count for role in spec.roles}, edges)
