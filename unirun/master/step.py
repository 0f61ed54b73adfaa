"""The master's decisions: ``step(state, event, now) -> (state, commands)``. No I/O, no clock of its own."""

from __future__ import annotations

import signal
from dataclasses import replace

from unirun.errors import EXIT_BUDGET, EXIT_FAILURE, EXIT_RENDEZVOUS, IllegalTransition
from unirun.failover import Exit, Failure, decide, diagnose, episode
from unirun.master.events import (
    AgentLost,
    Command,
    Event,
    Finish,
    JoinTimedOut,
    OwnerLost,
    Record,
    ToAgent,
    ToWatchers,
)
from unirun.master.report import failure_report
from unirun.master.state import (
    JOB_ENDS,
    ROLE_ENDS,
    JobPhase,
    JobState,
    RolePhase,
    RoleState,
    Verdict,
    WorkerPhase,
    WorkerState,
)
from unirun.wire.messages import (
    Join,
    Member,
    Notice,
    RoleChanged,
    RoleView,
    Sample,
    SpawnerReady,
    StartRole,
    Stop,
    StopWorkers,
    View,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
    WorkerView,
)

OWNER_LOST_GRACE = 0.4
"""Seconds between TERM and KILL when the CLI was killed: no worker may outlive it by more than a second."""


class _Turn:
    """One step in progress: the state so far and the commands collected."""

    def __init__(self, state: JobState, now: float) -> None:
        self.state = state
        self.now = now
        self.commands: list[Command] = []

    def send(self, *commands: Command) -> None:
        self.commands.extend(commands)

    def put(self, role: RoleState) -> None:
        before = self.state.roles[role.name]
        self.state = self.state.with_role(role)
        if (before.phase, before.running, before.generation) != (role.phase, role.running, role.generation):
            self.send(
                ToWatchers(
                    RoleChanged(role.name, role.phase.value, role.generation, role.running, len(role.workers))
                )
            )


def step(state: JobState, event: Event, now: float) -> tuple[JobState, list[Command]]:
    """The state after `event` at time `now` (seconds since the epoch), and what is to be done.

    Raises `IllegalTransition` for an event that cannot happen in `state`.
    """
    turn = _Turn(state, now)
    if state.phase in JOB_ENDS:
        return state, []
    match event:
        case Join():
            _join(turn, event)
        case SpawnerReady():
            turn.send(
                Record("spawner", f"{event.node}: torch is imported after {event.seconds:.2f} s"),
                ToWatchers(Notice(event.node, f"spawner ready in {event.seconds:.1f} s")),
            )
        case WorkerStarted() | WorkerRunning():
            _progress(turn, event)
        case WorkerExited():
            _exited(turn, event)
        case Notice():
            turn.send(Record("notice", f"{event.source}: {event.text}"), ToWatchers(event))
        case Sample():
            pass
        case Stop():
            _stop(turn, event)
        case OwnerLost():
            _stop(turn, Stop(signal.SIGTERM, "the unirun command was killed", OWNER_LOST_GRACE))
        case AgentLost():
            _agent_lost(turn, event)
        case JoinTimedOut():
            _join_timed_out(turn)
    _end_if_over(turn)
    return turn.state, turn.commands


def _join(turn: _Turn, event: Join) -> None:
    state = turn.state
    agents = dict(state.agents or {})
    if event.node in agents or event.node not in state.placement.nodes:
        raise IllegalTransition(f"node {event.node} joined twice, or has no place in this job")
    agents[event.node] = event
    turn.state = replace(state, agents=agents)
    turn.send(Record("join", f"{event.node} joined (pid {event.pid})"))
    if state.phase is JobPhase.LAUNCHING and len(agents) == len(state.placement.nodes):
        turn.state = replace(turn.state, phase=JobPhase.RUNNING)
        for name in state.roles:
            _start(turn, turn.state.roles[name])


def _start(turn: _Turn, role: RoleState) -> None:
    """Order every worker of `role` for its present generation."""
    workers = tuple(replace(w, phase=WorkerPhase.STARTING, pid=None, exit=None) for w in role.workers)
    role = replace(role, phase=RolePhase.STARTING, workers=workers)
    turn.put(role)
    _send_view(turn)
    places = turn.state.placement.of_role(role.name)
    nodes = tuple(dict.fromkeys(place.node for place in places))
    for group_rank, node in enumerate(nodes):
        here = [place for place in places if place.node == node]
        members = tuple(
            Member(place.rank, place.local_rank, workers[place.rank].incarnation, place.devices, place.cpus)
            for place in here
        )
        order = StartRole(
            role=role.name,
            generation=role.generation,
            restarts=role.restarts,
            world_size=len(workers),
            local_world_size=len(here),
            group_rank=group_rank,
            group_world_size=len(nodes),
            endpoint=_endpoint(turn.state, role.name),
            members=members,
        )
        turn.send(ToAgent(node, order))


def _endpoint(state: JobState, role: str) -> str:
    """Where the role's store listens: at the node of its rank 0."""
    leader = state.placement.of_role(role)[0].node
    return (state.agents or {})[leader].endpoints[role]


def _send_view(turn: _Turn) -> None:
    state = turn.state
    view = View(
        tuple(
            RoleView(
                role.name,
                len(role.workers),
                role.generation,
                _endpoint(state, role.name),
                role.phase.value,
                tuple(WorkerView(w.rank, w.incarnation, w.phase.value, {}) for w in role.workers),
            )
            for role in state.roles.values()
        )
    )
    turn.send(*(ToAgent(node, view) for node in state.agents or {}))


def _progress(turn: _Turn, event: WorkerStarted | WorkerRunning) -> None:
    found = _worker(turn.state, event.role, event.rank, event.incarnation)
    if found is None or not found[1].live:
        return
    role, worker = found
    if isinstance(event, WorkerStarted):
        # Its hello comes on another stream and may have overtaken this.
        phase = WorkerPhase.ALIVE if worker.phase is WorkerPhase.STARTING else worker.phase
        turn.put(role.with_worker(replace(worker, phase=phase, pid=event.pid)))
        turn.send(ToWatchers(event))
        return
    role = role.with_worker(replace(worker, phase=WorkerPhase.RUNNING))
    if role.phase is RolePhase.STARTING and role.running == len(role.workers):
        role = replace(role, phase=RolePhase.RUNNING)
        turn.send(Record("running", f"role {role.name}: all {len(role.workers)} ranks run"))
    turn.put(role)


def _worker(state: JobState, role: str, rank: int, incarnation: int) -> tuple[RoleState, WorkerState] | None:
    """The worker that is meant, or None when the message is about an earlier one."""
    found = state.roles.get(role)
    if found is None or not 0 <= rank < len(found.workers):
        raise IllegalTransition(f"there is no worker {role}:{rank}")
    worker = found.workers[rank]
    if incarnation > worker.incarnation:
        raise IllegalTransition(f"{role}:{rank} has no incarnation {incarnation} yet")
    return (found, worker) if incarnation == worker.incarnation else None


def _exited(turn: _Turn, event: WorkerExited) -> None:
    found = _worker(turn.state, event.role, event.rank, event.incarnation)
    if found is None or not found[1].live:
        return
    role, worker = found
    end = Exit(event.code, event.signal)
    role = role.with_worker(replace(worker, phase=WorkerPhase.EXITED, exit=end))
    if event.asked is not None and role.phase in (RolePhase.STARTING, RolePhase.RUNNING):
        # Not the master asked but the agent, which has to leave; why is told next (AgentLost or OwnerLost).
        role = replace(role, phase=RolePhase.STOPPING)
    turn.put(role)
    text = f"{role.name}:{worker.rank} ended: {end}{', ' + event.note if event.note else ''}"
    turn.send(Record("exit", text))
    if not end.ok and not _was_asked(event):
        failure = _failure(turn.state, role, worker, event, end)
        turn.state = replace(turn.state, failures=(*turn.state.failures, failure)[-256:])
        if role.phase in (RolePhase.STARTING, RolePhase.RUNNING):
            _failed(turn, role, failure)
            return
    _advance(turn, role)


def _was_asked(event: WorkerExited) -> bool:
    """Whether the end is what the signal that was sent to it does, and no failure of its own."""
    if event.asked is None:
        return False
    return event.error is None or event.signal == event.asked or event.code == 128 + event.asked


def _failure(
    state: JobState, role: RoleState, worker: WorkerState, event: WorkerExited, end: Exit
) -> Failure:
    error = event.error
    return Failure(
        role=role.name,
        rank=worker.rank,
        incarnation=worker.incarnation,
        generation=role.generation,
        node=worker.node,
        time=error.time if error else event.time,
        exit=end,
        message=error.message if error else "",
        traceback=error.traceback if error else "",
        note=event.note,
        tail=event.tail,
        log=f"{state.logs}/{role.name}/{worker.rank}/{worker.incarnation}",
    )


def _failed(turn: _Turn, role: RoleState, failure: Failure) -> None:
    """A worker failed of itself in a role that should run: restart the role or end the job."""
    limit = turn.state.role_spec(role.name).max_restarts
    decision = decide(failure, restarts=role.restarts, max_restarts=limit)
    turn.send(Record("decision", decision.reason))
    if decision.action == "restart_role":
        turn.send(ToWatchers(Notice(failure.who, decision.reason)))
        role = replace(role, phase=RolePhase.RESTARTING, restarts=role.restarts + 1)
        turn.put(role)
        _order_stop(turn, role, signal.SIGTERM, turn.state.spec.shutdown_timeout)
        _advance(turn, role)
        return
    turn.put(replace(role, phase=RolePhase.STOPPING))
    code = EXIT_BUDGET if decision.budget_spent else EXIT_FAILURE
    _stop_all(turn, Verdict(JobPhase.FAILED, code, decision.reason, by_failure=True), signal.SIGTERM, None)


def _advance(turn: _Turn, role: RoleState) -> None:
    """What follows when a worker of `role` has ended and that was no new failure."""
    if role.phase in (RolePhase.STARTING, RolePhase.RUNNING):
        if all(worker.exit is not None and worker.exit.ok for worker in role.workers):
            turn.put(replace(role, phase=RolePhase.SUCCEEDED))
            turn.send(Record("role", f"role {role.name} succeeded"))
        return
    if role.live:
        return
    if role.phase is RolePhase.RESTARTING:
        workers = tuple(replace(w, incarnation=w.incarnation + 1) for w in role.workers)
        role = replace(role, generation=role.generation + 1, workers=workers)
        turn.send(Record("restart", f"role {role.name} starts as generation {role.generation}"))
        _start(turn, role)
    elif role.phase is RolePhase.STOPPING:
        failed = any(
            failure.role == role.name and failure.generation == role.generation
            for failure in turn.state.failures
        )
        turn.put(replace(role, phase=RolePhase.FAILED if failed else RolePhase.STOPPED))


def _stop(turn: _Turn, event: Stop) -> None:
    if not 1 <= event.signal < signal.NSIG:
        raise IllegalTransition(f"there is no signal {event.signal}")
    turn.send(Record("stop", event.reason))
    code = 128 + event.signal
    if turn.state.phase is JobPhase.STOPPING:
        # A second request means "now": whatever grace is left is over.
        for role in turn.state.roles.values():
            _order_stop(turn, role, signal.SIGKILL, 0.0)
        return
    _stop_all(turn, Verdict(JobPhase.STOPPED, code, event.reason), event.signal, event.grace)


def _stop_all(turn: _Turn, verdict: Verdict, signum: int, grace: float | None) -> None:
    """Stop every role; the job ends with `verdict` when the last worker is gone."""
    turn.state = replace(turn.state, phase=JobPhase.STOPPING, verdict=verdict)
    turn.send(Record("stopping", verdict.reason))
    grace = turn.state.spec.shutdown_timeout if grace is None else grace
    for role in list(turn.state.roles.values()):
        if role.phase in ROLE_ENDS:
            continue
        role = replace(role, phase=RolePhase.STOPPING)
        turn.put(role)
        _order_stop(turn, role, signum, grace)
        _advance(turn, role)


def _order_stop(turn: _Turn, role: RoleState, signum: int, grace: float) -> None:
    live = role.live
    for node in dict.fromkeys(worker.node for worker in live):
        ranks = tuple(worker.rank for worker in live if worker.node == node)
        turn.send(ToAgent(node, StopWorkers(role.name, ranks, int(signum), grace)))


def _agent_lost(turn: _Turn, event: AgentLost) -> None:
    """Workers never outlive their agent, so those of this node are gone."""
    state = turn.state
    turn.state = replace(state, agents={n: a for n, a in (state.agents or {}).items() if n != event.node})
    turn.send(Record("agent_lost", f"{event.node}: {event.reason}"))
    reason = f"the agent of node {event.node} is gone: {event.reason}"
    killed = Exit(signal=signal.SIGKILL)
    lost: list[Failure] = []
    for role in list(turn.state.roles.values()):
        for worker in role.live:
            if worker.node == event.node:
                end = WorkerExited(
                    role.name, worker.rank, worker.incarnation, turn.now, None, killed.signal, note=reason
                )
                lost.append(_failure(turn.state, role, worker, end, killed))
                gone = replace(worker, phase=WorkerPhase.EXITED, exit=killed)
                turn.put(turn.state.roles[role.name].with_worker(gone))
    if turn.state.phase is not JobPhase.STOPPING:
        turn.state = replace(turn.state, failures=(*turn.state.failures, *lost)[-256:])
        verdict = Verdict(JobPhase.FAILED, 128 + signal.SIGKILL, reason, by_failure=bool(lost))
        _stop_all(turn, verdict, signal.SIGTERM, None)
    for role in list(turn.state.roles.values()):
        _advance(turn, role)


def _join_timed_out(turn: _Turn) -> None:
    state = turn.state
    if state.phase is not JobPhase.LAUNCHING:
        return
    missing = [node for node in state.placement.nodes if node not in (state.agents or {})]
    reason = f"{', '.join(missing)} did not join within {state.spec.join_timeout:g} s"
    _stop_all(turn, Verdict(JobPhase.FAILED, EXIT_RENDEZVOUS, reason), signal.SIGTERM, 0.0)


def _end_if_over(turn: _Turn) -> None:
    state = turn.state
    if state.phase is JobPhase.RUNNING and all(
        state.roles[name].phase is RolePhase.SUCCEEDED for name in state.spec.primary
    ):
        names = ", ".join(state.spec.primary)
        _stop_all(turn, Verdict(JobPhase.SUCCEEDED, 0, f"{names} succeeded"), signal.SIGTERM, None)
        state = turn.state
    if state.phase is not JobPhase.STOPPING or state.live:
        return
    verdict = state.verdict
    if verdict is None:
        raise IllegalTransition("the job is stopping without a verdict")
    report = error_file = ""
    if verdict.by_failure:
        diagnosis = diagnose(episode(state.failures))
        code = verdict.code if verdict.code == EXIT_BUDGET else diagnosis.cause.exit.status
        verdict = replace(verdict, code=code)
        report = failure_report(verdict.reason, diagnosis)
        error_file = f"{diagnosis.cause.log}/error.json"
    turn.state = replace(state, phase=verdict.phase, verdict=verdict, ended=turn.now)
    turn.send(
        Record("end", f"{verdict.phase}: {verdict.reason} (exit code {verdict.code})"),
        Finish(verdict.code, report or verdict.reason, error_file),
    )
