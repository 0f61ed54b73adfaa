"""The agent's state machine: ``step(state, event) -> (state, commands)``. No I/O, no clock.

The master decides which workers run. This decides how: which spawner forks a worker, when SIGTERM is followed by
SIGKILL, which messages are sent, and what follows when the master, the command or a spawner is gone.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from unirun.errors import Refused
from unirun.launcher.environment import SpawnerKey
from unirun.launcher.events import (
    Abandon,
    AgentState,
    CallLater,
    Command,
    Event,
    FromSpawner,
    GraceOver,
    Hung,
    Instruction,
    KillGroups,
    Launch,
    Leave,
    Led,
    LinkClosed,
    LinkMessage,
    Order,
    Phase,
    Probed,
    ReadyDue,
    RendezvousStore,
    SendFault,
    Signal,
    SignalSpawner,
    SpawnerDown,
    StartProbing,
    StartSpawner,
    StillEnding,
    StillImporting,
    StillWithoutLink,
    StopDue,
    StopProbing,
    Throttle,
    TimerExpired,
    ToLink,
    ToLinks,
    ToMaster,
    ToSpawner,
    Worker,
    held,
    short_end,
    short_error,
)
from unirun.values import Engine
from unirun.wire.messages import (
    ExitAck,
    Fault,
    Hello,
    Inject,
    PassOn,
    Shutdown,
    StopWorkers,
    View,
    updated,
    whole,
)
from unirun.wire.reports import (
    VERSION,
    Arrivals,
    Boundary,
    Calls,
    Cause,
    CommitJob,
    EngineWeights,
    Forked,
    FromWorker,
    GroupFormed,
    GroupMeets,
    Health,
    Kill,
    Listening,
    LocalEngines,
    MasterReply,
    MasterRequest,
    Metrics,
    Notice,
    Reaped,
    Resilient,
    Serving,
    SpawnerReady,
    SpawnFailed,
    StoreEnded,
    StoreOpened,
    Stuck,
    ViewWanted,
    WorkerError,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
)

# Transitions of the agent's state machine on the answers of programs to their probes, and on the weights of engines.
#
# An engine that was started, for the first time or again, has other weights than its channel. Its companion, a worker
# of the same node, learns here which engines there are, and tells when one has the latest version: then it is ready.


def probed(state: AgentState, event: Probed) -> tuple[AgentState, list[Command]]:
    """Take an answer. A program that was ready stays so while it misses some; after too many in a row it is killed.

    It is not called unready at the first miss: clients would send all of its requests to others, and a server that is
    busy for a moment has not lost them.
    """
    worker = state.workers.get(event.id)
    if worker is None or worker.cause != "own":
        return state, []
    misses = worker.misses + 1 if worker.was_ready and not event.ok else 0
    worker = replace(worker, misses=misses, was_ready=worker.was_ready or event.ok)
    why = event.why
    if misses and worker.alive:
        why = f"did not answer {misses} of {worker.alive.misses} times: {event.why}"
    state, told = _told(state, worker, why, event.time)
    if worker.was_ready and worker.alive is not None and misses >= worker.alive.misses:
        times = f"{misses} times in a row" if misses > 1 else "once"
        state, more = _kill(state, worker, "silent", f"did not answer {times}: {event.why}")
        return state, [*told, *more]
    return state, told


def ready_due(state: AgentState, event: ReadyDue) -> tuple[AgentState, list[Command]]:
    """Kill a program that is not ready in time, or has no weights by then."""
    worker = state.workers.get(event.id)
    if worker is None or worker.cause != "own" or (worker.health is not None and worker.health.ready):
        return state, []
    why = worker.health.why if worker.health is not None else "it was not asked yet"
    return _kill(state, worker, "unready", f"was not ready within {worker.ready_timeout:g} s: {why}")


def _end_hung(state: AgentState, event: Hung) -> tuple[AgentState, list[Command]]:
    """Kill a worker that hangs. It is named at once, as peers on other nodes may fail before its end is known."""
    worker = state.workers.get(event.id)
    if worker is None or worker.sent is not None or worker.cause != "own":
        return state, []
    state, kill = _kill(state, worker, "hung", event.why)
    return state, [ToMaster(Notice(str(worker.who), event.why)), *kill]


def weighted(state: AgentState, companion: Worker, said: EngineWeights) -> tuple[AgentState, list[Command]]:
    """Apply a companion's message: an engine has a version, or could not be given one and is killed."""
    found = (each for each in state.workers.values() if each.companion == companion.who.role)
    worker = next(
        (w for w in found if (w.who.rank, w.who.incarnation) == (said.rank, said.incarnation)), None
    )
    if worker is None or worker.cause != "own":
        return state, []
    if said.problem:
        return _kill(state, worker, "torn", said.problem)
    why = worker.health.why if worker.health is not None and worker.misses else ""
    state, told = _told(state, replace(worker, current=True), why, said.time)
    if said.version is not None:
        metrics = Metrics({f"{said.channel}{VERSION}": float(said.version)}, said.time)
        told.append(ToMaster(FromWorker(worker.who, metrics)))
    return state, told


def _told(state: AgentState, worker: Worker, why: str, time: float) -> tuple[AgentState, list[Command]]:
    """Put `worker`, and tell the master when its readiness, or the reason for it, has changed."""
    lacks = worker.was_ready and worker.companion and not worker.current
    ready, why = worker.was_ready and not lacks, "it waits for its weights" if lacks else why
    before = worker.health
    if before is not None and (before.ready, before.why) == (ready, why):
        return state.with_worker(worker), []
    since = before.since if before is not None and before.ready == ready else time
    health = Health(ready, since, why)
    state = state.with_worker(replace(worker, health=health))
    return state, [ToMaster(FromWorker(worker.who, health))]


def engines_of(state: AgentState, companion: Worker) -> LocalEngines:
    """The engines of this node that `companion` brings weights into. Of several companions it is the first; there are
    some when engines have left another node."""
    name = companion.who.role
    first = min((w.who.rank for w in state.workers.values() if w.who.role == name), default=0)
    if companion.who.rank != first:
        return LocalEngines(())
    found = (w for w in state.workers.values() if w.companion == name and w.cause == "own")
    return LocalEngines(tuple(Engine(w.who.rank, w.who.incarnation, w.url, w.was_ready) for w in found))


def tell_companions(before: AgentState, state: AgentState) -> list[Command]:
    """Tell the companions of engines of this node what has changed."""
    if before.workers is state.workers or not state.companions:
        return []
    there = [worker for worker in state.workers.values() if worker.who.role in state.companions]
    told = {worker.id: engines_of(state, worker) for worker in there}
    return [ToLink(each.id, told[each.id]) for each in there if told[each.id] != engines_of(before, each)]


def _kill(state: AgentState, worker: Worker, cause: Cause, why: str) -> tuple[AgentState, list[Command]]:
    state = state.with_worker(replace(worker, cause=cause, kill_reason=why))
    return state, [ToSpawner(worker.spawner, Kill(worker.id, int(signal.SIGKILL)))]


# Transitions of the agent's state machine on messages of workers, on the end of their links, and on timers.

UNLINKED_TIMEOUT = 5.0
"""Seconds between the normal end of a link and that of its process: the interpreter closes it before it unloads
torch."""

MAX_STACK = 4096
"""Maximum number of characters of a reported stack."""

WORKER_EXIT_TIMEOUT = 600.0
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
        case Hello():
            told: list[Command] = []
            if not worker.running:
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
        case Resilient(inside):
            state = state.with_worker(replace(worker, resilient=inside))
            return state, [ToMaster(FromWorker(worker.who, event.message))]
        case Stuck():
            return _end_stuck(state, worker, event.message)
        case Notice():
            return state, [ToMaster(replace(event.message, source=str(worker.who)))]
        case Metrics() | Boundary() | Arrivals():
            return state, [ToMaster(FromWorker(worker.who, event.message))]
        case Calls(counts):
            state = state.with_worker(replace(worker, calls=counts))
            return state, [ToMaster(FromWorker(worker.who, event.message))]
        case MasterRequest(number) | CommitJob(number):
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
    return state, [CallLater(worker.grace, StillEnding(worker.id, worker.grace))] if first else []


def still_ending(state: AgentState, event: StillEnding) -> tuple[AgentState, list[Command]]:
    """Kill a worker that has failed by itself but does not exit, or wait until `WORKER_EXIT_TIMEOUT`."""
    worker = state.workers.get(event.id)
    if worker is None or worker.sent is not None:
        return state, []
    left = 0.0 if _is_replaced_alone(state, worker) else WORKER_EXIT_TIMEOUT - event.waited
    text = f"has failed {event.waited:g} s ago, and its exit handlers or threads still run; it is killed"
    if left > 0:
        told = Notice(str(worker.who), f"{text} if it has not ended in another {left:g} s")
        return state, [ToMaster(told), CallLater(left, StillEnding(worker.id, WORKER_EXIT_TIMEOUT))]
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
    return state.survives(worker.who.role) and not lasting


def _end_stuck(state: AgentState, worker: Worker, told: Stuck) -> tuple[AgentState, list[Command]]:
    """Kill a worker that waits and keeps its role from being formed; the master restarts it."""
    if worker.sent is not None or worker.cause != "own":
        return state, []
    state = state.with_worker(replace(worker, cause="stuck", kill_reason=told.why))
    text = f"is killed: {told.why}; it was at\n{told.stack[-MAX_STACK:]}"
    return state, [
        ToMaster(Notice(str(worker.who), text)),
        ToSpawner(worker.spawner, Kill(worker.id, int(signal.SIGKILL))),
    ]


def answered(state: AgentState, answer: MasterReply) -> tuple[AgentState, list[Command]]:
    """Forward a master's answer to its worker."""
    worker = state.find(answer.worker.role, answer.worker.rank)
    if worker is None or worker.who != answer.worker:
        return state, []
    asks = {n: ask for n, ask in state.asks.items() if n != (worker.id, answer.number)}
    return replace(state, asks=asks), [ToLink(worker.id, answer)]


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
    """A link normally ends with its process: check again after `UNLINKED_TIMEOUT` seconds."""
    worker = state.workers.get(event.id)
    if worker is None or worker.sent is not None:
        return state, []
    return state, [CallLater(UNLINKED_TIMEOUT, StillWithoutLink(event.id))]


def still_without_link(state: AgentState, event: StillWithoutLink) -> tuple[AgentState, list[Command]]:
    """Report a worker that still lives some time after its link has ended."""
    worker = state.workers.get(event.id)
    if worker is None:
        return state, []
    text = "closed its link to the agent and runs on; only its exit can be seen now"
    return state, [ToMaster(Notice(str(worker.who), text))]


def step(state: AgentState, event: Event) -> tuple[AgentState, list[Command]]:
    """Apply `event`. Returns the next state and the commands to carry out. Raises `Refused`."""
    after, commands = _step(state, event)
    return after, [*commands, *tell_companions(state, after)]


def _step(state: AgentState, event: Event) -> tuple[AgentState, list[Command]]:
    match event:
        case Led(epoch):
            return replace(state, epoch=max(epoch, state.epoch)), []
        case Order(epoch, what):
            # The last orders of an earlier term may arrive late; they are ignored.
            return _carry_out(state, what) if epoch >= state.epoch else (state, [])
        case Abandon(grace=grace, signal=signum):
            return _leave(state, state.workers.values(), signum if grace else signal.SIGKILL, grace)
        case FromSpawner():
            return _from_spawner(state, event)
        case SpawnerDown():
            return _spawner_down(state, event)
        case LinkMessage():
            return from_worker(state, event)
        case LinkClosed():
            return link_closed(state, event)
        case GraceOver():
            return _grace_over(state, event)
        case StopDue(number, signum, grace):
            worker = state.workers.get(number)
            if worker is None or worker.sent is not None:
                return state, []
            return _stop(state, [(worker.who.role, worker.who.rank)], signum, grace, "order")
        case Throttle():
            return throttle(state, event)
        case StillEnding():
            return still_ending(state, event)
        case StillWithoutLink():
            return still_without_link(state, event)
        case TimerExpired():
            return timer_expired(state, event)
        case Probed():
            return probed(state, event)
        case ReadyDue():
            return ready_due(state, event)
        case StillImporting():
            return _still_importing(state, event)
        case Hung():
            return _end_hung(state, event)


def _carry_out(state: AgentState, what: Instruction) -> tuple[AgentState, list[Command]]:
    match what:
        case Launch():
            return _launch(state, what)
        case RendezvousStore():
            return _open_store(state, what)
        case StopWorkers(after=delay) if delay:
            # Those that live now: a rank may have a successor by then.
            found = [state.find(what.role, rank) for rank in what.ranks]
            due = [StopDue(each.id, what.signal, what.grace) for each in found if each is not None]
            return state, [CallLater(delay, each) for each in due]
        case StopWorkers():
            who = [(what.role, rank) for rank in what.ranks]
            return _stop(state, who, what.signal, what.grace, "order")
        case PassOn(signum):
            # Not to their children.
            pids = [each.pid for each in state.workers.values() if each.pid is not None]
            return state, [Signal(pid, signum, handled=True) for pid in pids]
        case Inject():
            return _inject(state, what)
        case ExitAck(kept):
            return replace(state, ended={who: held for who, held in state.ended.items() if who != kept}), []
        case MasterReply():
            return answered(state, what)
        case View():
            view = updated(state.view, what)
            if view is None:
                return state, [ToMaster(ViewWanted(state.node))]
            return replace(state, view=view), [ToLinks(what)]
        case Shutdown(grace, ending):
            state = replace(state, ending=ending or state.ending)
            if grace is None:
                return _leave(state, state.workers.values(), signal.SIGKILL, 0.0)
            untold = [worker for worker in state.workers.values() if worker.sent is None]
            return _leave(state, untold, signal.SIGTERM, grace)


FAULT_SIGNALS: Mapping[Fault, signal.Signals] = {
    "sigkill": signal.SIGKILL,
    "sigstop": signal.SIGSTOP,
    "segv": signal.SIGSEGV,
}

THROTTLE_INTERVAL = 0.1
"""Seconds in which a worker that is slowed down stops and goes on once."""


def _inject(state: AgentState, what: Inject) -> tuple[AgentState, list[Command]]:
    """Inject a fault, unless the worker has ended, or was told to. Its end counts as its own."""
    worker = state.find(what.role, what.rank)
    if worker is None or worker.who.incarnation != what.incarnation or worker.sent is not None:
        return state, []
    if what.fault == "slow":
        return throttle(state, Throttle(worker.id, max(what.amount, 1.0), stop=True))
    if (signum := FAULT_SIGNALS.get(what.fault)) is not None:
        return state, [ToSpawner(worker.spawner, Kill(worker.id, int(signum)))]
    if worker.pid is None:
        return state, []
    folder = f"{worker.request.logs}/{worker.request.folder}"
    return state, [SendFault(worker.who, worker.pid, folder, str(what))]


def throttle(state: AgentState, event: Throttle) -> tuple[AgentState, list[Command]]:
    """Stop a worker, or let it go on, and come back to it. One that was told to end goes on."""
    worker = state.workers.get(event.id)
    if worker is None or (worker.sent is not None and event.stop):
        return state, []
    signum = signal.SIGSTOP if event.stop else signal.SIGCONT
    commands: list[Command] = [ToSpawner(worker.spawner, Kill(worker.id, int(signum)))]
    if worker.sent is None:
        runs = THROTTLE_INTERVAL / event.factor
        delay = THROTTLE_INTERVAL - runs if event.stop else runs
        commands.append(CallLater(delay, replace(event, stop=not event.stop)))
    return state, commands


def _launch(state: AgentState, event: Launch) -> tuple[AgentState, list[Command]]:
    commands: list[Command] = []
    for worker in event.workers:
        rank = worker.who.role, worker.who.rank
        if worker.who.incarnation <= state.launched.get(rank, -1):
            # A new master repeats orders that its predecessor has sent.
            continue
        if state.leaving:
            # The order crossed with the reason to leave.
            state, told = _never_started(state, worker, signal.SIGTERM, "leaving", "its agent leaves")
            commands.append(told)
            continue
        holder = state.find(*rank)
        if holder is not None:
            text = f"incarnation {worker.who.incarnation} is not started: {holder.who.incarnation} lives"
            commands.append(ToMaster(Notice(str(worker.who), text)))
            continue
        state = replace(state, launched={**state.launched, rank: worker.who.incarnation})
        state, more = _need_spawner(state, worker.spawner)
        commands += more
        if state.spawners[worker.spawner]:
            worker = replace(worker, phase=Phase.FORKING)
            commands.append(ToSpawner(worker.spawner, worker.request))
        state = state.with_worker(worker)
        store = state.stores.get(worker.who.role)
        if store is not None and store.ended is not None and not state.survives(worker.who.role):
            state, more = _lose_store(state, worker, store.ended)
            commands += more
    return state, commands


def _open_store(state: AgentState, store: RendezvousStore) -> tuple[AgentState, list[Command]]:
    before = state.stores.get(store.request.role)
    if state.leaving:
        return state, []
    if before is not None and before.request.generation >= store.request.generation:
        # A new master repeats the order to learn the state of the store.
        return state, [ToMaster(news) for news in (_standing(before),) if news is not None]
    state, commands = _need_spawner(state, store.spawner)
    if state.spawners[store.spawner]:
        store = replace(store, sent=True)
        commands.append(ToSpawner(store.spawner, store.request))
    return replace(state, stores={**state.stores, store.request.role: store}), commands


def _standing(store: RendezvousStore) -> StoreOpened | StoreEnded | None:
    """The message for the present state of a store; None while it opens."""
    if store.ended is not None:
        return store.ended
    return StoreOpened(store.request.role, store.request.generation) if store.opened else None


def _need_spawner(state: AgentState, key: SpawnerKey) -> tuple[AgentState, list[Command]]:
    if key in state.spawners:
        return state, []
    starts = {**state.starts, key: state.starts.get(key, 0) + 1}
    look = CallLater(IMPORT_LOOK_INTERVAL, StillImporting(key, IMPORT_LOOK_INTERVAL, starts[key]))
    state = replace(state, spawners={**state.spawners, key: False}, starts=starts)
    return state, [StartSpawner(key), look]


def start_spawners(state: AgentState, keys: Iterable[SpawnerKey]) -> tuple[AgentState, list[Command]]:
    """Start spawners that no order needs yet."""
    commands: list[Command] = []
    for key in keys:
        state, more = _need_spawner(state, key)
        commands += more
    return state, commands


IMPORT_LOOK_INTERVAL = 2.0
"""Seconds between two looks whether a spawner still imports."""

IMPORT_TIMEOUT = 900.0
"""Seconds in which a spawner imports torch and what the job preloads. A file system that many hosts read is slow."""


def _still_importing(state: AgentState, event: StillImporting) -> tuple[AgentState, list[Command]]:
    """Let a spawner go on that somebody has stopped (SIGSTOP): all of its workers wait for it. End one that never
    comes to the end of its imports."""
    if state.spawners.get(event.key, True) or event.start != state.starts.get(event.key, 0):
        return state, []
    if event.waited >= IMPORT_TIMEOUT:
        text = f"a spawner has not ended its imports within {IMPORT_TIMEOUT:g} s and is killed"
        return state, [ToMaster(Notice(state.node, text)), SignalSpawner(event.key, int(signal.SIGKILL))]
    again = replace(event, waited=event.waited + IMPORT_LOOK_INTERVAL)
    return state, [SignalSpawner(event.key, int(signal.SIGCONT)), CallLater(IMPORT_LOOK_INTERVAL, again)]


def _stop(
    state: AgentState, who: list[tuple[str, int]], signum: int, grace: float, cause: Cause
) -> tuple[AgentState, list[Command]]:
    commands: list[Command] = []
    for role, rank in who:
        worker = state.find(role, rank)
        if worker is None or worker.cause == "hung":
            # The latter was sent SIGKILL, and did not end because of this order.
            continue
        if worker.phase is Phase.QUEUED:
            state, told = _never_started(_without(state, worker), worker, signum, cause, "it had not started")
            commands.append(told)
            continue
        if worker.sent == signal.SIGKILL:
            continue
        if worker.sent != signum:
            # A new master repeats the order; the worker gets the signal once.
            commands.append(ToSpawner(worker.spawner, Kill(worker.id, signum)))
        state = state.with_worker(replace(worker, cause=cause, sent=signum))
        if signum != signal.SIGKILL:
            commands.append(CallLater(grace, GraceOver(worker.id)))
    return state, commands


def _never_started(
    state: AgentState, worker: Worker, signum: int, cause: Cause, note: str
) -> tuple[AgentState, ToMaster]:
    """End a worker without a process as if `signum` had killed it."""
    signum = int(signum)
    end = WorkerExited(worker.who, 0.0, None, signum, cause, signum, note=note)
    return _remembering(state, worker, end), ToMaster(end)


def _remembering(state: AgentState, worker: Worker, end: WorkerExited) -> AgentState:
    """Keep the exit of a worker until a master acknowledges it."""
    return replace(state, ended={**state.ended, worker.who: replace(held(worker), exit=end)})


def _leave(
    state: AgentState, workers: Iterable[Worker], signum: int, grace: float
) -> tuple[AgentState, list[Command]]:
    """Stop `workers`; the agent leaves when all workers have ended."""
    state = replace(state, leaving=True)
    who = [(worker.who.role, worker.who.rank) for worker in workers]
    state, commands = _stop(state, who, signum, grace, "leaving")
    return (state, [*commands, Leave()]) if not state.workers else (state, commands)


def _from_spawner(state: AgentState, event: FromSpawner) -> tuple[AgentState, list[Command]]:
    match event.message:
        case SpawnerReady(seconds):
            return _spawner_ready(state, event.key, seconds)
        case Forked(number) | SpawnFailed(number) | Reaped(number) if number not in state.workers:
            text = f"a spawner sent a message about worker {number}, which does not exist: {event.message}"
            return state, [ToMaster(Notice(state.node, text))]
        case Forked(number, pid):
            return _forked(state, state.workers[number], pid)
        case SpawnFailed(number, when, reason):
            return _ended(state, state.workers[number], when, 1, None, reason)
        case Reaped(number, when, code, signum):
            end = (when, code, signum, event.note, event.tail)
            return _ended(state, state.workers[number], *end, taken=event.taken, step=event.step)
        case StoreOpened():
            return _store_opened(state, event.message)
        case Notice():
            return state, [ToMaster(event.message)]
        case StoreEnded():
            return _store_ended(state, event.message)
    raise Refused(f"a spawner sent {type(event.message).__name__}")


def _forked(state: AgentState, worker: Worker, pid: int) -> tuple[AgentState, list[Command]]:
    state = state.with_worker(replace(worker, phase=Phase.ALIVE, pid=pid))
    commands: list[Command] = [ToMaster(WorkerStarted(worker.who, pid))]
    if worker.request.kind == "program":
        # A program does not send `Hello`: it counts as running from its start.
        state, more = runs(state, state.workers[worker.id])
        commands += more
    if worker.ready is not None:
        commands += [StartProbing(worker.id), CallLater(worker.ready_timeout, ReadyDue(worker.id))]
    return state, commands


def _spawner_ready(state: AgentState, key: SpawnerKey, seconds: float) -> tuple[AgentState, list[Command]]:
    state = replace(state, spawners={**state.spawners, key: True})
    commands: list[Command] = [ToMaster(SpawnerReady(seconds, state.node))] if seconds >= 0.1 else []
    for role, store in state.stores.items():
        if store.spawner == key and not store.sent and not store.ended:
            state = replace(state, stores={**state.stores, role: replace(store, sent=True)})
            commands.append(ToSpawner(key, store.request))
    for worker in state.workers.values():
        if worker.spawner == key and worker.phase is Phase.QUEUED:
            state = state.with_worker(replace(worker, phase=Phase.FORKING))
            commands.append(ToSpawner(key, worker.request))
    return state, commands


def _spawner_down(state: AgentState, event: SpawnerDown) -> tuple[AgentState, list[Command]]:
    spawners = {key: ready for key, ready in state.spawners.items() if key != event.key}
    state = replace(state, spawners=spawners)
    lost = [worker for worker in state.workers.values() if worker.spawner == event.key]
    commands: list[Command] = [KillGroups(tuple(w.pid for w in lost if w.pid is not None))]
    for worker in lost:
        # A queued worker was never started, so it has an exit code instead of a signal.
        code, signum = (1, None) if worker.phase is Phase.QUEUED else (None, int(signal.SIGKILL))
        state, more = _ended(state, worker, event.time, code, signum, event.reason)
        commands += more
    for role, store in state.stores.items():
        if store.spawner == event.key and not store.ended:
            end_of_it = StoreEnded(role, store.request.generation, event.time, event.reason)
            state, more = _store_ended(state, end_of_it)
            commands += more
    return state, commands


def _store_opened(state: AgentState, event: StoreOpened) -> tuple[AgentState, list[Command]]:
    store = state.stores.get(event.role)
    if store is not None and store.request.generation == event.generation:
        state = replace(state, stores={**state.stores, event.role: replace(store, opened=True)})
    return state, [ToMaster(event)]


def _store_ended(state: AgentState, event: StoreEnded) -> tuple[AgentState, list[Command]]:
    """The role needs a new generation: the listening socket is still held, so late workers would wait for ever.

    Workers that cannot form a new generation in place fail.
    """
    store = state.stores.get(event.role)
    if state.leaving or store is None or store.request.generation != event.generation:
        return state, []
    state = replace(state, stores={**state.stores, event.role: replace(store, ended=event)})
    commands: list[Command] = [ToMaster(event)]
    if state.survives(event.role):
        return state, commands
    for worker in state.workers.values():
        if worker.who.role == event.role and worker.sent is None:
            state, more = _lose_store(state, worker, event)
            commands += more
    return state, commands


def _lose_store(state: AgentState, worker: Worker, end: StoreEnded) -> tuple[AgentState, list[Command]]:
    """Fail a worker whose rendezvous store is gone."""
    why = f"the store of its role is gone: {end.reason}"
    if worker.phase is Phase.QUEUED:
        return _ended(state, worker, end.time, 1, None, why)
    state = state.with_worker(replace(worker, cause="lost_dependency", kill_reason=why))
    return state, [ToSpawner(worker.spawner, Kill(worker.id, int(signal.SIGKILL)))]


def _ended(
    state: AgentState,
    worker: Worker,
    time: float,
    code: int | None,
    signum: int | None,
    note: str,
    tail: str = "",
    *,
    taken: bool = False,
    step: int = -1,
) -> tuple[AgentState, list[Command]]:
    state = _without(state, worker)
    end = WorkerExited(
        worker.who,
        time,
        code,
        signum,
        cause=worker.cause,
        sent=worker.sent,
        error=worker.error,
        note=worker.kill_reason or (worker.expired if code != 0 else "") or note,
        met=worker.met,
        tail="" if worker.error else tail,
        taken=taken,
        step=step,
    )
    end = short_end(end)
    state = _remembering(state, worker, end)
    commands: list[Command] = [ToMaster(end)]
    if worker.ready is not None:
        commands.append(StopProbing(worker.id))
    if state.leaving and not state.workers:
        commands.append(Leave())
    return state, commands


def _without(state: AgentState, worker: Worker) -> AgentState:
    workers = {n: w for n, w in state.workers.items() if n != worker.id}
    return replace(
        state, workers=workers, asks={n: ask for n, ask in state.asks.items() if n[0] != worker.id}
    )


def _grace_over(state: AgentState, event: GraceOver) -> tuple[AgentState, list[Command]]:
    worker = state.workers.get(event.id)
    if worker is None:
        return state, []
    return (
        state.with_worker(replace(worker, sent=int(signal.SIGKILL))),
        [
            ToSpawner(worker.spawner, Kill(worker.id, int(signal.SIGKILL))),
            ToMaster(Notice(str(worker.who), "did not end in its grace period and is killed")),
        ],
    )
