"""The new places of ranks when nodes are lost, leave or come: ranks that need not move stay where they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from unirun.collocation import Assignment, Inventory, Placement, place_again
from unirun.collocation.graph import show_ranks
from unirun.errors import PlacementError
from unirun.failover.blast_radius import seen_graph
from unirun.failover.state import (
    ROLE_ENDS,
    ROLE_WORKS,
    JobPhase,
    JobState,
    RolePhase,
    RoleState,
    WorkerState,
    ties_of,
)
from unirun.spec.job import RoleSpec


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
    Ranks that are given up need no place; those that follow them have other numbers for the planner.
    """
    aside = {*aside, *state.draining}
    usable = {*state.without(gone), *gone, *state.placement.lost, *aside}
    nodes = tuple(node for node in state.inventory.nodes if node.name in usable)
    places = {
        name: _numbered(state, role, {*gone, *state.placement.lost, *aside})
        for name, role in state.roles.items()
        if role.phase not in ROLE_ENDS and not _is_given_up(state, role)
    }
    names = [name for name, found in places.items() if found]
    roles = tuple(_as_it_is(state, state.role_spec(name), len(places[name])) for name in names)
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
    _, found = place_again(
        replace(state.spec, roles=roles, **groups),
        Inventory(nodes),
        replace(
            state.placement, assignments=tuple(place for name in names for place in places[name].values())
        ),
        {*gone, *aside},
        ties=ties_of(graph),
    )
    return replace(
        found,
        assignments=tuple(_kept(state, found, places)),
        excluded=state.placement.excluded,
        lost=tuple(name for name in found.lost if name in gone or name in state.placement.lost),
    )


def _is_given_up(state: JobState, role: RoleState) -> bool:
    """Return True if the job goes on without an optional service, of which the last ranks are about to end."""
    optional = state.role_spec(role.name).optional
    return optional and role.phase is RolePhase.STOPPING and state.phase is JobPhase.RUNNING


def without_room(state: JobState, gone: Collection[str]) -> dict[str, list[int]]:
    """The ranks of optional services that the job can go on without when they have no other place, as theirs is on one
    of the nodes `gone`: in whatever phase the service is. That is all of a service whose ranks form a group, and of one
    that is placed with its least number of ranks."""
    found = {}
    for name, role in state.roles.items():
        spec = state.role_spec(name)
        # Those that are beside others always have a place.
        if spec.optional and spec.beside is None and role.phase not in (*ROLE_ENDS, RolePhase.STOPPING):
            places = state.placement.of_role(name)
            lost = [place.rank for place in places if place.node in gone and place.rank not in role.given_up]
            if lost:
                whole = not role.is_program or _may_shrink(state, spec)
                found[name] = [*range(len(role.workers))] if whole else lost
    return found


def _may_shrink(state: JobState, spec: RoleSpec) -> bool:
    """Return True if a role may go on with fewer ranks. Workloads keep their number once they run, because callers rely
    on it, unless they are elastic; so do services."""
    fixed = spec.restart == "process" and not spec.elastic and state.phase is not JobPhase.LAUNCHING
    return spec.least is not None and not fixed


def _numbered(state: JobState, role: RoleState, gone: Collection[str]) -> dict[int, Assignment]:
    """The places of a role by rank, with the numbers 0..n-1: those of all ranks but the ones that are given up and were
    on the nodes `gone`, and those that are one server with them. A role that may shrink has the numbers that it has."""
    spec, places = state.role_spec(role.name), state.placement.of_role(role.name)
    given_up = role.given_up if spec.optional and not _may_shrink(state, spec) else frozenset[int]()
    lost = [place.rank for place in places if place.rank in given_up and place.node in gone]
    out = {member for rank in lost for member in spec.members(rank)}
    left = [place for place in places if place.rank not in out]
    return {
        place.rank: place if place.rank == number else replace(place, rank=number)
        for number, place in enumerate(left)
    }


def _as_it_is(state: JobState, role: RoleSpec, count: int) -> RoleSpec:
    """The spec of a role with its current number of ranks, and the least that it can go on with.

    A role that has shrunk grows only when nodes come: the remaining ranks have taken over the work.
    """
    return replace(role, count=count, least=role.least if _may_shrink(state, role) else count)


def _kept(
    state: JobState, found: Placement, numbered: Mapping[str, Mapping[int, Assignment]]
) -> list[Assignment]:
    """The assignments of `found`, with the numbers that the ranks have; those before for all that it leaves out.

    An unchanged assignment is the same object, which makes writing the differences cheap.
    """
    places: list[Assignment] = []
    for role in state.roles.values():
        before, numbers = state.placement.of_role(role.name), numbered.get(role.name, {})
        there = found.of_role(role.name) if numbers else ()
        moved = {
            rank: place if place.rank == rank else replace(place, rank=rank)
            for rank, place in zip(numbers, there, strict=False)
        }
        for old in before:
            if old.rank in moved:
                places.append(old if moved[old.rank] == old else moved[old.rank])
            elif old.rank not in numbers:
                places.append(old)
        places += there[len(numbers) :]
    return places
