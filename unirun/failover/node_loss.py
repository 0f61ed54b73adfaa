"""The consequences of lost nodes: their ranks are placed again; ranks that need not move stay where they are."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from unirun.collocation.graph import show_ranks
from unirun.errors import EXIT_PLACEMENT, PlacementError
from unirun.failover.draft import After, JobDraft, LossesDue
from unirun.failover.moving import (
    Cause,
    Relocation,
    begin,
    decide_missing,
    named,
    place_without,
    relocate,
    relocation_to,
    without_room,
)
from unirun.failover.phases import PhaseEvent
from unirun.failover.policy import Decision
from unirun.failover.restart_or_end import advance, end_job, give_up, unsettle
from unirun.failover.state import Exit, Failure, JobPhase, JobState
from unirun.failover.worker_failure import failure_of
from unirun.values import WorkerId
from unirun.wire.reports import WorkerExited

LOSS_DELAY = 0.005
"""Seconds in which the losses of agents are gathered into one decision."""

KILLED = 128 + signal.SIGKILL
"""The exit code of a job whose nodes are gone."""


def agent_lost(draft: JobDraft, node: str, reason: str) -> None:
    """The agent of `node` is gone. When a rack loses its power, many are: one decision is made for all of them."""
    if not draft.state.losses:
        draft.send(After(LOSS_DELAY, LossesDue()))
    draft.put(replace(draft.state, losses={**draft.state.losses, node: reason}))


def nodes_lost(draft: JobDraft, nodes: Mapping[str, str]) -> None:
    """Handle the loss of `nodes` (node → reason). Workers never outlive their agent, so theirs are lost too."""
    nodes = {node: why for node, why in nodes.items() if not draft.state.given_up(node)}
    if not nodes:
        return
    for node, why in nodes.items():
        draft.record("agent_lost", f"{node}: {why}", node, *_workers_on(draft.state, node))
    before = draft.state
    cause = Cause(tuple(nodes), _reason(nodes), draft.now)
    failures = _fall(draft, nodes, cause.reason)
    draft.put(without(draft.state, nodes.keys()))
    draft.tell_now()
    if draft.state.phase is JobPhase.STOPPING:
        for name in draft.state.roles:
            advance(draft, name)
    elif draft.state.without(nodes):
        _go_on(draft, before, cause, failures)
    else:
        ending = [replace(each, decision="the job ends") for each in failures]
        draft.put(draft.state.with_failures(*ending))
        end_job(draft, Decision("end_job", cause.reason), KILLED, by_failure=bool(failures))


def begin_without(draft: JobDraft, gone: Collection[str], reason: str) -> bool:
    """Start the job on the nodes that have joined, without `gone`. Returns False when the ranks do not fit there."""
    state = without(draft.state, gone)
    if not state.without(gone):
        return False
    cause = Cause(tuple(gone), reason, draft.now)
    before = draft.state
    draft.put(state)
    try:
        found = _relocation(draft, before, cause)
    except PlacementError:
        draft.put(before)
        return False
    begin(draft, found.placement, cause)
    return True


def without(state: JobState, gone: Collection[str]) -> JobState:
    """The state without the nodes `gone`: their agents are refused should they come back."""
    return replace(
        state,
        draining=tuple(node for node in state.draining if node not in gone),
        newcomers=tuple(node for node in state.newcomers if node not in gone),
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
    return f"the agents of {named(list(nodes))} are gone: {nodes[first]}"


def _fall(draft: JobDraft, nodes: Collection[str], reason: str) -> list[Failure]:
    """Mark the workers of `nodes` as killed. Returns their failures."""
    killed = Exit(signal=signal.SIGKILL)
    failures: list[Failure] = []
    for role in draft.state.roles.values():
        for worker in role.live:
            if worker.node in nodes:
                who = WorkerId(role.name, worker.rank, worker.incarnation)
                end = WorkerExited(who, draft.now, None, killed.signal, note=reason)
                failures.append(failure_of(draft.state, worker, end, killed))
                draft.put_worker(role.name, worker.ended(killed), PhaseEvent.NODE_LOST)
        if role.is_program:
            unsettle(draft, role.name)
    return failures


def _go_on(draft: JobDraft, before: JobState, cause: Cause, failures: Sequence[Failure]) -> None:
    """Place what was on lost nodes elsewhere, or end the job."""
    missing, decisions = decide_missing(before, draft.state, cause)
    for name, decision in decisions.items():
        if decision.action == "end_job" and draft.state.role_spec(name).optional:
            give_up(draft, name, _ranks(missing, name), decision.reason)
    _, decisions = decide_missing(before, draft.state, cause)
    no_room: PlacementError | None = None
    if not _end_of(decisions):
        try:
            found = _relocation(draft, before, cause)
            decisions = dict(found.decisions)
        except PlacementError as error:
            no_room = error
    reasons = {name: decision.reason for name, decision in decisions.items()}
    decided = [replace(each, decision=reasons.get(each.worker.role, cause.reason)) for each in failures]
    draft.put(draft.state.with_failures(*decided))
    if _ends(draft, decisions, by_failure=bool(failures)):
        return
    if no_room is not None:
        end = Decision("end_job", f"{cause.reason}; its ranks fit nowhere else: {no_room}")
        end_job(draft, end, EXIT_PLACEMENT, by_failure=False)
        return
    if draft.state.phase is JobPhase.LAUNCHING:
        begin(draft, found.placement, cause)
    else:
        relocate(draft, before, cause, found)


def _relocation(draft: JobDraft, before: JobState, cause: Cause) -> Relocation:
    """The next placement, and what follows from it. Where optional services have no room, or others cannot restart to
    make room for them, these services are given up: as few as are enough.

    Raises `PlacementError` when other ranks have no room either.
    """
    error: PlacementError | None = None
    try:
        found = _relocated(draft.state, before, cause)
        if found.end is None:
            return found
        reason = f"with a place for it the job would end: {found.end.reason}"
    except PlacementError as no_room:
        error, reason = no_room, f"{cause.reason}; it fits nowhere else: {no_room}"
    optional = without_room(draft.state, cause.gone)
    for chosen in _choices([*optional]):
        trial = JobDraft(draft.state, draft.now)
        for name in chosen:
            give_up(trial, name, optional[name], reason)
        with suppress(PlacementError):
            without_it = _relocated(trial.state, before, cause)
            if without_it.end is None:
                for name in chosen:
                    give_up(draft, name, optional[name], reason)
                return without_it
    if error is not None:
        raise error
    return found


def _relocated(state: JobState, before: JobState, cause: Cause) -> Relocation:
    """The consequences of the next placement of `state`. Raises `PlacementError`."""
    missing, decisions = decide_missing(before, state, cause)
    return relocation_to(before, state, place_without(state, cause.gone), cause, missing, decisions)


def _choices(optional: Sequence[str]) -> Iterator[Sequence[str]]:
    """Roles to give up: each alone, the last first; then ever more of the last ones."""
    yield from ((name,) for name in reversed(optional))
    yield from (optional[-count:] for count in range(2, len(optional) + 1))


def _ranks(missing: Sequence[str], name: str) -> list[int]:
    """Those of the role `name`."""
    return [int(who.rpartition(":")[2]) for who in missing if who.rpartition(":")[0] == name]


def _end_of(decisions: Mapping[str, Decision]) -> Decision | None:
    """The decision that ends the job, if there is one."""
    return next((each for each in decisions.values() if each.action == "end_job"), None)


def _ends(draft: JobDraft, decisions: Mapping[str, Decision], *, by_failure: bool) -> bool:
    """End the job if one of the decisions says so. Returns whether it did."""
    decision = _end_of(decisions)
    if decision is not None:
        end_job(draft, decision, KILLED, by_failure=by_failure)
    return decision is not None


def _workers_on(state: JobState, node: str) -> list[str]:
    """The workers that live on `node`: ``actor:0-3``."""
    here = {role.name: [w.rank for w in role.live if w.node == node] for role in state.roles.values()}
    return [f"{name}:{show_ranks(ranks)}" for name, ranks in here.items() if ranks]
