"""The move of ranks to other nodes: what each role does about it, and the orders that follow.

The unit of that is what the graph calls affected (`unirun.collocation.graph.affected`): ranks that failed or leave are
started elsewhere; their peers form the next generation with them, in place or started again, as their role's level
says; who calls them or is called by them, over however many roles, goes on, and is told.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from msgspec.structs import replace

from unirun.collocation import Assignment, Inventory, Placement, place_again
from unirun.errors import EXIT_PLACEMENT, PlacementError
from unirun.failover.draft import JobDraft, ToWatchers, leader
from unirun.failover.generations import form_if_all_are_there, obstructed, order_store
from unirun.failover.phases import PhaseEvent
from unirun.failover.policy import (
    Decision,
    Loss,
    budget_of_job,
    consequences,
    decide_in,
    seen_graph,
    unit_of,
    with_payment,
)
from unirun.failover.restart_or_end import advance, delay, end_job, restart, restart_all
from unirun.failover.state import (
    NEVER,
    ROLE_ENDS,
    ROLE_WORKS,
    JobPhase,
    JobState,
    Ranks,
    RolePhase,
    RoleState,
    WorkerState,
    ties_of,
    waiting,
)
from unirun.spec.job import RoleSpec
from unirun.values import Value, WorkerId, show_ranks
from unirun.wire.reports import Notice

# The new places of ranks when nodes are lost, leave or come: ranks that need not move stay where they are.


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


def why_all_restart(
    role: RoleState,
    before: Placement,
    after: Placement,
    gone: Collection[str] = (),
    *,
    boundary: bool = False,
) -> str:
    """The reason why all ranks of a role have to be started again, in words, though few are missing; empty
    when they have not.

    Ranks on the nodes `gone` are lost, or leave anyhow. At a `boundary`, roles grow in place.
    """
    if role.phase not in ROLE_WORKS:
        # The role has ended, or all of its workers were told to end.
        return ""
    old, new = before.of_role(role.name), after.of_role(role.name)
    if len(new) > len(old) and not boundary:
        return f"{role.name} grows from {len(old)} to {len(new)} ranks"
    if len(new) < len(old):
        return f"{role.name} has room for {len(new)} of {len(old)} ranks"
    moving = [
        w.rank for w in role.live if w.node not in gone and not w.leaving and not _is_at(w, new[w.rank])
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
    leaving: Sequence[Assignment] = (),
) -> Placement:
    """All roles that have not ended, without the nodes `gone`; the others leave their slots to them. Raises
    `PlacementError`.

    Ranks at the places `leaving` move. Nodes that are draining, or `aside`, get no ranks either, and tainted ones no
    more than they have, if there is room elsewhere. The roles in `most` may get as many ranks as it says.
    Ranks that are given up need no place; those that follow them have other numbers for the planner.
    """
    if state.tainted:
        with suppress(PlacementError):
            return _placed(state, gone, aside, most, closed=state.tainted, leaving=leaving)
    return _placed(state, gone, aside, most, leaving=leaving)


def place_elsewhere(state: JobState, name: str, rank: int) -> Placement | None:
    """The placement in which this rank is on another node, and all others are where they are; None if there is none.

    A role that restarts as a whole may leave the node with all of its ranks there, if one alone cannot (``per_node``),
    or if the node is sick.
    """
    places, spec = state.placement.of_role(name), state.role_spec(name)
    if not state.inventory.nodes or spec.beside is not None:
        return None
    node, role = places[rank].node, state.roles[name]
    ways = [[places[rank]]]
    if not role.in_place:
        ways.append([place for place in places if place.node == node])
        if node in state.sick:
            ways.reverse()
    return next(filter(None, (_without_others(state, leaving) for leaving in ways)), None)


def _without_others(state: JobState, leaving: Sequence[Assignment]) -> Placement | None:
    """The placement in which the ranks at these places of a node are on others; None if further ranks had to move."""
    try:
        found = _placed(state, closed=(*state.tainted, leaving[0].node), leaving=leaving)
    except PlacementError:
        return None
    before, after = state.placement.assignments, found.assignments
    moved = [
        old for old, new in zip(before, after, strict=False) if (old.node, old.own) != (new.node, new.own)
    ]
    return found if len(before) == len(after) and moved == [*leaving] else None


def _placed(
    state: JobState,
    gone: Collection[str] = (),
    aside: Collection[str] = (),
    most: Mapping[str, int] = MappingProxyType({}),
    *,
    closed: Collection[str] = (),
    leaving: Sequence[Assignment] = (),
) -> Placement:
    """As `placed_again`, with no more ranks on `closed` nodes, and the ranks at the places `leaving` elsewhere. Raises
    `PlacementError`."""
    aside = {*aside, *state.draining}
    usable = {*state.without(gone), *gone, *state.placement.lost, *aside}
    nodes = tuple(node for node in state.inventory.nodes if node.name in usable)
    places = {
        name: _numbered(state, role, {*gone, *state.placement.lost, *aside})
        for name, role in state.roles.items()
        if role.phase not in ROLE_ENDS and not _is_given_up(state, role)
    }
    for place in leaving:
        places[place.role][place.rank] = replace(place, node="")
    names = [name for name, found in places.items() if found]
    roles = tuple(_as_it_is(state, state.role_spec(name), len(places[name])) for name in names)
    roles = tuple(
        replace(role, least=role.count, count=most.get(role.name, role.count)) if most or leaving else role
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
        closed=closed,
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


class Cause(Value):
    """The cause of a move of ranks.

    `nodes` are lost, leave on request (`asked`), or have joined (`come`), at `time` (seconds since the epoch); the
    `reason` in words. The role that grows is at a `boundary`: its ranks keep their memory.
    """

    nodes: tuple[str, ...]
    reason: str
    time: float
    asked: bool = False
    come: bool = False
    boundary: bool = False

    @property
    def gone(self) -> tuple[str, ...]:
        """The nodes that can have no ranks."""
        return () if self.come else self.nodes


def named(nodes: Sequence[str]) -> str:
    """``n1, n2``; for more than three nodes the first one and a count."""
    return ", ".join(nodes) if len(nodes) <= 3 else f"{nodes[0]} and {len(nodes) - 1} other nodes"


class Relocation(Value):
    """A new placement, what each role with a decision does, and why `whole` roles restart. `told` is for people, and
    `missing` are the ranks that have to start elsewhere."""

    placement: Placement
    decisions: Mapping[str, Decision]
    whole: Mapping[str, str]
    told: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]


def end_of(decisions: Mapping[str, Decision]) -> Decision | None:
    """The decision that ends the job, if there is one."""
    return next((each for each in decisions.values() if each.action == "end_job"), None)


def decide_missing(
    before: JobState, state: JobState, cause: Cause
) -> tuple[tuple[str, ...], dict[str, Decision]]:
    """The ranks that have to start elsewhere, and the decision about each role that has some."""
    missing = tuple(f"{name}:{rank}" for name, rank in _missing(before, state, cause.gone))
    decisions = {
        each.role: _decide_missing(before, state, each.role, each.ranks, cause)
        for each in unit_of(state, missing)
        if each.side == "failed"
    }
    return missing, decisions


def relocation_to(
    before: JobState,
    state: JobState,
    placement: Placement,
    cause: Cause,
    missing: tuple[str, ...],
    decisions: Mapping[str, Decision],
) -> Relocation:
    """The consequences of the new `placement`, given the `decisions` about roles with ranks that are `missing`."""
    decisions = dict(decisions)
    whole = {
        role.name: why_all_restart(role, before.placement, placement, cause.gone, boundary=cause.boundary)
        for role in state.roles.values()
    }
    told = [(name, decision.reason) for name, decision in decisions.items()]
    told += [(name, f"{whole[name]}, so all of them start again") for name in decisions if whole[name]]
    for name, why in whole.items():
        if why and name not in decisions:
            ranks = range(len(state.roles[name].workers))
            because = replace(cause, reason=f"{cause.reason}; {why}")
            decisions[name] = _decide(state, name, ranks, because, together=True)
            told.append((name, decisions[name].reason))
        elif name not in decisions and (more := _grows_in_place(state.roles[name], placement)):
            decisions[name] = Decision("restart_worker", f"{cause.reason}; {more}", free=True)
            told.append((name, decisions[name].reason))
    return Relocation(placement, decisions, whole, tuple(told), missing)


def _grows_in_place(role: RoleState, placement: Placement) -> str:
    """The growth of a role whose ranks keep their memory, in words; empty if it does not grow."""
    old, new = len(role.workers), len(placement.of_role(role.name))
    if not (role.phase in ROLE_WORKS and new > old):
        return ""
    return f"{role.name} grows from {old} to {new} ranks, and those that it has keep their memory"


def relocate(draft: JobDraft, before: JobState, cause: Cause, found: Relocation) -> None:
    """Take over the new placement, and do what each role does about it."""
    decisions, whole = found.decisions, found.whole
    draft.put(replace(draft.state, placement=found.placement))
    gone = any(worker.node in cause.gone for role in before.roles.values() for worker in role.live)
    unaffected = f"{cause.reason}; the job goes on without it{'' if gone else ', as no rank ran there'}"
    told = found.told or [("", unaffected)]
    lost, causes = draft.cause, _tell(draft, before.placement, cause, told)
    moved = [name for name in decisions if whole[name]]
    if waits := consequences(unit_of(draft.state, [*found.missing, *moved])):
        draft.record("affected", waits)
    for name in draft.state.roles:
        # A role that grows is about to form its next generation, and starts the new ranks with that.
        draft.put(_grown(draft.role(name), found.placement))
    job = [name for name, decision in decisions.items() if decision.action == "restart_job"]
    works = {name for name, role in draft.state.roles.items() if role.phase in ROLE_WORKS}
    if job:
        draft.cause = causes.get(job[0], lost)
        restart_job(draft)
    for name in draft.state.roles:
        draft.cause = causes.get(name, lost)
        if job and name in works:
            continue
        if name in decisions:
            action = "restart_role" if whole[name] else decisions[name].action
            restart(draft, name, replace(decisions[name], action=action))
        else:
            _go_on_without_decision(draft, before, name)
        _let_go(draft, name)


def restart_job(draft: JobDraft) -> None:
    """Restart every role but those that the job goes on without. Those that have succeeded may be beyond a step that
    the others go back to. Each waits for the roles in its ``after``, as at its first start."""
    state, now = draft.state, draft.now
    budget = budget_of_job(state, now)
    paid, commits = with_payment(state.paid, now, budget.limit), replace(state.commits, pending=())
    draft.put(replace(state, restarts=state.restarts + 1, paid=paid, commits=commits))
    if commits.step >= 0:
        text = f"the job goes back to step {commits.step}, which all of {', '.join(commits.roles)} have"
        draft.record("restart", text, *commits.roles)
        draft.send(ToWatchers(Notice("job", text)))
    done = [role.name for role in state.roles.values() if role.phase is RolePhase.SUCCEEDED]
    for name in done:
        draft.put(replace(draft.role(name), phase=RolePhase.RESTARTING), PhaseEvent.ROLE_RESTARTS)
    if done and not _make_room(draft, done):
        return
    works = [role.name for role in state.roles.values() if role.phase in ROLE_WORKS]
    for name in state.roles:
        if draft.role(name).phase in (*ROLE_WORKS, RolePhase.RESTARTING):
            delay(draft, name, budget.back_off, with_job=True)
        if name in works:
            restart_all(draft, draft.role(name))
        elif name in done:
            advance(draft, name)


def _make_room(draft: JobDraft, names: Collection[str]) -> bool:
    """Place those ranks of the roles `names` again which have no place any more. If they fit nowhere, end the job."""
    before, taken = draft.state.placement, _taken(draft.state, names)
    if not taken:
        return True
    try:
        placement = placed_again(draft.state, (), leaving=taken)
    except PlacementError as error:
        reason = f"{', '.join(names)} cannot start again with the job: {error}"
        end_job(draft, Decision("end_job", reason), EXIT_PLACEMENT, by_failure=False)
        return False
    draft.put(replace(draft.state, placement=placement))
    for who, text in moves(before, placement):
        tell_move(draft, who, text)
    return True


def _taken(state: JobState, names: Collection[str]) -> list[Assignment]:
    """The places of the roles `names` on nodes that are gone, or with slots that other roles have got which do not
    share theirs."""
    if not state.inventory.nodes:
        return []
    nodes, found = state.without(()), list[Assignment]()
    together = {(one, other) for group in state.spec.collocations for one in group for other in group}
    holders: dict[tuple[str, str], str] = {}
    for name in sorted(state.roles, key=lambda name: name in names):
        for place in state.placement.of_role(name) if state.roles[name].phase not in ROLE_ENDS else ():
            slots = [(place.node, slot) for slot in place.own]
            others = {holders.get(slot, name) for slot in slots} - {name}
            if name in names and (
                place.node not in nodes or any((name, each) not in together for each in others)
            ):
                found.append(place)
            else:
                holders.update(dict.fromkeys(slots, name))
    return found


def move_rank(draft: JobDraft, who: WorkerId, why: str) -> None:
    """Start a rank on another node, and its peers with it as its role's level says. Nothing has failed, so it costs no
    restart. Without room elsewhere, and while the job recovers, nothing changes."""
    before, role = draft.state, draft.role(who.role)
    settled = before.phase is JobPhase.RUNNING and role.phase is RolePhase.RUNNING
    if not settled or before.away or before.losses:
        return
    placement = place_elsewhere(before, who.role, who.rank)
    if placement is None:
        draft.record("decision", f"{why}; no other node has room for it", str(who))
        return
    cause = Cause((role.workers[who.rank].node,), why, draft.now, asked=True)
    decision = _decide(before, who.role, [who.rank], cause, elsewhere=True)
    if decision.action == "end_job":
        draft.record("decision", f"it stays where it is: {decision.reason}", str(who))
        return
    missing = (f"{who.role}:{who.rank}",)
    relocate(
        draft, before, cause, relocation_to(before, before, placement, cause, missing, {who.role: decision})
    )
    draft.tell_now()


def begin(draft: JobDraft, placement: Placement, cause: Cause) -> None:
    """Take over the new placement of a job that has not started yet."""
    before = draft.state
    roles = {
        name: replace(role, workers=waiting(placement, name, role.workers))
        if role.phase is RolePhase.WAITING
        else role
        for name, role in before.roles.items()
    }
    draft.put(replace(before, placement=placement, roles=roles))
    reason = f"{cause.reason}; the job goes on without it, as no rank ran there"
    _tell(draft, before.placement, cause, [("", reason)])
    form_if_all_are_there(draft)


def _missing(before: JobState, after: JobState, gone: Collection[str]) -> Iterator[tuple[str, int]]:
    """The ranks that cannot start, or go on, where they are: workers that are lost or leave, or all of a node that had
    the role's store; and ranks of programs that have yet to start there.

    A role that is already about to form a generation starts them with it.
    """
    for name, role in after.roles.items():
        if role.phase not in ROLE_WORKS or role.opened < role.generation:
            continue
        nodes = [place.node for place in after.placement.of_role(name)] if role.is_program else []
        starts = {rank for rank, node in enumerate(nodes) if node in gone}
        here = [worker for worker in role.workers if worker.node in gone or worker.rank in starts]
        missing = [worker.rank for worker in here if not worker.ended_well and worker.due != NEVER]
        if not missing and _loses_its_store(before, role, gone):
            missing = [worker.rank for worker in here]
        yield from ((name, rank) for rank in missing)


def _loses_its_store(before: JobState, role: RoleState, gone: Collection[str]) -> bool:
    """Return True if the survivors have lost the store in which they meet. Where a rank has succeeded and
    workers restart alone, they do not need it (as in `worker_failure.store_ended`)."""
    if role.is_program or leader(before, role.name) not in gone:
        return False
    return bool(role.living) and not (
        role.restart == "process" and any(worker.ended_well for worker in role.workers)
    )


def _decide_missing(
    before: JobState, state: JobState, name: str, ranks: Sequence[int], cause: Cause
) -> Decision:
    """The decision about ranks that have to start elsewhere. A program that did not run there has lost nothing, and
    moves at no cost."""
    role, lost = before.roles[name], ranks
    if role.is_program:
        lost = [rank for rank in ranks if role.workers[rank].live and role.workers[rank].node in cause.gone]
    if not lost:
        return _decide(state, name, ranks, replace(cause, asked=True), elsewhere=True)
    return _decide(state, name, lost, cause, elsewhere=True)


def _decide(
    state: JobState,
    name: str,
    ranks: Sequence[int],
    cause: Cause,
    *,
    elsewhere: bool = False,
    together: bool = False,
) -> Decision:
    """The decision when `ranks` of a role are lost or have to leave. They are recoverable when all have said so."""
    role = state.roles[name]
    said = {role.workers[rank].recoverable for rank in ranks}
    recoverable = False if False in said else None if None in said else True
    loss = Loss(
        cause.reason,
        name,
        show_ranks(ranks),
        recoverable,
        elsewhere=elsewhere,
        together=together,
        asked=cause.asked or cause.come,
        leaving=sum(role.workers[rank].live for rank in ranks),
    )
    return decide_in(state, loss, cause.time, ranks)


def _grown(role: RoleState, placement: Placement) -> RoleState:
    """The role with workers for all of its places."""
    more = placement.of_role(role.name)[len(role.workers) :]
    if not more:
        return role
    workers = (WorkerState(place.rank, place.node, own=place.own) for place in more)
    return replace(role, workers=Ranks((*role.workers, *workers)))


def _let_go(draft: JobDraft, name: str) -> None:
    """Order the end of workers whose ranks go elsewhere while their role lives on."""
    role = draft.state.roles[name]
    if role.phase not in ROLE_WORKS:
        return
    leaving = [worker for worker in role.live if draft.state.misplaced(role, worker)]
    for worker in leaving:
        draft.put_worker(name, replace(worker, leaving=True))
    ranks = {worker.rank for worker in leaving}
    draft.stop(name, signal.SIGTERM, draft.state.spec.shutdown_timeout, ranks=ranks)


def _go_on_without_decision(draft: JobDraft, before: JobState, name: str) -> None:
    """Do what is due in a role that has lost nothing, or that forms a generation anyhow."""
    role = draft.role(name)
    if role.forming:
        moved = leader(before, name) != leader(draft.state, name)
        if moved or obstructed(before, before.roles[name]):
            # Its store was ordered on a lost node, or had to wait for a misplaced worker that is gone now.
            order_store(draft, name)
    elif before.roles[name].living and (role.phase not in ROLE_WORKS or role.has_done_its_work):
        # The last of its workers is gone; of a role that works, one that the job goes on without.
        advance(draft, name)


def _tell(
    draft: JobDraft, before: Placement, cause: Cause, decisions: Sequence[tuple[str, str]]
) -> dict[str, str]:
    """Report what was decided about each role. Returns the ids of these events by role."""
    lost, events = draft.cause, {}
    for name, text in decisions:
        draft.cause = lost
        draft.record("decision", text, *filter(None, [name]))
        draft.send(ToWatchers(Notice(named(cause.nodes), text)))
        events[name] = draft.cause
    for who, text in moves(before, draft.state.placement):
        draft.cause = events.get(who.partition(":")[0], lost)
        tell_move(draft, who, text)
    return events


def tell_move(draft: JobDraft, who: str, text: str) -> None:
    """Report that ranks have another place."""
    draft.record("move", text, who)
    draft.send(ToWatchers(Notice("placement", text)))
