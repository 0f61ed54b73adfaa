"""The takeover by a new master: it loads the job context from the store and hears from the agents what they hold.

The store has every decision, but not whether the orders that followed from it have arrived; the agents know that,
and how their workers stand. Whatever is due at a node is ordered again when it joins: an agent does nothing twice.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

from msgspec.structs import replace

from unirun.failover.draft import (
    Absent,
    After,
    Command,
    Due,
    JobDraft,
    ToAgent,
    ToWatchers,
    is_member,
    leader,
    output_of,
)
from unirun.failover.generations import complete, order_store
from unirun.failover.phases import PhaseEvent
from unirun.failover.policy import on_this_clock
from unirun.failover.restart_or_end import advance, unsettle
from unirun.failover.state import (
    JOB_ENDS,
    NEVER,
    ROLE_ENDS,
    ROLE_WORKS,
    Exit,
    JobPhase,
    JobState,
    Ranks,
    RolePhase,
    RoleState,
    WorkerPhase,
    WorkerState,
)
from unirun.values import WorkerId
from unirun.wire.messages import ExitAck, StopWorkers
from unirun.wire.reports import Calls, FromWorker, HeldWorker, Join, StoreEnded, WorkerExited

PAID = 1.0
"""The `WorkerState.due` of a rank whose restart was ordered before, and has been paid for: a time in the past."""

REJOIN_TIMEOUT = 15.0
"""Seconds within which every agent must join a new master on its own host, or, where the store is a file, on the head:
they have other ways than beats to know that they are not given up (`unirun.failover.silence`)."""


def resume(state: JobState, now: float, rejoin: float = REJOIN_TIMEOUT) -> tuple[JobState, list[Command]]:
    """The `state` of the master before, as this one takes it over, and the commands that follow. Agents have `rejoin`
    seconds to join it."""
    if state.phase in JOB_ENDS:
        return state, []
    state = on_this_clock(state, now)
    draft = JobDraft(state, now)
    roles = {name: _unseen(role) for name, role in state.roles.items()}
    away = frozenset(state.agents)
    unseen = replace(state, roles=roles, away=away, view_due=False, told=None, losses={}, looked={})
    draft.put(unseen, PhaseEvent.TAKEN_OVER)
    state = draft.state
    if state.away or state.phase is not JobPhase.LAUNCHING:
        draft.record("master", "another master goes on with the job")
    if state.away:
        draft.send(After(rejoin, Due.REJOIN))
    for node in state.nodes if state.phase is JobPhase.RUNNING else ():
        if node not in state.agents and not state.given_up(node):
            draft.send(After(state.spec.join_timeout, Absent(node)))
    if state.phase is JobPhase.LAUNCHING:
        # No agent could join while there was no master; and the clock may have been set in the meantime.
        limit = state.spec.join_timeout
        left = min(state.started + limit - now, limit)
        draft.send(After(max(left, min(REJOIN_TIMEOUT, limit)), Due.JOIN))
    return draft.done()


def _unseen(role: RoleState) -> RoleState:
    """The role with what the store knows of live workers: the order to start them. Their agents tell the rest."""
    workers = Ranks(
        replace(w, phase=WorkerPhase.STARTING, pid=None, addresses={}, metrics={}, health=None)
        if w.live
        else w
        for w in role.workers
    )
    phase = RolePhase.STARTING if role.phase is RolePhase.RUNNING else role.phase
    return replace(role, phase=phase, workers=workers)


def bare(event: Join) -> Join:
    """The part of `Join` that is kept. What the agent holds changes from now on, but for stores that have ended."""
    ended = tuple(store for store in event.stores if isinstance(store, StoreEnded))
    return replace(event, workers=(), stores=ended, ending=None)


def keep_end(draft: JobDraft, ended: StoreEnded) -> None:
    """Keep the end of a store with what its agent has said when it joined, for `ended_stores`."""
    node = leader(draft.state, draft.role(ended.role).name)
    if (join := draft.state.agents.get(node)) is not None:
        agents = {**draft.state.agents, node: replace(join, stores=(*join.stores, ended))}
        draft.put(replace(draft.state, agents=agents))


def ended_stores(state: JobState) -> Iterator[StoreEnded]:
    """The stores of roles that had ended when their agents joined. What follows depends on whether all ranks of the
    role run, which is known when no node is away."""
    for name in state.roles:
        join = state.agents.get(leader(state, name))
        for store in join.stores if join is not None else ():
            if isinstance(store, StoreEnded) and store.role == name:
                yield store


def take_up(draft: JobDraft, event: Join) -> Iterator[FromWorker | WorkerExited]:
    """Merge what an agent holds into the state and order what is missing there. Yields what it says of its workers."""
    for name in draft.state.roles:
        _take_up_role(draft, name, event)
    for each in event.workers:
        if each.calls:
            yield FromWorker(each.worker, Calls(each.calls))
    for each in event.workers:
        if each.exit is None:
            continue
        if draft.find(each.worker) is None:
            draft.order(event.node, ExitAck(each.worker))
        else:
            yield each.exit
    stores = {store.role: store for store in event.stores}
    for name in draft.state.roles:
        role = draft.role(name)
        if (
            role.is_program
            or role.phase in (*ROLE_ENDS, RolePhase.WAITING, RolePhase.STOPPING)
            or leader(draft.state, name) != event.node
        ):
            continue
        if role.phase is RolePhase.RESTARTING and role.opened == role.generation:
            # Its workers are about to end: the next store is opened after that, on another node perhaps.
            continue
        store = stores.get(name)
        if store is None or store.generation < role.generation:
            order_store(draft, name)


def all_back(draft: JobDraft) -> None:
    """Every node has joined the new master: send the view and start the missing workers."""
    draft.tell_now()
    for name, role in draft.state.roles.items():
        if role.forming:
            # `StoreOpened` may have come while nodes were away, and was ignored: the agent repeats it.
            order_store(draft, name)
        elif (
            # While the job ends, a service that was not told to end yet starts no more workers.
            draft.state.phase is JobPhase.RUNNING
            and not role.is_program
            and role.phase in ROLE_WORKS
            and any(not w.live and not w.ended_well for w in role.workers)
        ):
            complete(draft, name)


def _take_up_role(draft: JobDraft, name: str, event: Join) -> None:
    held = {each.worker: each for each in event.workers}
    living: list[int] = []
    before = draft.role(name)
    for worker in before.live:
        if worker.node != event.node:
            continue
        known = held.get(WorkerId(name, worker.rank, worker.incarnation))
        if known is None:
            draft.put_worker(name, _never_started(before, worker), PhaseEvent.NOT_HELD)
            continue
        member = is_member(draft.state, before, worker)
        draft.put_worker(name, _as_held(before, worker, known, member=member), PhaseEvent.HELD)
        if known.exit is None:
            living.append(worker.rank)
        if known.pid is not None:
            draft.send(ToWatchers(output_of(draft.state, name, worker.rank)))
    unsettle(draft, name)
    role = draft.role(name)
    if role.phase not in (RolePhase.RESTARTING, RolePhase.STOPPING):
        living = [rank for rank in living if draft.state.misplaced(role, role.workers[rank])]
    if role.phase not in ROLE_WORKS and role.living < before.living:
        advance(draft, name)
    if living:
        grace = draft.state.spec.shutdown_timeout
        draft.send(ToAgent(event.node, StopWorkers(name, tuple(living), int(signal.SIGTERM), grace)))


def _as_held(role: RoleState, worker: WorkerState, known: HeldWorker, *, member: bool) -> WorkerState:
    phase = WorkerPhase.STARTING if known.pid is None else WorkerPhase.ALIVE
    phase = WorkerPhase.RUNNING if known.running else phase
    phase = WorkerPhase.SERVING if known.running and member else phase
    ready = known.health is not None and known.health.ready
    phase = WorkerPhase.SERVING if known.serving or ready else phase
    return replace(
        worker,
        phase=phase,
        pid=known.pid,
        health=known.health,
        resilient=known.resilient,
        generation=max(worker.generation, min(known.generation, role.generation)),
        addresses=known.addresses,
        recoverable=known.recoverable if known.serving else worker.recoverable,
    )


def _never_started(role: RoleState, worker: WorkerState) -> WorkerState:
    """The worker whose start order was lost with the old master: its rank is as before that order."""
    if worker.incarnation == 0:
        return WorkerState(
            *(worker.rank, worker.node),
            own=worker.own,
            ports=worker.ports,
            paid=worker.paid,
            due=worker.due,
        )
    end = Exit(signal=signal.SIGTERM)
    before = WorkerState(
        *(worker.rank, worker.node, worker.incarnation - 1),
        own=worker.own,
        called=worker.called,
        ports=worker.ports,
        paid=worker.paid,
        new_ports=worker.new_ports,
        step=worker.step,
        due=NEVER if worker.due == NEVER else PAID if role.is_program else 0.0,
    )
    return before.ended(end)
