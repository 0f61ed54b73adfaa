"""Transitions of the agent's state machine on messages of workers, on the end of their links, and on timers."""

from __future__ import annotations

import signal

from msgspec.structs import replace

from unirun.launcher.ends import short_error
from unirun.launcher.events import (
    After,
    Command,
    LinkClosed,
    LinkMessage,
    Signal,
    StillEnding,
    StillWithoutLink,
    TimerExpired,
    ToLink,
    ToMaster,
    ToSpawner,
    Worker,
)
from unirun.launcher.health import engines_of, weighted
from unirun.launcher.state import AgentState
from unirun.wire.asking import Ask, ToWorker
from unirun.wire.messages import Hello, whole
from unirun.wire.reports import (
    Calls,
    EngineWeights,
    FromWorker,
    GroupFormed,
    GroupMeets,
    Listening,
    Metrics,
    Notice,
    Serving,
    Stuck,
    ViewWanted,
    WorkerError,
    WorkerRunning,
)
from unirun.wire.spawning import Kill

ENDING = 5.0
"""Seconds between the normal end of a link and that of its process: the interpreter closes it before it unloads
torch."""

MAX_STACK = 4096
"""Maximum number of characters of a reported stack."""

EXIT_LIMIT = 600.0
"""Seconds for a worker's exit handlers and threads after its code has failed by itself.

Long enough to upload a checkpoint in an exit handler. torchrun has no limit, so that a thread that never ends hangs the
job.
"""


def from_worker(state: AgentState, event: LinkMessage) -> tuple[AgentState, list[Command]]:
    """Apply a message of a worker."""
    worker = state.workers.get(event.id)
    if worker is None:
        return state, []
    match event.message:
        case Hello(running=running):
            told: list[Command] = []
            if running and not worker.running:
                state, told = runs(state, worker)
            if worker.who.role in state.companions:
                told = [*told, ToLink(worker.id, engines_of(state, worker))]
            return state, told
        case EngineWeights():
            return weighted(state, worker, event.message)
        case WorkerError():
            return _has_failed(state, worker, event.message)
        case Serving(addresses):
            addresses = {**worker.addresses, **addresses}
            state = state.with_worker(replace(worker, serving=event.message, addresses=addresses))
            return state, [ToMaster(FromWorker(worker.who, event.message))]
        case Listening(addresses):
            state = state.with_worker(replace(worker, addresses={**worker.addresses, **addresses}))
            return state, [ToMaster(FromWorker(worker.who, event.message))]
        case GroupFormed(generation):
            state = state.with_worker(replace(worker, generation=max(generation, worker.generation)))
            return state, [ToMaster(FromWorker(worker.who, event.message))]
        case GroupMeets(generation):
            return state.with_worker(replace(worker, met=max(generation, worker.met))), []
        case ViewWanted():
            return state, [ToLink(worker.id, whole(state.view))] if state.view is not None else []
        case Stuck():
            return _end_stuck(state, worker, event.message)
        case Notice():
            return state, [ToMaster(replace(event.message, source=str(worker.who)))]
        case Metrics():
            return state, [ToMaster(FromWorker(worker.who, event.message))]
        case Calls(counts):
            state = state.with_worker(replace(worker, calls=counts))
            return state, [ToMaster(FromWorker(worker.who, event.message))]
        case Ask(number):
            ask = FromWorker(worker.who, event.message)
            return replace(state, asks={**state.asks, (worker.id, number): ask}), [ToMaster(ask)]
    return state, []


def _has_failed(state: AgentState, worker: Worker, error: WorkerError) -> tuple[AgentState, list[Command]]:
    """The worker's code has failed, but its process still joins threads and runs exit handlers.

    As with torchrun, nothing is decided before the process has ended. A worker that was told to end is in its grace
    period already.
    """
    first = worker.error is None and worker.sent is None
    state = state.with_worker(replace(worker, error=short_error(error)))
    return state, [After(worker.grace, StillEnding(worker.id, worker.grace))] if first else []


def still_ending(state: AgentState, event: StillEnding) -> tuple[AgentState, list[Command]]:
    """Kill a worker that has failed by itself but does not exit, or wait until `EXIT_LIMIT`."""
    worker = state.workers.get(event.id)
    if worker is None or worker.sent is not None:
        return state, []
    left = 0.0 if _is_replaced_alone(state, worker) else EXIT_LIMIT - event.waited
    text = f"has failed {event.waited:g} s ago, and its exit handlers or threads still run; it is killed"
    if left > 0:
        told = Notice(str(worker.who), f"{text} if it has not ended in another {left:g} s")
        return state, [ToMaster(told), After(left, StillEnding(worker.id, EXIT_LIMIT))]
    # It was not told to end, so the SIGKILL counts as part of its failure.
    return state, [
        ToSpawner(worker.spawner, Kill(worker.id, int(signal.SIGKILL))),
        ToMaster(Notice(str(worker.who), text)),
    ]


def _is_replaced_alone(state: AgentState, worker: Worker) -> bool:
    """Return True if `worker` is restarted while its peers wait, so that its slow exit delays them.

    A trainer that is not recoverable is not restarted: the job ends with it.
    """
    lasting = worker.request.kind == "trainer" and not (worker.serving and worker.serving.recoverable)
    return worker.who.role in state.in_place and not lasting


def _end_stuck(state: AgentState, worker: Worker, told: Stuck) -> tuple[AgentState, list[Command]]:
    """Kill a worker that waits and keeps its role from being formed; the master restarts it."""
    if worker.sent is not None or worker.cause != "own":
        return state, []
    state = state.with_worker(replace(worker, cause="stuck", doom=told.why))
    text = f"is killed: {told.why}; it was at\n{told.stack[-MAX_STACK:]}"
    return state, [
        ToMaster(Notice(str(worker.who), text)),
        ToSpawner(worker.spawner, Kill(worker.id, int(signal.SIGKILL))),
    ]


def answered(state: AgentState, answer: ToWorker) -> tuple[AgentState, list[Command]]:
    """Forward a master's answer to its worker."""
    worker = state.find(answer.worker.role, answer.worker.rank)
    if worker is None or worker.who != answer.worker:
        return state, []
    asks = {n: ask for n, ask in state.asks.items() if n != (worker.id, answer.message.number)}
    return replace(state, asks=asks), [ToLink(worker.id, answer.message)]


def runs(state: AgentState, worker: Worker) -> tuple[AgentState, list[Command]]:
    """The worker enters the user's code, in the generation of the present view, even if started for an earlier one."""
    views = {role.name: role for role in state.view.roles} if state.view else {}
    generation = views[worker.who.role].generation if worker.who.role in views else 0
    state = state.with_worker(replace(worker, running=True, generation=generation))
    return state, [ToMaster(WorkerRunning(worker.who, generation))]


def timer_expired(state: AgentState, event: TimerExpired) -> tuple[AgentState, list[Command]]:
    """A worker, or a process that it has started, did not release a torch timer in time."""
    worker = next((each for each in state.workers.values() if each.pid == event.session), None)
    scopes = ", ".join(repr(scope) for scope in event.scopes[:3])
    if worker is None:
        # The pid may have been reused.
        text = f"timer {scopes} of process {event.pid}, which belongs to no worker of this node, has expired"
        return state, [ToMaster(Notice(state.node, text))]
    text = f"its timer {scopes} has expired"
    told = Notice(str(worker.who), f"{text}: process {event.pid} is sent {signal_name(event.signal)}")
    return state.with_worker(replace(worker, expired=text)), [
        ToMaster(told),
        Signal(event.pid, event.signal),
    ]


def signal_name(number: int) -> str:
    """``SIGKILL``, or the number of a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def link_closed(state: AgentState, event: LinkClosed) -> tuple[AgentState, list[Command]]:
    """A link normally ends with its process: check again after `ENDING` seconds."""
    worker = state.workers.get(event.id)
    if worker is None or worker.sent is not None:
        return state, []
    return state, [After(ENDING, StillWithoutLink(event.id))]


def still_without_link(state: AgentState, event: StillWithoutLink) -> tuple[AgentState, list[Command]]:
    """Report a worker that still lives some time after its link has ended."""
    worker = state.workers.get(event.id)
    if worker is None:
        return state, []
    text = "closed its link to the agent and runs on; only its exit can be seen now"
    return state, [ToMaster(Notice(str(worker.who), text))]
