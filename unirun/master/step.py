"""The master's decisions: ``step(state, event, now) -> (state, commands)``. No I/O, no clock of its own."""

from __future__ import annotations

import signal

from msgspec.structs import replace

from unirun.errors import EXIT_RENDEZVOUS, Refused
from unirun.graph import sound
from unirun.master.ending import end_as_told, end_if_over, settle, stop_all
from unirun.master.events import (
    AgentLost,
    Command,
    Event,
    JoinTimedOut,
    KeepMetrics,
    OwnerLost,
    RejoinTimedOut,
    ToWatchers,
    ViewDue,
)
from unirun.master.failing import exited, store_ended
from unirun.master.formation import form_if_all_are_there, obstructed, opened
from unirun.master.moving import begin_without, nodes_lost
from unirun.master.resuming import REJOIN_TIMEOUT, all_back, bare, take_up
from unirun.master.state import (
    JOB_ENDS,
    ROLE_WORKS,
    JobPhase,
    JobState,
    RolePhase,
    RoleState,
    Verdict,
    WorkerPhase,
)
from unirun.master.telling import output_of
from unirun.master.turn import Turn
from unirun.wire.messages import Stop
from unirun.wire.reports import (
    Join,
    Notice,
    SpawnerReady,
    WorkerCalls,
    WorkerExited,
    WorkerFormed,
    WorkerMetrics,
    WorkerRunning,
    WorkerServing,
    WorkerStarted,
)
from unirun.wire.spawning import StoreEnded, StoreOpened

OWNER_LOST_GRACE = 0.4
"""Seconds between TERM and KILL when the CLI was killed: no worker may outlive it by more than a second."""


def step(state: JobState, event: Event, now: float) -> tuple[JobState, list[Command]]:
    """The state after `event` at time `now` (seconds since the epoch), and what is to be done.

    A `Sample` changes nothing: it is for the status alone.

    Raises `Refused` for what a peer has sent that cannot be, and may be dropped; `IllegalTransition` for any other
    event that cannot happen in `state`.
    """
    if state.phase in JOB_ENDS:
        return state, []
    turn = Turn(state, now)
    _handle(turn, event)
    end_if_over(turn)
    return turn.state, turn.commands


def _handle(turn: Turn, event: Event) -> None:
    match event:
        case Join():
            _join(turn, event)
        case SpawnerReady():
            turn.record("spawner", f"{event.node}: torch is imported after {event.seconds:.2f} s")
            turn.send(ToWatchers(Notice(event.node, f"spawner ready in {event.seconds:.1f} s")))
        case WorkerStarted():
            _started(turn, event)
        case WorkerRunning():
            _running(turn, event)
        case WorkerServing():
            _serving(turn, event)
        case WorkerFormed():
            _formed(turn, event)
        case WorkerMetrics():
            _metrics(turn, event)
        case WorkerCalls():
            _calls(turn, event)
        case WorkerExited():
            exited(turn, event)
        case StoreOpened():
            _store_opened(turn, event)
        case StoreEnded():
            store_ended(turn, event)
        case Notice():
            turn.record("notice", f"{event.source}: {event.text}")
            turn.send(ToWatchers(event))
        case Stop():
            _stop(turn, event)
        case OwnerLost():
            _stop(turn, Stop(signal.SIGTERM, "the unirun command was killed", OWNER_LOST_GRACE))
        case AgentLost(node, reason):
            nodes_lost(turn, {node: reason})
        case JoinTimedOut():
            _join_timed_out(turn)
        case RejoinTimedOut():
            _rejoin_timed_out(turn)
        case ViewDue():
            if turn.state.view_due:
                turn.tell_now()


def _join(turn: Turn, event: Join) -> None:
    state = turn.state
    known = state.agents.get(event.node)
    again = known is not None and (event.node in state.away or known.pid == event.pid)
    if state.given_up(event.node) or (known is not None and not again):
        raise Refused(f"node {event.node} joined twice, or has no place in this job")
    turn.state = replace(
        state, agents={**state.agents, event.node: bare(event)}, away=state.away - {event.node}
    )
    turn.record("join", f"{event.node} joined (pid {event.pid})")
    if event.ending is not None and state.verdict is None:
        end_as_told(turn, event.ending)
    if turn.state.phase is JobPhase.LAUNCHING:
        form_if_all_are_there(turn)
    else:
        _rejoined(turn, event)


def _rejoined(turn: Turn, event: Join) -> None:
    for news in take_up(turn, event):
        _handle(turn, news)
    for role in list(turn.state.roles.values()):
        if role.phase in ROLE_WORKS:
            settle(turn, role)
    if not turn.state.away:
        all_back(turn)


def _started(turn: Turn, event: WorkerStarted) -> None:
    found = turn.find(event.role, event.rank, event.incarnation)
    if found is None:
        return
    role, worker = found
    # Its hello comes on another stream and may have overtaken this.
    phase = WorkerPhase.ALIVE if worker.phase is WorkerPhase.STARTING else worker.phase
    turn.put(role.with_worker(replace(worker, phase=phase, pid=event.pid)))
    turn.send(ToWatchers(output_of(turn.state, role.name, worker.rank)))


def _running(turn: Turn, event: WorkerRunning) -> None:
    found = turn.find(event.role, event.rank, event.incarnation)
    if found is None or found[1].phase is WorkerPhase.SERVING:
        return
    role, worker = found
    _refuse_later(role, event.generation)
    generation = max(worker.generation, event.generation)
    settle(turn, role.with_worker(replace(worker, phase=WorkerPhase.RUNNING, generation=generation)))
    turn.tell_soon()


def _serving(turn: Turn, event: WorkerServing) -> None:
    found = turn.find(event.role, event.rank, event.incarnation)
    if found is None:
        return
    role, worker = found
    worker = replace(
        worker, phase=WorkerPhase.SERVING, addresses=event.addresses, recoverable=event.recoverable
    )
    role = role.with_worker(worker)
    settle(turn, role)
    if all(each.phase is WorkerPhase.SERVING for each in role.live):
        turn.tell_now()
    else:
        turn.tell_soon()


def _formed(turn: Turn, event: WorkerFormed) -> None:
    found = turn.find(event.role, event.rank, event.incarnation)
    if found is None:
        return
    role, worker = found
    # Its word may overtake that of the agent that has the store.
    _refuse_later(role, event.generation)
    if event.generation > worker.generation:
        turn.record("formed", f"{role.name}:{worker.rank} is in generation {event.generation}")
        settle(turn, role.with_worker(replace(worker, generation=event.generation)))


def _refuse_later(role: RoleState, generation: int) -> None:
    """No worker is in a generation that no master has decided."""
    if generation > role.generation:
        raise Refused(f"{role.name} has no generation {generation} yet")


def _metrics(turn: Turn, event: WorkerMetrics) -> None:
    turn.send(KeepMetrics(event.role, event.rank, event.time, event.values))
    found = turn.find(event.role, event.rank, event.incarnation)
    if found is not None:
        role, worker = found
        turn.put(role.with_worker(replace(worker, metrics={**worker.metrics, **event.values})))


def _calls(turn: Turn, event: WorkerCalls) -> None:
    """What came last holds all that came before. A worker that is gone may have said it as its last word."""
    role = turn.role(event.role)
    worker = role.workers[event.rank] if 0 <= event.rank < len(role.workers) else None
    if worker is not None and worker.incarnation == event.incarnation:
        turn.put(role.with_worker(replace(worker, calls=sound(event.counts, turn.state.sizes))))


def _store_opened(turn: Turn, event: StoreOpened) -> None:
    role = turn.role(event.role)
    awaited = role.phase in (RolePhase.RESTARTING, RolePhase.REFORMING) and not turn.state.away
    # Where somebody is in the way, it is asked for again when that one is gone.
    if awaited and event.generation == role.generation > role.opened and not obstructed(turn.state, role):
        opened(turn, role)
        settle(turn, turn.role(role.name))


def _stop(turn: Turn, event: Stop) -> None:
    if not 1 <= event.signal < signal.NSIG:
        raise Refused(f"there is no signal {event.signal}")
    if not 1 <= event.exit_code <= 255:
        raise Refused(f"a job that is stopped does not end with {event.exit_code}")
    turn.record("stop", event.reason)
    again, turn.state = turn.state.asked_to_stop, replace(turn.state, asked_to_stop=True)
    if turn.state.phase is JobPhase.STOPPING:
        # A second request means "now": whatever grace is left is over. The first one may find a job that ends by
        # itself, and has something to add only when it has less patience.
        for role in turn.state.roles.values():
            if again:
                turn.stop(role, signal.SIGKILL, 0.0)
            elif event.grace is not None:
                turn.stop(role, event.signal, event.grace)
        return
    stop_all(turn, Verdict(JobPhase.STOPPED, event.exit_code, event.reason), event.signal, event.grace)


def _rejoin_timed_out(turn: Turn) -> None:
    if not turn.state.away:
        return
    reason = f"it did not join the new master within {REJOIN_TIMEOUT:g} s"
    nodes_lost(turn, dict.fromkeys(sorted(turn.state.away), reason))
    if turn.state.phase is JobPhase.RUNNING:
        all_back(turn)


def _join_timed_out(turn: Turn) -> None:
    state = turn.state
    here = state.agents.keys() - state.away
    if state.phase is JobPhase.RUNNING:
        # Nodes that are held back and have not come are nodes that are not there.
        late = [node for node in state.nodes if node not in state.agents]
        nodes_lost(turn, dict.fromkeys(late, f"it did not join within {state.spec.join_timeout:g} s"))
    if state.phase is not JobPhase.LAUNCHING:
        return
    late = [node for node in state.nodes if node not in here]
    missing = [node for node in state.placement.nodes if node not in here]
    reason = f"{', '.join(missing)} did not join within {state.spec.join_timeout:g} s"
    if not begin_without(turn, late, reason):
        stop_all(turn, Verdict(JobPhase.FAILED, EXIT_RENDEZVOUS, reason), signal.SIGTERM, 0.0)
