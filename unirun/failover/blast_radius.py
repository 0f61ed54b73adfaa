"""The job's graph as far as it is known, and who is affected when a part of the job fails."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from unirun.collocation.graph import (
    Affected,
    Graph,
    LearnedEdge,
    ProcessCalls,
    added,
    affected,
    declared,
    learn,
)
from unirun.failover.state import ROLE_WORKS, JobState, RolePhase


def learned(state: JobState) -> tuple[LearnedEdge, ...]:
    """The calls between roles that were observed so far."""
    callers = (
        ProcessCalls(role.name, worker.rank, added(worker.called, worker.calls))
        for role in state.roles.values()
        for worker in role.workers
        if worker.calls or worker.called
    )
    return learn(callers, state.sizes)


def unit_of(state: JobState, failed: Sequence[str]) -> tuple[Affected, ...]:
    """The roles and ranks that are affected when `failed` (roles or single ranks) fail."""
    return affected(seen_graph(state), failed)


def consequences(unit: Sequence[Affected]) -> str:
    """The callers and callees that wait while the failed ranks are away, in words; empty when none does."""
    return "; ".join(f"{each} {each.reason}" for each in unit if each.side in ("upstream", "downstream"))


def seen_graph(state: JobState) -> Graph:
    """The job's graph: the edges of the spec and those that were observed."""
    graph = declared(state.spec)
    edges = {(edge.source, edge.target, edge.invocation): edge for edge in graph.edges}
    for seen in learned(state):
        edge = seen.edge
        # An observed edge replaces the default edge from the trainer to every role, but not one of the spec.
        if not state.spec.edges:
            edges.pop((edge.source, edge.target, ""), None)
        edges.setdefault((edge.source, edge.target, edge.invocation), edge)
    # A role may have grown.
    sizes = state.sizes
    roles = tuple(replace(role, count=max(role.count, sizes[role.name])) for role in graph.roles)
    return replace(graph, roles=roles, edges=tuple(edges.values()))


def waiting(state: JobState) -> tuple[str, ...]:
    """The callers that are blocked because ranks are being restarted, in words."""
    missing = [
        f"{role.name}:{worker.rank}"
        for role in state.roles.values()
        if role.phase is RolePhase.RESTARTING or (role.phase in ROLE_WORKS and role.restarts)
        for worker in role.workers
        if not role.up(worker) and not worker.ended_well
    ]
    unit = unit_of(state, missing) if missing else ()
    return tuple(f"{each} {each.reason}" for each in unit if each.side == "upstream" and each.blocked)
