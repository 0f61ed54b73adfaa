"""What follows when nodes are gone: their ranks are placed anew, those that need not move stay where they are.

The unit of that is what the graph calls affected (`unirun.graph.affected`): ranks that failed are started elsewhere;
their peers form the next generation with them, in place or started again, as their role's level says; who calls them or
is called by them, over however many roles, goes on, and is told.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec.structs import replace

from unirun.collocation import Assignment, Inventory, Placement, place_again
from unirun.errors import EXIT_BUDGET, EXIT_PLACEMENT, PlacementError
from unirun.failover.blast_radius import consequences, seen_graph, unit_of
from unirun.failover.ending import advance, stop_all
from unirun.failover.policy import Circumstances, Decision, decide_to_make_room, decide_without_node
from unirun.failover.worker_failure import circumstances, failure_of
from unirun.graph import spans
from unirun.job.events import ToWatchers
from unirun.job.failures import Exit, Failure
from unirun.job.generations import form_if_all_are_there, form_next, obstructed, order_store
from unirun.job.state import (
    ROLE_ENDS,
    ROLE_WORKS,
    JobPhase,
    JobState,
    RolePhase,
    RoleState,
    Verdict,
    WorkerState,
    waiting,
)
from unirun.job.ties import ties_of
from unirun.job.transition import Transition, leader
from unirun.spec import RoleSpec
from unirun.wire.reports import Notice, WorkerExited

KILLED = 128 + signal.SIGKILL
"""The exit code of a job whose nodes are gone."""


def nodes_lost(transition: Transition, nodes: Mapping[str, str]) -> None:
    """`nodes`, each with the reason, are gone. Workers never outlive their agent, so those of them are gone too."""
    nodes = {node: why for node, why in nodes.items() if not transition.state.given_up(node)}
    if not nodes:
        return
    for node, why in nodes.items():
        transition.record("agent_lost", f"{node}: {why}")
    before = transition.state
    reason = _reason(nodes)
    failures = _fall(transition, nodes, reason)
    transition.state = _without(transition.state, nodes.keys())
    transition.tell_now()
    if transition.state.phase is JobPhase.STOPPING:
        for role in list(transition.state.roles.values()):
            advance(transition, role)
    elif transition.state.without(nodes):
        _go_on(transition, before, nodes.keys(), reason, failures)
    else:
        transition.state = transition.state.with_failures(
            *(replace(each, decision="the job ends") for each in failures)
        )
        _end(transition, Verdict(JobPhase.FAILED, KILLED, reason, by_failure=bool(failures)))


def begin_without(transition: Transition, gone: Collection[str], reason: str) -> bool:
    """Begin on the nodes that have joined, without `gone`, which have not. False when there is no room for that."""
    state = _without(transition.state, gone)
    if not state.without(gone):
        return False
    try:
        placement = _placement(state, gone)
    except PlacementError:
        return False
    transition.state = state
    _begin(transition, placement, gone, reason)
    return True


def _placement(state: JobState, gone: Collection[str]) -> Placement:
    """The next placement, without the nodes `gone`. Raises `PlacementError`.

    Where nobody has a place on them who has still something to do, it is the same: those who have done their work there
    are placed anew only if that costs nobody anything.
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
        return _placed_again(state, gone)
    try:
        found = _placed_again(state, gone)
    except PlacementError:
        return same
    moves = any(_as_others_move(role, state.placement, found) for role in state.roles.values())
    return same if moves else found


def _has_done_its_work(role: RoleState, worker: WorkerState) -> bool:
    """Whether `worker` has ended well, and will not be started again for a generation that is decided."""
    formed = role.opened == role.generation or worker.generation == role.generation
    return worker.ended_well and formed and role.phase is not RolePhase.RESTARTING


def _placed_again(state: JobState, gone: Collection[str]) -> Placement:
    """All roles that have not ended, without the nodes `gone`. Raises `PlacementError`."""
    usable = {*state.without(gone), *gone, *state.placement.lost}
    nodes = tuple(node for node in state.inventory.nodes if node.name in usable)
    roles = tuple(_as_it_is(state, role) for role in state.spec.roles)
    _, found = place_again(
        replace(state.spec, roles=roles),
        Inventory(nodes),
        state.placement,
        gone,
        ties=ties_of(seen_graph(state)),
    )
    return replace(found, assignments=tuple(_kept(state, found)), excluded=state.placement.excluded)


def _as_it_is(state: JobState, role: RoleSpec) -> RoleSpec:
    """The role with as many ranks as it has now, and the fewest that it can go on with.

    It never gets back what it has lost of its ranks: those that are there have its work by now. Workloads keep their
    number once they run, as their callers hold on to it.
    """
    count = len(state.placement.of_role(role.name))
    fixed = role.restart == "process" and state.phase is not JobPhase.LAUNCHING
    return replace(role, count=count, least=count if fixed else role.least)


def _kept(state: JobState, found: Placement) -> list[Assignment]:
    """What `found` says; of roles that have ended, where they were. Who stays has the same assignment as before, which
    is seen at once when that is written."""
    places: list[Assignment] = []
    for role in state.roles.values():
        before = state.placement.of_role(role.name)
        if role.phase in ROLE_ENDS:
            places += before
        else:
            for new, old in zip(found.of_role(role.name), before, strict=False):
                places.append(old if new == old else new)
    return places


def _without(state: JobState, gone: Collection[str]) -> JobState:
    """`gone` are given up: should their agents come back, they are sent away."""
    return replace(
        state,
        agents={node: agent for node, agent in state.agents.items() if node not in gone},
        away=state.away - {*gone},
        placement=replace(
            state.placement,
            lost=tuple(name for name in state.nodes if name in gone or name in state.placement.lost),
        ),
    )


def _reason(nodes: Mapping[str, str]) -> str:
    first = next(iter(nodes))
    if len(nodes) == 1:
        return f"the agent of node {first} is gone: {nodes[first]}"
    return f"the agents of {_named(nodes)} are gone: {nodes[first]}"


def _named(nodes: Collection[str]) -> str:
    """``n1, n2``; of many nodes the first and how many."""
    some = list(nodes)
    return ", ".join(some) if len(some) <= 3 else f"{some[0]} and {len(some) - 1} other nodes"


def _fall(transition: Transition, nodes: Collection[str], reason: str) -> list[Failure]:
    """End the workers of `nodes`, and say so of each."""
    killed = Exit(signal=signal.SIGKILL)
    failures: list[Failure] = []
    for role in list(transition.state.roles.values()):
        fallen = {worker.rank: worker for worker in role.live if worker.node in nodes}
        for worker in fallen.values():
            who = role.name, worker.rank, worker.incarnation
            end = WorkerExited(*who, transition.now, None, killed.signal, note=reason)
            failures.append(failure_of(transition.state, role, worker, end, killed))
        if fallen:
            workers = tuple(w.ended(killed) if w.rank in fallen else w for w in role.workers)
            transition.put(replace(role, workers=workers))
    return failures


def _go_on(
    transition: Transition, before: JobState, gone: Collection[str], reason: str, failures: Sequence[Failure]
) -> None:
    """Place what was on the nodes `gone` elsewhere, or end the job."""
    missing = [f"{name}:{rank}" for name, rank in _missing(before, transition.state, gone)]
    decisions = {
        each.role: decide_without_node(
            each.role, spans(each.ranks), reason, _circumstances(transition.state, each.role, each.ranks)
        )
        for each in unit_of(transition.state, missing)
        if each.side == "failed"
    }
    transition.state = transition.state.with_failures(
        *(
            replace(each, decision=decisions[each.role].reason if each.role in decisions else reason)
            for each in failures
        )
    )
    if _ends(transition, decisions, by_failure=bool(failures)):
        return
    try:
        placement = _placement(transition.state, gone)
    except PlacementError as error:
        verdict = Verdict(JobPhase.FAILED, EXIT_PLACEMENT, f"{reason}; its ranks fit nowhere else: {error}")
        _end(transition, verdict)
        return
    if transition.state.phase is JobPhase.LAUNCHING:
        _begin(transition, placement, gone, reason)
        return
    whole = {
        role.name: _as_others_move(role, before.placement, placement)
        for role in transition.state.roles.values()
    }
    told = [decision.reason for decision in decisions.values()]
    told += [f"{whole[name]}, so all of them start again" for name in decisions if whole[name]]
    for name, why in whole.items():
        if why and name not in decisions:
            now = _circumstances(transition.state, name, range(len(transition.state.roles[name].workers)))
            decisions[name] = decide_to_make_room(name, f"{reason}; {why}", now)
            told.append(decisions[name].reason)
    if _ends(transition, decisions, by_failure=bool(failures)):
        return
    transition.state = replace(transition.state, placement=placement)
    _tell(transition, before.placement, gone, told, reason)
    moved = [name for name in decisions if whole[name]]
    if waits := consequences(unit_of(transition.state, [*missing, *moved])):
        transition.record("affected", waits)
    for name, role in list(transition.state.roles.items()):
        _follow(transition, before, role, decisions.get(name), bool(whole[name]))


def _begin(transition: Transition, placement: Placement, gone: Collection[str], reason: str) -> None:
    """Nothing has started yet, so there is nothing to start again."""
    before = transition.state
    roles = {
        name: replace(role, workers=waiting(placement, name)) if role.phase is RolePhase.WAITING else role
        for name, role in before.roles.items()
    }
    transition.state = replace(before, placement=placement, roles=roles)
    _tell(transition, before.placement, gone, [], reason)
    form_if_all_are_there(transition)


def _missing(before: JobState, after: JobState, gone: Collection[str]) -> Iterator[tuple[str, int]]:
    """The ranks whose role needs a restart for them: they are gone, or the store is in which the others meet.

    A role that is about to form another generation, and has met in none since, starts them with that.
    """
    for name, role in after.roles.items():
        if role.phase not in ROLE_WORKS or role.opened < role.generation:
            continue
        here = [worker for worker in role.workers if worker.node in gone]
        missing = [worker.rank for worker in here if not worker.live and not worker.ended_well]
        if not missing and _loses_its_store(before, role, gone):
            missing = [worker.rank for worker in here]
        yield from ((name, rank) for rank in missing)


def _loses_its_store(before: JobState, role: RoleState, gone: Collection[str]) -> bool:
    """Whether those that live on cannot meet any more. Where somebody has done its work, nobody needs to who can go on
    without that (as in `failing.store_ended`)."""
    if leader(before, role.name) not in gone:
        return False
    return bool(role.live) and not (
        role.restart == "process" and any(worker.ended_well for worker in role.workers)
    )


def _circumstances(state: JobState, name: str, ranks: Sequence[int]) -> Circumstances:
    """What the policy looks at when `ranks` are lost. Of several, all must have said that they are recoverable."""
    role = state.roles[name]
    said = {role.workers[rank].recoverable for rank in ranks}
    recoverable = False if False in said else None if None in said else True
    return replace(circumstances(state, role), recoverable=recoverable)


def _ends(transition: Transition, decisions: Mapping[str, Decision], *, by_failure: bool) -> bool:
    """End the job when that was decided."""
    for decision in decisions.values():
        if decision.action == "end_job":
            code = EXIT_BUDGET if decision.budget_spent else KILLED
            _end(transition, Verdict(JobPhase.FAILED, code, decision.reason, by_failure))
            return True
    return False


def _end(transition: Transition, verdict: Verdict) -> None:
    stop_all(transition, verdict, signal.SIGTERM, None)
    for role in list(transition.state.roles.values()):
        advance(transition, role)


def _as_others_move(role: RoleState, before: Placement, after: Placement) -> str:
    """Why all ranks of a role have to be started again, in words, though few are missing; empty when they have not."""
    if role.phase not in ROLE_WORKS:
        # It has ended, or all of them are told to end anyhow.
        return ""
    old, new = before.of_role(role.name), after.of_role(role.name)
    if len(new) != len(old):
        return f"{role.name} has room for {len(new)} of {len(old)} ranks"
    moving = [w.rank for w in role.live if (w.node, w.own) != (new[w.rank].node, new[w.rank].own)]
    return f"{role.name}:{spans(moving)} make room for others" if moving else ""


def _follow(
    transition: Transition, before: JobState, role: RoleState, decision: Decision | None, whole: bool
) -> None:
    """Carry out for one role what was decided, and what is due in it where nothing had to be."""
    if decision is not None:
        role = replace(role, restarts=role.restarts + 1)
        if decision.action == "restart_worker" and not whole:
            form_next(transition, replace(role, phase=RolePhase.REFORMING))
            return
        role = replace(role, phase=RolePhase.RESTARTING)
        transition.put(role)
        transition.stop(role, signal.SIGTERM, transition.state.spec.shutdown_timeout)
        advance(transition, role)
    elif role.generation > role.opened:
        moved = leader(before, role.name) != leader(transition.state, role.name)
        if moved or obstructed(before, before.roles[role.name]):
            # It was ordered where nobody is any more, or there when somebody was in the way who is gone.
            order_store(transition, role)
    elif before.roles[role.name].live and role.phase not in ROLE_WORKS:
        advance(transition, role)


def _tell(
    transition: Transition, before: Placement, gone: Collection[str], decisions: Sequence[str], reason: str
) -> None:
    """Who follows the job, and the log of events, hear what was decided."""
    for text in decisions or [f"{reason}; the job goes on without it, as nobody was there"]:
        transition.record("decision", text)
        transition.send(ToWatchers(Notice(_named(gone), text)))
    for text in _moves(before, transition.state.placement):
        transition.record("move", text)
        transition.send(ToWatchers(Notice("placement", text)))


def _moves(before: Placement, after: Placement) -> list[str]:
    """Who goes where, ranks of one role with one way together."""
    ways: dict[tuple[str, str, str], list[int]] = {}
    for name in dict.fromkeys(place.role for place in after.assignments):
        for old, new in zip(before.of_role(name), after.of_role(name), strict=False):
            if old.node != new.node:
                ways.setdefault((name, old.node, new.node), []).append(new.rank)
    return [f"{role}:{spans(ranks)} from {old} to {new}" for (role, old, new), ranks in ways.items()]
