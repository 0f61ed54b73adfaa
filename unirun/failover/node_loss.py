"""What follows when nodes are lost: their ranks are placed again; ranks that need not move stay where they are.

The unit of that is what the graph calls affected (`unirun.graph.affected`): ranks that failed are started elsewhere;
their peers form the next generation with them, in place or started again, as their role's level says; who calls them or
is called by them, over however many roles, goes on, and is told.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec.structs import replace

from unirun.collocation import Placement
from unirun.errors import EXIT_PLACEMENT, PlacementError
from unirun.failover.blast_radius import consequences, unit_of
from unirun.failover.policy import Decision, Loss, decide
from unirun.failover.relocation import moves, place_without, why_all_restart
from unirun.failover.restart_or_end import advance, end_job, history_of, restart
from unirun.failover.worker_failure import failure_of
from unirun.graph import show_ranks
from unirun.job.events import After, LossesDue, ToWatchers
from unirun.job.failures import Exit, Failure
from unirun.job.generations import form_if_all_are_there, obstructed, order_store
from unirun.job.state import ROLE_WORKS, JobPhase, JobState, RolePhase, RoleState, waiting
from unirun.job.transition import Transition
from unirun.job.views import leader
from unirun.values import WorkerId
from unirun.wire.reports import Notice, WorkerExited

LOSS_DELAY = 0.005
"""Seconds in which the losses of agents are gathered into one decision."""

KILLED = 128 + signal.SIGKILL
"""The exit code of a job whose nodes are gone."""


def agent_lost(transition: Transition, node: str, reason: str) -> None:
    """The agent of `node` is gone. When a rack loses its power, many are: one decision is made for all of them."""
    if not transition.state.losses:
        transition.send(After(LOSS_DELAY, LossesDue()))
    transition.state = replace(transition.state, losses={**transition.state.losses, node: reason})


def nodes_lost(transition: Transition, nodes: Mapping[str, str]) -> None:
    """Handle the loss of `nodes` (node → reason). Workers never outlive their agent, so theirs are lost too."""
    nodes = {node: why for node, why in nodes.items() if not transition.state.given_up(node)}
    if not nodes:
        return
    for node, why in nodes.items():
        transition.record("agent_lost", f"{node}: {why}", node, *_workers_on(transition.state, node))
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
        end_job(transition, Decision("end_job", reason), KILLED, by_failure=bool(failures))


def begin_without(transition: Transition, gone: Collection[str], reason: str) -> bool:
    """Start the job on the nodes that have joined, without `gone`. Returns False when the ranks do not fit there."""
    state = _without(transition.state, gone)
    if not state.without(gone):
        return False
    try:
        placement = place_without(state, gone)
    except PlacementError:
        return False
    transition.state = state
    _begin(transition, placement, gone, reason)
    return True


def _without(state: JobState, gone: Collection[str]) -> JobState:
    """The state without the nodes `gone`: their agents are refused should they come back."""
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
    """``n1, n2``; for more than three nodes the first one and a count."""
    some = list(nodes)
    return ", ".join(some) if len(some) <= 3 else f"{some[0]} and {len(some) - 1} other nodes"


def _fall(transition: Transition, nodes: Collection[str], reason: str) -> list[Failure]:
    """Mark the workers of `nodes` as killed. Returns their failures."""
    killed = Exit(signal=signal.SIGKILL)
    failures: list[Failure] = []
    for role in list(transition.state.roles.values()):
        fallen = [worker for worker in role.live if worker.node in nodes]
        for worker in fallen:
            who = WorkerId(role.name, worker.rank, worker.incarnation)
            end = WorkerExited(who, transition.now, None, killed.signal, note=reason)
            failures.append(failure_of(transition.state, role, worker, end, killed))
            role = role.with_worker(worker.ended(killed))
        if fallen:
            transition.put(role)
    return failures


def _go_on(
    transition: Transition, before: JobState, gone: Collection[str], reason: str, failures: Sequence[Failure]
) -> None:
    """Place what was on the nodes `gone` elsewhere, or end the job."""
    missing = [f"{name}:{rank}" for name, rank in _missing(before, transition.state, gone)]
    decisions = {
        each.role: _decide(transition.state, each.role, each.ranks, reason, elsewhere=True)
        for each in unit_of(transition.state, missing)
        if each.side == "failed"
    }
    transition.state = transition.state.with_failures(
        *(
            replace(
                each, decision=decisions[each.worker.role].reason if each.worker.role in decisions else reason
            )
            for each in failures
        )
    )
    if _ends(transition, decisions, by_failure=bool(failures)):
        return
    try:
        placement = place_without(transition.state, gone)
    except PlacementError as error:
        no_room = Decision("end_job", f"{reason}; its ranks fit nowhere else: {error}")
        end_job(transition, no_room, EXIT_PLACEMENT, by_failure=False)
        return
    if transition.state.phase is JobPhase.LAUNCHING:
        _begin(transition, placement, gone, reason)
        return
    whole = {
        role.name: why_all_restart(role, before.placement, placement)
        for role in transition.state.roles.values()
    }
    told = [(name, decision.reason) for name, decision in decisions.items()]
    told += [(name, f"{whole[name]}, so all of them start again") for name in decisions if whole[name]]
    for name, why in whole.items():
        if why and name not in decisions:
            ranks = range(len(transition.state.roles[name].workers))
            decisions[name] = _decide(transition.state, name, ranks, f"{reason}; {why}", together=True)
            told.append((name, decisions[name].reason))
    if _ends(transition, decisions, by_failure=bool(failures)):
        return
    transition.state = replace(transition.state, placement=placement)
    lost, causes = transition.cause, _tell(transition, before.placement, gone, told, reason)
    moved = [name for name in decisions if whole[name]]
    if waits := consequences(unit_of(transition.state, [*missing, *moved])):
        transition.record("affected", waits)
    for name, role in list(transition.state.roles.items()):
        transition.cause = causes.get(name, lost)
        if name in decisions:
            action = "restart_role" if whole[name] else decisions[name].action
            restart(transition, role, replace(decisions[name], action=action))
        else:
            _go_on_without_decision(transition, before, role)


def _begin(transition: Transition, placement: Placement, gone: Collection[str], reason: str) -> None:
    """Take over the new placement of a job that has not started yet."""
    before = transition.state
    roles = {
        name: replace(role, workers=waiting(placement, name)) if role.phase is RolePhase.WAITING else role
        for name, role in before.roles.items()
    }
    transition.state = replace(before, placement=placement, roles=roles)
    _tell(transition, before.placement, gone, [], reason)
    form_if_all_are_there(transition)


def _missing(before: JobState, after: JobState, gone: Collection[str]) -> Iterator[tuple[str, int]]:
    """The ranks whose loss costs their role a restart: lost workers, or all of a node that had the role's store.

    A role that is already about to form a generation starts them with it.
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
    """Whether the survivors have lost the store in which they meet. Where a rank has succeeded and workers restart
    alone, they do not need it (as in `worker_failure.store_ended`)."""
    if leader(before, role.name) not in gone:
        return False
    return bool(role.living) and not (
        role.restart == "process" and any(worker.ended_well for worker in role.workers)
    )


def _decide(
    state: JobState,
    name: str,
    ranks: Sequence[int],
    what: str,
    *,
    elsewhere: bool = False,
    together: bool = False,
) -> Decision:
    """The decision when `ranks` of a role are lost or have to leave. They are recoverable when all have said so."""
    role = state.roles[name]
    said = {role.workers[rank].recoverable for rank in ranks}
    recoverable = False if False in said else None if None in said else True
    loss = Loss(what, name, show_ranks(ranks), recoverable, elsewhere=elsewhere, together=together)
    return decide(loss, history_of(state, role))


def _ends(transition: Transition, decisions: Mapping[str, Decision], *, by_failure: bool) -> bool:
    """End the job if one of the decisions says so. Returns whether it did."""
    for decision in decisions.values():
        if decision.action == "end_job":
            end_job(transition, decision, KILLED, by_failure=by_failure)
            return True
    return False


def _go_on_without_decision(transition: Transition, before: JobState, role: RoleState) -> None:
    """Do what is due in a role that has lost nothing, or that forms a generation anyhow."""
    if role.generation > role.opened:
        moved = leader(before, role.name) != leader(transition.state, role.name)
        if moved or obstructed(before, before.roles[role.name]):
            # Its store was ordered on a lost node, or had to wait for a misplaced worker that is gone now.
            order_store(transition, role)
    elif before.roles[role.name].living and role.phase not in ROLE_WORKS:
        advance(transition, role)


def _tell(
    transition: Transition,
    before: Placement,
    gone: Collection[str],
    decisions: Sequence[tuple[str, str]],
    reason: str,
) -> dict[str, str]:
    """Report what was decided about each role. Returns the ids of these events by role."""
    lost, events = transition.cause, {}
    for name, text in decisions or [("", f"{reason}; the job goes on without it, as nobody was there")]:
        transition.cause = lost
        transition.record("decision", text, *filter(None, [name]))
        transition.send(ToWatchers(Notice(_named(gone), text)))
        events[name] = transition.cause
    for who, text in moves(before, transition.state.placement):
        transition.cause = events.get(who.partition(":")[0], lost)
        transition.record("move", text, who)
        transition.send(ToWatchers(Notice("placement", text)))
    return events


def _workers_on(state: JobState, node: str) -> list[str]:
    """The workers that live on `node`: ``actor:0-3``."""
    here = {role.name: [w.rank for w in role.live if w.node == node] for role in state.roles.values()}
    return [f"{name}:{show_ranks(ranks)}" for name, ranks in here.items() if ranks]
