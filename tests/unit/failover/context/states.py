"""States of jobs, and the part of them that is kept in a store."""

from __future__ import annotations

from msgspec.structs import replace

from unirun.collocation import Assignment, Placement
from unirun.failover.state import JobState, Ranks, new_job
from unirun.spec.job import Entry, JobSpec, RoleSpec


def kept(state: JobState) -> JobState:
    """The part of `state` that is kept: all but metrics, and what a new master sets itself."""
    roles = {
        name: replace(
            role,
            workers=Ranks(replace(w, metrics={}) for w in role.workers),
        )
        for name, role in state.roles.items()
    }
    return replace(
        state,
        roles=roles,
        view_due=False,
        away=frozenset(),
        told=None,
        uninformed=frozenset(),
        looked={},
        recorded=0,
        losses={},
    )


def many(ranks: int, nodes: int, roles: int = 1, cpus: tuple[int, ...] | None = None) -> JobState:
    """A job whose ranks are spread over its nodes."""
    each = ranks // roles
    names = [f"role{number}" for number in range(roles)]
    spec = JobSpec(
        "job", "job-1", tuple(RoleSpec(n, each, Entry("script", "a.py")) for n in names), tuple(names)
    )
    places = tuple(
        Assignment(name, rank, f"node-{rank % nodes:05}.cluster.example", rank // nodes, 0, ("0", "1"), cpus)
        for name in names
        for rank in range(each)
    )
    return new_job(spec, Placement(places, ""), started=1.0, logs="/logs")
