"""The move of ranks to other nodes: what each role does about it, and the orders that follow.

The unit of that is what the graph calls affected (`unirun.collocation.graph.affected`): ranks that failed or leave are started
elsewhere; their peers form the next generation with them, in place or started again, as their role's level says; who
calls them or is called by them, over however many roles, goes on, and is told.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec.structs import replace

from unirun.collocation import Placement
from unirun.collocation.graph import show_ranks
from unirun.failover.blast_radius import consequences, unit_of
from unirun.failover.events import ToAgent, ToWatchers
from unirun.failover.generations import form_if_all_are_there, obstructed, order_store
from unirun.failover.policy import Decision, Loss, decide
from unirun.failover.relocation import moves, why_all_restart
from unirun.failover.restart_or_end import advance, history_of, restart
from unirun.failover.state import (
    NEVER,
    ROLE_WORKS,
    JobState,
    Ranks,
    RolePhase,
    RoleState,
    WorkerState,
    waiting,
)
from unirun.failover.transition import Transition
from unirun.failover.views import leader
from unirun.values import Value
from unirun.wire.messages import StopWorkers
from unirun.wire.reports import Notice


class Cause(Value):
    """The cause of a move of ranks.

    `nodes` are lost, leave on request (`asked`), or have joined (`come`), at `time` (seconds since the epoch); the
    `reason` in words.
    """

    nodes: tuple[str, ...]
    reason: str
    time: float
    asked: bool = False
    come: bool = False

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

    @property
    def end(self) -> Decision | None:
        """The decision that ends the job, if there is one."""
        return next((each for each in self.decisions.values() if each.action == "end_job"), None)


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
        role.name: why_all_restart(role, before.placement, placement, cause.gone)
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
    return Relocation(placement, decisions, whole, tuple(told), missing)


def relocate(transition: Transition, before: JobState, cause: Cause, found: Relocation) -> None:
    """Take over the new placement, and do what each role does about it."""
    decisions, whole = found.decisions, found.whole
    transition.state = replace(transition.state, placement=found.placement)
    gone = any(worker.node in cause.gone for role in before.roles.values() for worker in role.live)
    unaffected = f"{cause.reason}; the job goes on without it{'' if gone else ', as no rank ran there'}"
    told = found.told or [("", unaffected)]
    lost, causes = transition.cause, _tell(transition, before.placement, cause, told)
    moved = [name for name in decisions if whole[name]]
    if waits := consequences(unit_of(transition.state, [*found.missing, *moved])):
        transition.record("affected", waits)
    for name, role in list(transition.state.roles.items()):
        transition.cause = causes.get(name, lost)
        if name in decisions:
            action = "restart_role" if whole[name] else decisions[name].action
            restart(transition, _grown(role, found.placement), replace(decisions[name], action=action))
        else:
            grown = _grown(role, found.placement)
            if grown is not role:
                # It is about to start again as a whole, and starts the new ranks with that.
                transition.put(grown)
            _go_on_without_decision(transition, before, grown)
        _let_go(transition, name)


def begin(transition: Transition, placement: Placement, cause: Cause) -> None:
    """Take over the new placement of a job that has not started yet."""
    before = transition.state
    roles = {
        name: replace(role, workers=waiting(placement, name, role.workers))
        if role.phase is RolePhase.WAITING
        else role
        for name, role in before.roles.items()
    }
    transition.state = replace(before, placement=placement, roles=roles)
    reason = f"{cause.reason}; the job goes on without it, as no rank ran there"
    _tell(transition, before.placement, cause, [("", reason)])
    form_if_all_are_there(transition)


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
        asked=cause.asked,
    )
    return decide(loss, history_of(state, role, cause.time, ranks))


def _grown(role: RoleState, placement: Placement) -> RoleState:
    """The role with workers for all of its places."""
    more = placement.of_role(role.name)[len(role.workers) :]
    if not more:
        return role
    workers = (WorkerState(place.rank, place.node, own=place.own) for place in more)
    return replace(role, workers=Ranks((*role.workers, *workers)))


def _let_go(transition: Transition, name: str) -> None:
    """Order the end of workers whose ranks go elsewhere while their role lives on."""
    role = transition.state.roles[name]
    if role.phase not in ROLE_WORKS:
        return
    leaving: dict[str, list[int]] = {}
    for worker in role.live:
        if transition.state.misplaced(role, worker):
            leaving.setdefault(worker.node, []).append(worker.rank)
    grace = transition.state.spec.shutdown_timeout
    for node, ranks in leaving.items():
        order = StopWorkers(name, tuple(ranks), int(signal.SIGTERM), grace)
        transition.send(ToAgent(node, order, transition.cause))


def _go_on_without_decision(transition: Transition, before: JobState, role: RoleState) -> None:
    """Do what is due in a role that has lost nothing, or that forms a generation anyhow."""
    if role.forming:
        moved = leader(before, role.name) != leader(transition.state, role.name)
        if moved or obstructed(before, before.roles[role.name]):
            # Its store was ordered on a lost node, or had to wait for a misplaced worker that is gone now.
            order_store(transition, role)
    elif before.roles[role.name].living and (role.phase not in ROLE_WORKS or role.has_done_its_work):
        # The last of its workers is gone; of a role that works, one that the job goes on without.
        advance(transition, role)


def _tell(
    transition: Transition, before: Placement, cause: Cause, decisions: Sequence[tuple[str, str]]
) -> dict[str, str]:
    """Report what was decided about each role. Returns the ids of these events by role."""
    lost, events = transition.cause, {}
    for name, text in decisions:
        transition.cause = lost
        transition.record("decision", text, *filter(None, [name]))
        transition.send(ToWatchers(Notice(named(cause.nodes), text)))
        events[name] = transition.cause
    for who, text in moves(before, transition.state.placement):
        transition.cause = events.get(who.partition(":")[0], lost)
        transition.record("move", text, who)
        transition.send(ToWatchers(Notice("placement", text)))
    return events
