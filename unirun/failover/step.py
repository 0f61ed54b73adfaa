"""The master's decisions: ``step(state, event, now) -> (state, commands)``. No I/O, no clock of its own."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from msgspec.structs import replace

from unirun.collocation.graph import sound
from unirun.errors import EXIT_RENDEZVOUS, IllegalTransition, Refused
from unirun.failover.draft import (
    Absent,
    AgentLost,
    Arrived,
    Command,
    CutOff,
    Due,
    Event,
    JobDraft,
    KeepMetrics,
    OwnerLost,
    Straggles,
    ToWatchers,
    is_member,
    output_of,
)
from unirun.failover.generations import commit, form_if_all_are_there, obstructed, opened
from unirun.failover.moving import move_rank
from unirun.failover.nodes import (
    agent_lost,
    arrived,
    begin_without,
    drain,
    grow,
    grow_at_boundary,
    grow_elastic,
    is_absent,
    leave_when_empty,
    nodes_lost,
)
from unirun.failover.phases import PhaseEvent
from unirun.failover.readiness import health_changed, placed, reserve_again, start_due, stop_due, wait_again
from unirun.failover.restart_or_end import end_as_told, end_if_over, settle, stop_all
from unirun.failover.state import (
    JOB_ENDS,
    OWNER_LOST_GRACE_SECONDS,
    JobPhase,
    JobState,
    RolePhase,
    RoleState,
    Verdict,
    WorkerPhase,
)
from unirun.failover.takeover import all_back, bare, ended_stores, keep_end, take_up
from unirun.failover.worker_failure import cut_off, exited, fall_ill, store_ended
from unirun.values import WorkerId
from unirun.wire.messages import Drain, Grow, Inject, Injected, PassOn, Stop
from unirun.wire.reports import (
    Boundary,
    Calls,
    CommitJob,
    FromWorker,
    GroupFormed,
    Health,
    Join,
    Listening,
    Metrics,
    Notice,
    Placed,
    Resilient,
    Serving,
    Sick,
    SpawnerReady,
    StoreEnded,
    StoreOpened,
    ViewWanted,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
)


def step(state: JobState, event: Event, now: float) -> tuple[JobState, list[Command]]:
    """The state after `event` at time `now` (seconds since the epoch), and what is to be done.

    Raises `Refused` for what a peer has sent that cannot be, and may be dropped; `IllegalTransition` for any other
    event that cannot happen in `state`.
    """
    if state.phase in JOB_ENDS:
        return state, []
    draft = JobDraft(state, now)
    try:
        _handle(draft, event)
        if draft.state.draining:
            leave_when_empty(draft)
        end_if_over(draft)
        start_due(draft)
        stop_due(draft)
    except IllegalTransition as error:
        error.cause = draft.cause
        raise
    return draft.done()


def _handle(draft: JobDraft, event: Event) -> None:
    draft.cause = _cause(draft.state, event)
    match event:
        case Join():
            _join(draft, event)
        case SpawnerReady():
            draft.record(
                "spawner", f"{event.node}: torch is imported after {event.seconds:.2f} s", event.node
            )
            draft.send(ToWatchers(Notice(event.node, f"spawner ready in {event.seconds:.1f} s")))
        case ViewWanted(node):
            draft.put(replace(draft.state, uninformed=draft.state.uninformed | {node}))
            draft.tell_now()
        case WorkerStarted():
            _started(draft, event)
        case WorkerRunning():
            _running(draft, event)
        case FromWorker(who, Listening(addresses)):
            _listening(draft, who, addresses)
        case FromWorker(who, Serving() as said):
            _serving(draft, who, said)
        case FromWorker(who, GroupFormed() as said):
            _formed(draft, who, said)
        case FromWorker(who, Resilient(inside)):
            if (worker := draft.find(who)) is not None:
                draft.put_worker(who.role, replace(worker, resilient=inside))
        case FromWorker(who, Boundary(named)):
            elastic = named in draft.state.roles and draft.state.role_spec(named).elastic
            if draft.find(who) is not None and (elastic or not named):
                grow_at_boundary(draft, named or who.role)
        case FromWorker(who, Metrics() as said):
            _metrics(draft, who, said)
        case FromWorker(who, Calls() as said):
            _calls(draft, who, said)
        case FromWorker(who, CommitJob() as said):
            commit(draft, who, said)
        case FromWorker(who, Health() as said):
            health_changed(draft, who, said)
        case Placed():
            placed(draft, event)
        case Sick(node, kind, sign):
            fall_ill(draft, node, kind, sign)
        case CutOff(node, other):
            cut_off(draft, node, other)
        case Straggles(who, why):
            if draft.find(who) is not None:
                move_rank(draft, who, why)
        case Due.START:
            # What is due is started after every event.
            pass
        case WorkerExited():
            exited(draft, event)
        case StoreOpened():
            _store_opened(draft, event)
        case StoreEnded() if draft.state.away:
            keep_end(draft, event)
        case StoreEnded():
            store_ended(draft, event)
        case Notice():
            draft.record(event.kind, f"{event.source}: {event.text}", event.source)
            draft.send(ToWatchers(event))
        case Stop():
            _stop(draft, event)
        case PassOn():
            _pass_on(draft, event)
        case Inject():
            _inject(draft, event)
        case Drain(node):
            drain(draft, node)
        case Grow(role):
            grow_elastic(draft, role)
        case Arrived():
            arrived(draft, event)
        case Absent(node):
            is_absent(draft, node)
        case Due.GROWTH:
            grow(draft)
        case OwnerLost():
            lost = Stop(signal.SIGTERM, "the unirun command was killed", OWNER_LOST_GRACE_SECONDS)
            _stop(draft, lost, together=True)
        case AgentLost(node, reason):
            agent_lost(draft, node, reason)
        case Due.LOSSES:
            losses = draft.state.losses
            draft.put(replace(draft.state, losses={}))
            nodes_lost(draft, losses)
            # No role may start again, and `grow` may have waited for this.
            draft.grow_soon()
        case Due.JOIN:
            _join_timed_out(draft)
        case Due.REJOIN:
            _rejoin_timed_out(draft)
        case Due.VIEW:
            if draft.state.view_due:
                draft.tell_now()


def _cause(state: JobState, event: Event) -> str:
    """The event that `event` follows from: what has brought its role into the present generation; empty for others."""
    match event:
        case StoreOpened():
            name = event.role
        case WorkerStarted() | WorkerRunning() | FromWorker():
            name = event.worker.role
        case _:
            return ""
    return state.roles[name].cause if name in state.roles else ""


def _join(draft: JobDraft, event: Join) -> None:
    state = draft.state
    known = state.agents.get(event.node)
    again = known is not None and (event.node in state.away or known.pid == event.pid)
    if state.given_up(event.node) or event.node in state.losses or (known is not None and not again):
        raise Refused(f"node {event.node} joined twice, or has no place in this job")
    draft.put(
        replace(
            state,
            agents={**state.agents, event.node: bare(event)},
            away=state.away - {event.node},
            uninformed=state.uninformed | {event.node},
        )
    )
    draft.record("join", f"{event.node} joined (pid {event.pid})", event.node)
    if event.ending is not None and state.verdict is None:
        end_as_told(draft, event.ending)
    if event.node in state.newcomers:
        draft.grow_soon()
    if draft.state.phase is JobPhase.LAUNCHING:
        form_if_all_are_there(draft)
    else:
        _rejoined(draft, event)


def _rejoined(draft: JobDraft, event: Join) -> None:
    for news in take_up(draft, event):
        _handle(draft, news)
    for name in draft.state.roles:
        settle(draft, name)
    reserve_again(draft, event.node)
    if not draft.state.away:
        _all_back(draft)


def _all_back(draft: JobDraft) -> None:
    """No node is away any more: each has joined this master, or is lost."""
    for ended in ended_stores(draft.state):
        _handle(draft, ended)
    all_back(draft)
    wait_again(draft)


def _started(draft: JobDraft, event: WorkerStarted) -> None:
    worker, name = draft.find(event.worker), event.worker.role
    if worker is None:
        return
    # `Hello` comes on another stream and may have arrived before.
    phase = WorkerPhase.ALIVE if worker.phase is WorkerPhase.STARTING else worker.phase
    draft.put_worker(name, replace(worker, phase=phase, pid=event.pid), PhaseEvent.FORKED)
    if worker.incarnation:
        draft.record("started", f"{event.worker} has process {event.pid}", str(event.worker))
    draft.send(ToWatchers(output_of(draft.state, name, worker.rank)))


def _running(draft: JobDraft, event: WorkerRunning) -> None:
    worker, name = draft.find(event.worker), event.worker.role
    if worker is None or worker.phase is WorkerPhase.SERVING:
        return
    role = draft.role(name)
    _refuse_later(role, event.generation)
    generation = max(worker.generation, event.generation)
    member = is_member(draft.state, role, worker)
    phase = WorkerPhase.SERVING if member else WorkerPhase.RUNNING
    reason = PhaseEvent.MEMBER_RUNS if member else PhaseEvent.RUNS
    draft.put_worker(name, replace(worker, phase=phase, generation=generation), reason)
    settle(draft, name)
    draft.tell_soon()


def _serving(draft: JobDraft, who: WorkerId, event: Serving) -> None:
    worker = draft.find(who)
    if worker is None:
        return
    addresses = {**worker.addresses, **event.addresses}
    serving = replace(worker, phase=WorkerPhase.SERVING, addresses=addresses, recoverable=event.recoverable)
    draft.put_worker(who.role, serving, PhaseEvent.SERVES)
    settle(draft, who.role)
    if draft.role(who.role).serves:
        draft.tell_now()
    else:
        draft.tell_soon()


def _listening(draft: JobDraft, who: WorkerId, addresses: Mapping[str, str]) -> None:
    worker = draft.find(who)
    if worker is None:
        return
    draft.put_worker(who.role, replace(worker, addresses={**worker.addresses, **addresses}))
    draft.tell_soon()


def _formed(draft: JobDraft, who: WorkerId, event: GroupFormed) -> None:
    worker = draft.find(who)
    if worker is None:
        return
    # It may arrive before the `StoreOpened` of the agent that serves the store.
    _refuse_later(draft.role(who.role), event.generation)
    if event.generation > worker.generation:
        draft.record("formed", f"{who} is in generation {event.generation}", str(who))
        draft.put_worker(who.role, replace(worker, generation=event.generation))
        settle(draft, who.role)


def _refuse_later(role: RoleState, generation: int) -> None:
    """Refuse a generation that no master has decided."""
    if generation > role.generation:
        raise Refused(f"{role.name} has no generation {generation} yet")


def _metrics(draft: JobDraft, who: WorkerId, event: Metrics) -> None:
    draft.send(KeepMetrics(who.role, who.rank, event.time, event.values))
    worker = draft.find(who)
    if worker is not None:
        draft.put_worker(who.role, replace(worker, metrics={**worker.metrics, **event.values}))


def _calls(draft: JobDraft, who: WorkerId, event: Calls) -> None:
    """Counts are cumulative. A worker that has ended may have sent them last."""
    role = draft.role(who.role)
    worker = role.workers[who.rank] if 0 <= who.rank < len(role.workers) else None
    if worker is not None and worker.incarnation == who.incarnation:
        draft.put_worker(who.role, replace(worker, calls=sound(event.counts, draft.state.sizes)))


def _store_opened(draft: JobDraft, event: StoreOpened) -> None:
    role = draft.role(event.role)
    running = draft.state.phase is JobPhase.RUNNING and not draft.state.away
    # A role that restarts may have begun to form a generation before: its workers end first, and then form another one.
    restarts = role.phase is RolePhase.RESTARTING and not role.living
    awaited = running and (restarts or role.phase is RolePhase.REFORMING)
    # While a misplaced worker is in the way, or the job has restarted since and it is not the role's turn, the event is
    # ignored; the store is asked for again later.
    waits = bool(role.due) or obstructed(draft.state, role)
    if awaited and event.generation == role.generation > role.opened and not waits:
        opened(draft, event.role)
        settle(draft, event.role)


def _refuse_unknown(signum: int) -> None:
    if not 1 <= signum < signal.NSIG:
        raise Refused(f"there is no signal {signum}")


def _pass_on(draft: JobDraft, event: PassOn) -> None:
    """Pass a signal on to the workers. It is not repeated when this master dies: they get it once or not at all."""
    _refuse_unknown(event.signal)
    where = f" of {event.node}" if event.node else ""
    draft.record("signal", f"signal {event.signal} is passed on to the workers{where}")
    for node in draft.state.agents:
        if event.node in ("", node):
            draft.order(node, event)


def _inject(draft: JobDraft, event: Inject) -> None:
    """Have an agent inject a fault. The end of the worker then follows from the event that is recorded here."""
    name, rank = event.role, event.rank
    who, role = f"{name}:{rank}", draft.state.roles.get(name)
    worker = role.workers[rank] if role is not None and 0 <= rank < len(role.workers) else None
    problem = ""
    if role is None or worker is None:
        problem = "there is no such rank"
    elif not worker.live or worker.pid is None:
        problem = "it has no process now"
    elif role.is_program and event.fault in ("hang", "hang-gil", "exit", "oom"):
        problem = f"it is a program, and {event.fault} needs a Python worker; signals are possible"
    if problem or worker is None:
        draft.send(ToWatchers(Injected(name, rank, f"{who}: {problem}")))
        return
    draft.record("inject", f"the fault {event} is injected into {who}", who, worker.node)
    draft.put_worker(name, replace(worker, fault=draft.cause))
    draft.order(worker.node, replace(event, incarnation=worker.incarnation))
    draft.send(ToWatchers(Notice(who, f"the fault {event} is injected")))
    draft.send(ToWatchers(Injected(name, rank)))


def _stop(draft: JobDraft, event: Stop, *, together: bool = False) -> None:
    _refuse_unknown(event.signal)
    if not 0 <= event.exit_code <= 255:
        raise Refused(f"a job that is stopped does not end with {event.exit_code}")
    draft.record("stop", event.reason)
    again = event.hurries(draft.state.asked_to_stop)
    draft.put(replace(draft.state, asked_to_stop=True))
    if draft.state.phase is JobPhase.STOPPING:
        # A second request means "now": it ends the grace period. A first request for a job that is ending by itself
        # counts only when it has a grace period of its own.
        for role in draft.state.roles.values():
            if again:
                draft.stop(role.name, signal.SIGKILL, 0.0)
            elif event.grace is not None and role.phase is RolePhase.STOPPING:
                draft.stop(role.name, event.signal, event.grace)
        return
    phase = JobPhase.STOPPED if event.exit_code else JobPhase.SUCCEEDED
    verdict = Verdict(phase, event.exit_code, event.reason)
    stop_all(draft, verdict, event.signal, event.grace, together=together)


def _rejoin_timed_out(draft: JobDraft) -> None:
    if not draft.state.away:
        return
    reason = "it did not join the new master in time"
    nodes_lost(draft, dict.fromkeys(sorted(draft.state.away), reason))
    if draft.state.phase is JobPhase.RUNNING:
        _all_back(draft)


def _join_timed_out(draft: JobDraft) -> None:
    state = draft.state
    here = state.agents.keys() - state.away
    if state.phase is JobPhase.RUNNING:
        # Spare nodes that have not joined are lost.
        late = [node for node in state.nodes if node not in (*state.agents, *state.newcomers)]
        nodes_lost(draft, dict.fromkeys(late, f"it did not join within {state.spec.join_timeout:g} s"))
    if state.phase is not JobPhase.LAUNCHING:
        return
    late = [node for node in state.nodes if node not in here]
    missing = [node for node in state.placement.nodes if node not in here]
    reason = f"{', '.join(missing)} did not join within {state.spec.join_timeout:g} s"
    if not begin_without(draft, late, reason):
        stop_all(draft, Verdict(JobPhase.FAILED, EXIT_RENDEZVOUS, reason), signal.SIGTERM, 0.0)
