"""The job's graph as far as it is known, and who is affected when a part of the job fails."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from unirun.graph import Affected, Caller, Graph, LearnedEdge, added, affected, declared, learn
from unirun.job.state import ROLE_WORKS, JobState, RolePhase


def learned(state: JobState) -> tuple[LearnedEdge, ...]:
    """The calls between roles that were seen so far."""
    callers = (
        Caller(role.name, worker.rank, added(worker.called, worker.calls))
        for role in state.roles.values()
        for worker in role.workers
        if worker.calls or worker.called
    )
    return learn(callers, state.sizes)


def unit_of(state: JobState, failed: Sequence[str]) -> tuple[Affected, ...]:
    """Who is affected when `failed` fail, roles or single ranks: the unit of failover."""
    return affected(seen_graph(state), failed)


def consequences(unit: Sequence[Affected]) -> str:
    """What others feel while those that have failed are away, in words; empty when nobody does."""
    return "; ".join(f"{each} {each.reason}" for each in unit if each.side in ("upstream", "downstream"))


def seen_graph(state: JobState) -> Graph:
    """The job's graph: besides the edges that the spec has, those count that were seen."""
    graph = declared(state.spec)
    edges = {(edge.source, edge.target, edge.invocation): edge for edge in graph.edges}
    for seen in learned(state):
        edge = seen.edge
        # What was seen says more than that a trainer may call everybody, and less than the spec.
        if not state.spec.edges:
            edges.pop((edge.source, edge.target, ""), None)
        edges.setdefault((edge.source, edge.target, edge.invocation), edge)
    return replace(graph, edges=tuple(edges.values()))


def waiting(state: JobState) -> tuple[str, ...]:
    """Who can do nothing now, in words: those that wait for ranks which are being started again."""
    missing = [
        f"{role.name}:{worker.rank}"
        for role in state.roles.values()
        if role.phase is RolePhase.RESTARTING or (role.phase in ROLE_WORKS and role.restarts)
        for worker in role.workers
        if not role.up(worker) and not worker.ended_well
    ]
    unit = unit_of(state, missing) if missing else ()
    return tuple(f"{each} {each.reason}" for each in unit if each.side == "upstream" and each.blocked)
