"""The views of the job that workers and visitors get: the view of all roles, or its changes since the last
one, and the part of the spec that concerns them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from unirun.failover.state import JobState, RoleState, SentView, WorkerPhase, WorkerState
from unirun.spec.job import JobSpec
from unirun.values import RankAddress
from unirun.wire.messages import FIRST, ChannelBrief, RoleBrief, RoleView, View, Welcome, WorkerView, whole


def whole_view(state: JobState, number: int) -> View:
    """The whole view. Workers that are as at the start of the job are left out.

    The generation of a role is that whose store is there.
    """
    roles = (
        _role_view(role, endpoint(state, name), [worker for worker in role.workers if _seen(worker) != FIRST])
        for name, role in state.roles.items()
    )
    return View(tuple(roles), number)


def news_of(state: JobState, told: SentView) -> tuple[RoleView, ...]:
    """The roles that have changed since the view `told`, each with the workers that have changed."""
    endpoints = endpoints_of(state)
    found = []
    for name, role in state.roles.items():
        before = told.roles[name]
        if before is role and told.endpoints[name] == endpoints[name]:
            continue
        pairs = role.workers.since(before.workers)
        changed = [now for was, now in pairs if was is None or _seen(was) != _seen(now)]
        if changed or _head(before, told.endpoints[name]) != _head(role, endpoints[name]):
            found.append(_role_view(role, endpoints[name], changed))
    return tuple(found)


def endpoints_of(state: JobState) -> Mapping[str, str]:
    """The address of the store of each role."""
    return {name: endpoint(state, name) for name in state.roles}


def endpoint(state: JobState, role: str) -> str:
    """The address of the role's store: at the node of its rank 0. Empty when that node is not there, and for a role
    of programs, which has none."""
    agent = state.agents.get(leader(state, role))
    return agent.endpoints.get(role, "") if agent else ""


def leader(state: JobState, role: str) -> str:
    """The node of the role's rank 0."""
    return state.placement.of_role(role)[0].node


def _role_view(role: RoleState, endpoint: str, workers: Iterable[WorkerState]) -> RoleView:
    return RoleView(
        role.name,
        *_head(role, endpoint),
        workers=tuple(WorkerView(worker.rank, *_seen(worker)) for worker in workers),
    )


def _head(role: RoleState, endpoint: str) -> tuple[int, int, str, str]:
    return len(role.workers), role.opened, endpoint, role.phase.value


def _seen(worker: WorkerState) -> tuple[int, str, dict[str, str], RankAddress | None]:
    return worker.incarnation, _phase(worker), dict(worker.addresses), worker.place


def _phase(worker: WorkerState) -> str:
    match worker.phase:
        case WorkerPhase.RUNNING | WorkerPhase.SERVING:
            return worker.phase.value
        case WorkerPhase.EXITED:
            return "ended" if worker.exit is not None and worker.exit.ok else "lost"
        case _:
            return "starting"


def welcome(view: View, spec: JobSpec) -> Welcome:
    """The answer to a worker's `Hello`, and to a visitor."""
    briefs = (
        RoleBrief(
            *(role.name, role.entry.kind, role.entry.target, role.count, role.per_node, role.restart),
            role.ports,
            role.group or 1,
        )
        for role in spec.roles
    )
    return Welcome(
        view=whole(view),
        config=json.dumps(dict(spec.config)),
        name=spec.name,
        roles=tuple(briefs),
        collocations=spec.collocations,
        call_timeout=spec.call_timeout,
        transport=spec.transport,
        channels=tuple(ChannelBrief(c.name, c.publisher, c.receivers) for c in spec.channels),
    )


def addresses_of(view: View, spec: JobSpec) -> dict[str, list[dict[str, Any]]]:
    """The addresses in `view`, by role in rank order, for the file that programs read. A rank is `ready` when its probe
    says so; without one, when it runs."""
    roles = {role.name: role for role in spec.roles if role.ports}
    return {
        role.name: [
            {
                "rank": worker.rank,
                "incarnation": worker.incarnation,
                "host": worker.place.host,
                "ports": dict(zip(roles[role.name].ports, worker.place.ports, strict=True)),
                "addr": worker.place.addr(),
                "ready": worker.phase == ("serving" if roles[role.name].ready else "running"),
            }
            for worker in role.workers
            if worker.place is not None and roles[role.name].head(worker.rank) == worker.rank
        ]
        for role in view.roles
        if role.name in roles
    }
