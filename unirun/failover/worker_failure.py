"""The consequences of the end of a worker or of a rendezvous store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec.structs import replace

from unirun.collocation import Placement
from unirun.errors import EXIT_FAILURE, EXIT_RENDEZVOUS, IllegalTransition
from unirun.failover.diagnosis import NOT_EXECUTED, is_consequence, likely_cause, waited_for_a_peer
from unirun.failover.draft import JobDraft, ToWatchers
from unirun.failover.generations import clear_the_way
from unirun.failover.moving import moves, place_elsewhere, restart_job, tell_move
from unirun.failover.phases import PhaseEvent
from unirun.failover.policy import (
    STRIKES,
    Decision,
    Loss,
    budget_above,
    budget_for,
    budget_of_rank,
    consequences,
    decide,
    decide_in,
    may_be_tainted,
    strikes_like,
    suspects,
    unit_of,
    with_payment,
    with_strike,
)
from unirun.failover.restart_or_end import (
    advance,
    end_job,
    form_anew,
    give_up,
    restart,
    stop_groups,
    unsettle,
)
from unirun.failover.state import (
    CUT_SECONDS,
    NEVER,
    ROLE_WORKS,
    Cut,
    Exit,
    Failure,
    JobPhase,
    JobState,
    RolePhase,
    RoleState,
    Rule,
    Strike,
    WorkerState,
)
from unirun.spec.job import RoleSpec
from unirun.wire.messages import ExitAck
from unirun.wire.reports import Notice, StoreEnded, WorkerExited

NEW_PORTS = 3
"""Times that a rank gets other ports at no cost: what has the port may be a process of its own that outlives it."""

RULES: Mapping[str, Rule] = {
    "stuck": "hang",
    "hung": "hang",
    "unready": "probe",
    "silent": "probe",
    "torn": "weights",
    "lost_dependency": "store",
}
"""The rule by which an agent has noticed a failure, by the cause that it gives (`unirun.wire.reports.Cause`)."""


def exited(draft: JobDraft, event: WorkerExited) -> None:
    """Handle the end of a worker: success, an exit on request, or a failure. It is acknowledged once it is stored."""
    if _leaves_with_its_agent(draft, event):
        draft.record("exit", f"{event.worker} has ended, as its agent leaves", str(event.worker))
        return
    worker = draft.find(event.worker)
    name, rank = event.worker.role, event.worker.rank
    role = draft.role(name)
    obstructs = worker is not None and draft.state.has_to_leave(role, worker)
    for known in role.workers[rank : rank + 1]:
        draft.order(known.node, ExitAck(event.worker))
    if worker is None:
        return
    works = role.phase in ROLE_WORKS and draft.state.phase is not JobPhase.STOPPING
    spec = draft.state.role_spec(name)
    needed = works and event.cause != "order" and (spec.service or _is_awaited(role, worker))
    end = Exit(event.code, event.signal, early=needed and event.code == 0)
    # Its rank goes to another node: it was told to end, whatever its own reason is.
    moves = works and draft.state.misplaced(role, worker)
    # So was one that the job goes on without, or of which the group starts again.
    leaves = event.cause == "order" and (spec.group is not None or worker.due == NEVER)
    if works and (moves or leaves) and end.ok and event.cause == "order":
        # A clean exit on request is not success.
        end = Exit(signal=event.sent)
    text = f"{event.worker} ended: {end}{', ' + event.note if event.note else ''}"
    if event.cause != "own" or not works:
        draft.cause = role.cause
    elif worker.fault:
        draft.cause = worker.fault
    draft.record("exit", text, str(event.worker))
    if works and event.cause == "order" and not moves and not leaves:
        raise IllegalTransition(f"{text}, by an order that no master has written")
    left = event.time if end.ok and event.sent is None else 0.0
    step = max(worker.step, event.step)
    draft.put_worker(name, replace(worker.ended(end), left=left, step=step), PhaseEvent.ENDED)
    if role.is_program:
        unsettle(draft, name)
    if moves and role.phase is RolePhase.REFORMING and max(worker.generation, event.met) == role.generation:
        # It has come to the store of the generation that was to be formed without it: others may wait for it there.
        draft.put(replace(draft.role(name), generation=role.generation + 1))
    if obstructs:
        clear_the_way(draft)
    if end.ok or moves or leaves or role.orderly or _obeyed(event):
        if works and event.cause == "leaving":
            # Its agent has ended it; AgentLost or OwnerLost follows with the reason.
            draft.put(replace(draft.role(name), phase=RolePhase.STOPPING), PhaseEvent.AGENT_LEAVES)
        advance(draft, name)
        if works and role.is_program:
            stop_groups(draft, name)
        if end.ok or event.sent is not None:
            draft.tell_soon()
        else:
            draft.tell_now()
        return
    if works or (role.phase is RolePhase.RESTARTING and not spec.optional and _fatal(spec, event, end)):
        _fail(draft, worker, event, end)
    else:
        draft.fail(failure_of(draft.state, worker, event, end))
        advance(draft, name)
    draft.tell_now()


def _is_awaited(role: RoleState, worker: WorkerState) -> bool:
    """Return True if the peers of a rank form a generation, in a store that is there, and cannot do so without it."""
    behind = worker.generation < role.generation or (role.kind == "workload" and not role.up(worker))
    return behind and role.in_place and not role.is_program and role.opened == role.generation


def _fail(draft: JobDraft, worker: WorkerState, event: WorkerExited, end: Exit) -> None:
    """Decide what follows from the failure of `worker` (its state before it ended), and carry it out."""
    name, rank = event.worker.role, event.worker.rank
    role = draft.role(name)
    failure = failure_of(draft.state, worker, event, end)
    loss = _loss(draft.state, role, worker, event, end)
    placement = None
    if event.cause in ("own", "silent") and not (loss.stale or loss.taken or is_consequence(failure)):
        if likely_cause(failure).kind == "disk_full":
            fall_ill(draft, worker.node, "disk", f"{event.worker} has found a disk full")
        loss, placement = _blame_node(draft, loss, Strike(name, rank, worker.node, draft.now))
    state, now = draft.state, draft.now
    decision = decide(
        loss,
        role,
        budget_for(state, role, now, [rank]),
        job=budget_above(state, name, now),
        rank=budget_of_rank(state, role, rank, now),
    )
    whole = decision.action in ("restart_role", "restart_job")
    others = _affected(state, name if whole else f"{name}:{rank}")
    draft.fail(replace(failure, decision=decision.reason, affected=others))
    if event.taken and decision.action != "end_job":
        # Its successor gets other ports. Without one it keeps them, as other roles may name them.
        ended = role.workers[rank]
        draft.put_worker(name, replace(ended, ports=None, new_ports=ended.new_ports + 1))
    code = EXIT_RENDEZVOUS if event.cause == "unready" else EXIT_FAILURE
    tail = f"\n{event.tail}" if role.is_program and event.tail else ""
    _carry_out(draft, name, decision, code, rank=rank, tail=tail, placement=placement)


def _blame_node(draft: JobDraft, loss: Loss, strike: Strike) -> tuple[Loss, Placement | None]:
    """Count a failure against its node. Returns the loss of the rank, and a placement with it on another node if it has
    failed too often on this one and there is room."""
    draft.put(with_strike(draft.state, strike))
    node, others = strike.node, [each for each in draft.state.without(()) if each != strike.node]
    if roles := suspects(draft.state, node):
        text = f"{node} gets no more ranks, as ranks of {' and '.join(roles)} have failed there"
        draft.put(replace(draft.state, tainted=(*draft.state.tainted, node)))
        draft.record("taint", text, node)
        draft.send(ToWatchers(Notice(node, text)))
    count, sign = strikes_like(draft.state, strike), draft.state.sick.get(node)
    if (count < STRIKES and sign is None) or not others:
        return loss, None
    placement = place_elsewhere(draft.state, strike.role, strike.rank)
    often = f"{loss.what}; it has failed {count} times on {node} within an hour"
    if sign is not None:
        often = f"{loss.what}; {node} is sick"
    if placement is None:
        return replace(loss, what=f"{often}, and no other node has room for it"), None
    return replace(loss, what=often, elsewhere=True), placement


def cut_off(draft: JobDraft, node: str, other: str) -> None:
    """Two nodes do not hear each other, though both are heard. It is told when it is new."""
    state, pair = draft.state, (min(node, other), max(node, other))
    if state.given_up(node) or state.given_up(other):
        return
    # The clock of a master may be set back, or behind that of the master before.
    known = [each for each in state.cuts if abs(draft.now - each.time) < CUT_SECONDS]
    before = next((each for each in known if each.nodes == pair), None)
    if before is not None and draft.now - before.time < CUT_SECONDS / 2:
        return
    rest = tuple(each for each in known if each is not before)
    draft.put(replace(state, cuts=(*rest, Cut(pair, draft.now))))
    if before is None:
        text = f"{cut_words(pair)}, though both are heard: connections between them get no answer"
        draft.record("cut_off", text, *pair)
        draft.send(ToWatchers(Notice(" and ".join(pair), text)))


def fall_ill(draft: JobDraft, node: str, kind: Literal["disk", "device"], sign: str) -> None:
    """A node shows a sign of sickness: it gets no more ranks, and one that fails there goes elsewhere at once.

    A disk that is full on a second node may be one that they share, so that all nodes would be left for it.
    """
    state = draft.state
    if node in state.sick or state.given_up(node):
        return
    shared = kind == "disk" and any("disk" in each for each in state.sick.values())
    leaves = not shared and may_be_tainted(state, node)
    text = f"{node} is sick: {sign}{'; it gets no more ranks' if leaves else ''}"
    if not shared:
        draft.put(replace(state, sick={**state.sick, node: sign}))
    if leaves:
        draft.put(replace(draft.state, tainted=(*state.tainted, node)))
    draft.record("taint" if leaves else "sick", text, node)
    draft.send(ToWatchers(Notice(node, text)))


def _affected(state: JobState, failed: str) -> tuple[str, ...]:
    """The ranks that are affected when `failed` fails, but for those, in words."""
    return tuple(f"{each} {each.reason}" for each in unit_of(state, [failed]) if each.side != "failed")


def _leaves_with_its_agent(draft: JobDraft, event: WorkerExited) -> bool:
    """Return True if the worker was ended because its agent leaves. What follows is decided once for all
    workers of the node, when the agent is gone. A clean exit on request is not success."""
    works = draft.find(event.worker) is not None and draft.role(event.worker.role).phase in ROLE_WORKS
    return works and event.cause == "leaving" and len(draft.state.nodes) > 1


def _obeyed(event: WorkerExited) -> bool:
    """Return True if the worker ended because of the signal that it was sent, and not by a failure of its own."""
    if event.sent is None:
        return False
    return event.error is None or event.signal == event.sent or event.code == 128 + event.sent


def failure_of(state: JobState, worker: WorkerState, event: WorkerExited, end: Exit) -> Failure:
    """The record of a failure."""
    error = event.error
    # One that never ran has an exit code, but for one whose node is gone before its process was known.
    ran = worker.pid is not None or event.code is None
    failure = Failure(
        worker=event.worker,
        generation=worker.generation,
        node=worker.node,
        time=error.time if error else event.time,
        exit=end,
        message=error.message if error else "",
        traceback=error.traceback if error else "",
        note=event.note,
        tail=event.tail,
        log=f"{state.logs}/{event.worker.role}/{worker.rank}/{worker.incarnation}" if ran else "",
        rule="port" if event.taken else RULES.get(event.cause, "exit"),
        slots=worker.own,
        fault=worker.fault,
        step=event.step,
    )
    if (words := _cut_of(state, failure)) is None:
        return failure
    return replace(failure, rule="network", note=words)


def _cut_of(state: JobState, failure: Failure) -> str | None:
    """The nodes that do not hear each other, if a failure is the consequence of that."""
    pairs = [each.nodes for each in state.cuts if abs(failure.time - each.time) < CUT_SECONDS]
    # Ranks on other nodes may have waited for those.
    pair = next((each for each in pairs if failure.node in each), pairs[0] if pairs else None)
    return cut_words(pair) if pair is not None and waited_for_a_peer(failure) else None


def cut_words(pair: tuple[str, str]) -> str:
    """``h2 and h3 do not hear each other``"""
    return f"{' and '.join(pair)} do not hear each other"


def _fatal(spec: RoleSpec, event: WorkerExited, end: Exit) -> int:
    """The exit code of a worker that has ended by itself, if no restart follows it; else 0."""
    own = event.cause == "own" and not end.early
    return end.status if own and end.status in spec.fatal_exit_codes else 0


def _loss(state: JobState, role: RoleState, worker: WorkerState, event: WorkerExited, end: Exit) -> Loss:
    """The loss of `worker` (its state before it ended) for the policy."""
    in_past = not role.is_program and max(worker.generation, event.met) < role.generation
    # Where its peers are in a function that survives, a rank that has not entered it cannot form the next generation.
    enters = role.restart == "role" and role.in_place and worker.resilient is None
    what = f"{event.worker} {end.predicate}"
    if event.cause in ("unready", "silent", "torn", "hung"):
        what = f"{event.worker} {event.note}"
    elif role.probed and not role.up(worker):
        what = f"{event.worker} {replace(end, early=False).predicate} before it was ready"
    return Loss(
        what,
        role.name,
        str(worker.rank),
        recoverable=worker.recoverable,
        first_start=worker.incarnation == 0,
        permanent=event.cause == "unready"
        or (event.error is not None and event.error.permanent)
        or (role.is_program and end.code in NOT_EXECUTED),
        stale=in_past and (event.cause == "stuck" or enters or not role.up(worker)),
        # Callers know a generation once its store is there.
        called=state.spec.transport in worker.addresses and role.opened == role.generation,
        fatal=_fatal(state.role_spec(role.name), event, end),
        taken=event.taken and worker.new_ports < NEW_PORTS,
    )


def _carry_out(
    draft: JobDraft,
    name: str,
    decision: Decision,
    code: int,
    *,
    rank: int | None = None,
    tail: str = "",
    placement: Placement | None = None,
) -> None:
    """Report and carry out the decision about a role, or one of its ranks. `tail` are its last lines, for a program,
    whose output may be in its log only. The `placement` is another one if ranks go elsewhere."""
    source = name if rank is None else f"{name}:{rank}"
    if decision.action == "end_job" and draft.state.role_spec(name).optional:
        ranks = [rank] if rank is not None else range(len(draft.role(name).workers))
        give_up(draft, name, ranks, decision.reason, tail=tail)
        return
    draft.record("decision", decision.reason, source)
    if decision.action == "end_job":
        end_job(draft, decision, code, by_failure=code == EXIT_FAILURE)
        return
    draft.send(ToWatchers(Notice(source, f"{decision.reason}{tail}")))
    if placement is not None:
        before = draft.state.placement
        draft.put(replace(draft.state, placement=placement))
        for who, text in moves(before, placement):
            tell_move(draft, who, text)
    if decision.action == "restart_job":
        restart_job(draft)
        return
    # When many fail at once, only the consequences of the first one are reported.
    failed = name if decision.action == "restart_role" else source
    runs = draft.role(name).phase is RolePhase.RUNNING
    if runs and (waiting := consequences(unit_of(draft.state, [failed]))):
        draft.record("affected", waiting, source)
    if rank is not None and not decision.free:
        _pay(draft, name, rank)
    restart(draft, name, decision)


def _pay(draft: JobDraft, name: str, rank: int) -> None:
    """Count a restart of a role for the rank that has failed, if that has a budget."""
    limit = draft.state.role_spec(name).rank_restarts
    if limit is not None:
        worker = draft.role(name).workers[rank]
        draft.put_worker(name, replace(worker, paid=with_payment(worker.paid, draft.now, limit)))


def store_ended(draft: JobDraft, event: StoreEnded) -> None:
    """Handle the end of a role's rendezvous store.

    In a role that restarts as a whole, the agent kills the workers, and their exits fail the role; here the end is only
    recorded. Where workers restart alone, they form a new generation in a new store, except when some ranks have
    succeeded: the others could not form it without them, and keep their group. A store that ends before the workers
    have met costs a restart.
    """
    role = draft.role(event.role)
    if event.generation != role.generation:
        return
    draft.record(
        "store", f"the store of role {role.name}, generation {role.generation}: {event.reason}", role.name
    )
    in_place = role.in_place and role.phase in ROLE_WORKS
    if in_place and role.phase is RolePhase.RUNNING:
        if any(worker.ended_well for worker in role.workers):
            return
        reason = (
            f"role {role.name} forms generation {role.generation + 1}, as its store is gone: {event.reason}"
        )
        draft.record("decision", reason, role.name)
        draft.send(ToWatchers(Notice(role.name, reason)))
        draft.put(replace(role, phase=RolePhase.REFORMING), PhaseEvent.STORE_ENDED)
        form_anew(draft, role.name)
    elif in_place or (role.phase is RolePhase.RESTARTING and not role.living):
        what = f"the store of role {role.name} is gone before its workers have met: {event.reason}"
        # When all ranks of it are about to start, there is none that could keep what it has.
        loss = Loss(what, role.name, together=role.phase is RolePhase.RESTARTING)
        decision = decide_in(draft.state, loss, draft.now)
        _carry_out(draft, role.name, decision, EXIT_RENDEZVOUS)
