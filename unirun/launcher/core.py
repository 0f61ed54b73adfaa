"""The agent's state machine: ``step(state, event) -> (state, commands)``. No I/O, no clock.

The master decides which workers run. This decides how: which spawner forks a worker, when SIGTERM is followed by
SIGKILL, which messages are sent, and what follows when the master, the command or a spawner is gone.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

from msgspec.structs import replace

from unirun.errors import Refused
from unirun.launcher.ends import short_end
from unirun.launcher.environment import SpawnerKey
from unirun.launcher.events import (
    Abandon,
    After,
    Command,
    Event,
    FromSpawner,
    GraceOver,
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
    Signal,
    SpawnerDown,
    StartSpawner,
    StillEnding,
    StillWithoutLink,
    StopDue,
    Store,
    TimerExpired,
    ToLinks,
    ToMaster,
    ToSpawner,
    Unwatch,
    Watch,
    Worker,
)
from unirun.launcher.health import probed, ready_due, tell_companions
from unirun.launcher.state import AgentState, held
from unirun.launcher.worker_messages import (
    answered,
    from_worker,
    link_closed,
    runs,
    still_ending,
    still_without_link,
    timer_expired,
)
from unirun.wire.asking import ToWorker
from unirun.wire.messages import ExitAck, PassOn, Shutdown, StopWorkers, View, updated
from unirun.wire.reports import (
    Cause,
    Notice,
    SpawnerReady,
    ViewWanted,
    WorkerExited,
    WorkerStarted,
)
from unirun.wire.spawning import (
    Forked,
    Kill,
    Preloaded,
    Reaped,
    SpawnFailed,
    StoreEnded,
    StoreOpened,
)


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
            return _obey(state, what) if epoch >= state.epoch else (state, [])
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


def _obey(state: AgentState, what: Instruction) -> tuple[AgentState, list[Command]]:
    match what:
        case Launch():
            return _launch(state, what)
        case Store():
            return _open_store(state, what)
        case StopWorkers(after=delay) if delay:
            # Those that live now: a rank may have a successor by then.
            found = [state.find(what.role, rank) for rank in what.ranks]
            due = [StopDue(each.id, what.signal, what.grace) for each in found if each is not None]
            return state, [After(delay, each) for each in due]
        case StopWorkers():
            who = [(what.role, rank) for rank in what.ranks]
            return _stop(state, who, what.signal, what.grace, "order")
        case PassOn(signum):
            # Not to their children.
            pids = [each.pid for each in state.workers.values() if each.pid is not None]
            return state, [Signal(pid, signum, handled=True) for pid in pids]
        case ExitAck(kept):
            return replace(state, ended={who: held for who, held in state.ended.items() if who != kept}), []
        case ToWorker():
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
        if store is not None and store.ended is not None and worker.who.role not in state.in_place:
            state, more = _lose_store(state, worker, store.ended)
            commands += more
    return state, commands


def _open_store(state: AgentState, store: Store) -> tuple[AgentState, list[Command]]:
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


def _standing(store: Store) -> StoreOpened | StoreEnded | None:
    """The message for the present state of a store; None while it opens."""
    if store.ended is not None:
        return store.ended
    return StoreOpened(store.request.role, store.request.generation) if store.opened else None


def _need_spawner(state: AgentState, key: SpawnerKey) -> tuple[AgentState, list[Command]]:
    if key in state.spawners:
        return state, []
    return replace(state, spawners={**state.spawners, key: False}), [StartSpawner(key)]


def _stop(
    state: AgentState, who: list[tuple[str, int]], signum: int, grace: float, cause: Cause
) -> tuple[AgentState, list[Command]]:
    commands: list[Command] = []
    for role, rank in who:
        worker = state.find(role, rank)
        if worker is None:
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
            commands.append(After(grace, GraceOver(worker.id)))
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
        case Preloaded(seconds):
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
            return _ended(state, state.workers[number], *end, taken=event.taken)
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
        commands += [Watch(worker.id), After(worker.ready_timeout, ReadyDue(worker.id))]
    return state, commands


def _spawner_ready(state: AgentState, key: SpawnerKey, seconds: float) -> tuple[AgentState, list[Command]]:
    state = replace(state, spawners={**state.spawners, key: True})
    commands: list[Command] = [ToMaster(SpawnerReady(state.node, seconds))] if seconds >= 0.1 else []
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
    if event.role in state.in_place:
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
    state = state.with_worker(replace(worker, cause="doom", doom=why))
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
        note=worker.doom or (worker.expired if code != 0 else "") or note,
        met=worker.met,
        tail="" if worker.error else tail,
        taken=taken,
    )
    end = short_end(end)
    state = _remembering(state, worker, end)
    commands: list[Command] = [ToMaster(end)]
    if worker.ready is not None:
        commands.append(Unwatch(worker.id))
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
