"""The new places of ranks when nodes are lost, leave or come: ranks that need not move stay where they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from unirun.collocation import Assignment, Inventory, Placement, place_again
from unirun.errors import PlacementError
from unirun.failover.blast_radius import seen_graph
from unirun.graph import show_ranks
from unirun.job.state import ROLE_ENDS, ROLE_WORKS, JobPhase, JobState, RolePhase, RoleState, WorkerState
from unirun.job.ties import ties_of
from unirun.spec import RoleSpec


def place_without(state: JobState, gone: Collection[str]) -> Placement:
    """The next placement, without the nodes `gone`. Raises `PlacementError`.

    When every rank that was placed there has succeeded, the placement stays the same unless those ranks can be placed
    again without moving any other.
    """
    same = replace(state.placement, spares=tuple(name for name in state.placement.spares if name not in gone))
    here = [
        (role, worker)
        for role in state.roles.values()
        if role.phase not in ROLE_ENDS
        for worker, place in zip(role.workers, state.placement.of_role(role.name), strict=False)
        if place.node in gone
    ]
    if not here:
        return same
    if not all(_has_done_its_work(role, worker) for role, worker in here):
        return placed_again(state, gone)
    try:
        found = placed_again(state, gone)
    except PlacementError:
        return same
    moves = any(why_all_restart(role, state.placement, found) for role in state.roles.values())
    return same if moves else found


def why_all_restart(role: RoleState, before: Placement, after: Placement, gone: Collection[str] = ()) -> str:
    """The reason why all ranks of a role have to be started again, in words, though few are missing; empty
    when they have not.

    Ranks on the nodes `gone` are lost, or leave anyhow.
    """
    if role.phase not in ROLE_WORKS:
        # The role has ended, or all of its workers were told to end.
        return ""
    old, new = before.of_role(role.name), after.of_role(role.name)
    if len(new) > len(old):
        return f"{role.name} grows from {len(old)} to {len(new)} ranks"
    if len(new) < len(old):
        return f"{role.name} has room for {len(new)} of {len(old)} ranks"
    moving = [
        w.rank
        for w in role.live
        # Those that are not where they should be were told to end before.
        if w.node not in gone and _is_at(w, old[w.rank]) and not _is_at(w, new[w.rank])
    ]
    return f"{role.name}:{show_ranks(moving)} make room for others" if moving else ""


def _is_at(worker: WorkerState, place: Assignment) -> bool:
    return (worker.node, worker.own) == (place.node, place.own)


def moves(before: Placement, after: Placement) -> list[tuple[str, str]]:
    """The moves as (who, text); ranks of one role with the same source and target are one move."""
    ways: dict[tuple[str, str, str], list[int]] = {}
    for name in dict.fromkeys(place.role for place in after.assignments):
        for old, new in zip(before.of_role(name), after.of_role(name), strict=False):
            if old.node != new.node:
                ways.setdefault((name, old.node, new.node), []).append(new.rank)
    return [
        (f"{role}:{show_ranks(ranks)}", f"{role}:{show_ranks(ranks)} from {old} to {new}")
        for (role, old, new), ranks in ways.items()
    ]


def _has_done_its_work(role: RoleState, worker: WorkerState) -> bool:
    """Return True if `worker` has succeeded and is not needed for a generation that is already decided."""
    formed = role.opened == role.generation or worker.generation == role.generation
    return worker.ended_well and formed and role.phase is not RolePhase.RESTARTING


def placed_again(
    state: JobState,
    gone: Collection[str],
    *,
    aside: Collection[str] = (),
    most: Mapping[str, int] = MappingProxyType({}),
) -> Placement:
    """All roles that have not ended, without the nodes `gone`; the others leave their slots to them. Raises
    `PlacementError`.

    Nodes that are draining, or `aside`, get no ranks either. The roles in `most` may get as many ranks as it says.
    """
    aside = {*aside, *state.draining}
    usable = {*state.without(gone), *gone, *state.placement.lost, *aside}
    nodes = tuple(node for node in state.inventory.nodes if node.name in usable)
    names = [name for name, role in state.roles.items() if role.phase not in ROLE_ENDS]
    roles = tuple(_as_it_is(state, state.role_spec(name)) for name in names)
    roles = tuple(
        replace(role, least=role.count, count=most.get(role.name, role.count)) if most else role
        for role in roles
    )
    groups = {
        key: tuple(left for group in groups if len(left := tuple(n for n in group if n in names)) > 1)
        for key, groups in state.spec.groups.items()
    }
    graph = seen_graph(state)
    graph = replace(
        graph,
        roles=tuple(role for role in graph.roles if role.name in names),
        edges=tuple(edge for edge in graph.edges if edge.source in names and edge.target in names),
    )
    places = tuple(place for name in names for place in state.placement.of_role(name))
    _, found = place_again(
        replace(state.spec, roles=roles, **groups),
        Inventory(nodes),
        replace(state.placement, assignments=places),
        {*gone, *aside},
        ties=ties_of(graph),
    )
    return replace(
        found,
        assignments=tuple(_kept(state, found)),
        excluded=state.placement.excluded,
        lost=tuple(name for name in found.lost if name in gone or name in state.placement.lost),
    )


def _as_it_is(state: JobState, role: RoleSpec) -> RoleSpec:
    """The spec of a role with its current number of ranks, and the least that it can go on with.

    A role that has shrunk grows only when nodes come: the remaining ranks have taken over the work. Workloads keep
    their number once they run, because callers rely on it, unless they are elastic.
    """
    count = len(state.placement.of_role(role.name))
    fixed = role.restart == "process" and not role.elastic and state.phase is not JobPhase.LAUNCHING
    return replace(role, count=count, least=count if fixed else role.least)


def _kept(state: JobState, found: Placement) -> list[Assignment]:
    """The assignments of `found`, and for roles that have ended those before.

    An unchanged assignment is the same object, which makes writing the differences cheap.
    """
    places: list[Assignment] = []
    for role in state.roles.values():
        before = state.placement.of_role(role.name)
        if role.phase in ROLE_ENDS:
            places += before
        else:
            there = found.of_role(role.name)
            places += [old if new == old else new for new, old in zip(there, before, strict=False)]
            places += there[len(before) :]
    return places
