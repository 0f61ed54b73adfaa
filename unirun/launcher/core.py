"""The agent's decisions: ``step(state, event) -> (state, commands)``. No I/O, no clock.

The master says which workers shall run and which shall end; how a worker gets there is decided here: which
spawner forks it, when TERM becomes KILL, what is told to whom, and what happens when the master, the
command or a spawner is gone.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from unirun.errors import IllegalTransition
from unirun.launcher.environment import SpawnerKey
from unirun.launcher.events import (
    After,
    Command,
    Event,
    FromSpawner,
    FromWorker,
    GraceOver,
    KillGroups,
    Launch,
    Leave,
    LinkClosed,
    MasterLost,
    Phase,
    SpawnerDown,
    StartSpawner,
    StillWithoutLink,
    Store,
    ToMaster,
    ToSpawner,
    ToWorkers,
    Worker,
)
from unirun.wire.messages import (
    Cause,
    GroupFormed,
    Hello,
    Message,
    Metrics,
    Notice,
    Serving,
    Shutdown,
    SpawnerReady,
    StopWorkers,
    View,
    WorkerError,
    WorkerExited,
    WorkerFormed,
    WorkerMetrics,
    WorkerRunning,
    WorkerServing,
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

LOST_GRACE = 0.4
"""Seconds between TERM and KILL when the master or the command is gone: workers must be gone within one."""


@dataclass(frozen=True, slots=True)
class AgentState:
    """What this node does. `spawners`: whether each is ready; `stores`: by role, the last that was to be served here.

    `in_place`: the roles whose workers outlive a peer, and a store.
    """

    node: str
    in_place: frozenset[str] = frozenset()
    workers: Mapping[int, Worker] = field(default_factory=dict)
    spawners: Mapping[SpawnerKey, bool] = field(default_factory=dict)
    stores: Mapping[str, Store] = field(default_factory=dict)
    view: View | None = None
    leaving: bool = False

    def with_worker(self, worker: Worker) -> AgentState:
        """This state with one worker replaced."""
        return replace(self, workers={**self.workers, worker.id: worker})

    def find(self, role: str, rank: int) -> Worker | None:
        """The worker that holds a rank."""
        return next((w for w in self.workers.values() if (w.role, w.rank) == (role, rank)), None)


def step(state: AgentState, event: Event) -> tuple[AgentState, list[Command]]:
    """The state after `event`, and what is to be done."""
    match event:
        case Launch():
            return _launch(state, event)
        case Store():
            return _open_store(state, event)
        case StopWorkers():
            who = [(event.role, rank) for rank in event.ranks]
            return _stop(state, who, event.signal, event.grace, "order")
        case View():
            return replace(state, view=event), [ToWorkers(event)]
        case Shutdown():
            return _leave(state, signal.SIGKILL, 0.0)
        case MasterLost():
            return _leave(state, signal.SIGTERM, LOST_GRACE)
        case FromSpawner():
            return _from_spawner(state, event)
        case SpawnerDown():
            return _spawner_down(state, event)
        case FromWorker():
            return _from_worker(state, event)
        case LinkClosed():
            return _link_closed(state, event)
        case GraceOver():
            return _grace_over(state, event)
        case StillWithoutLink():
            return _still_without_link(state, event)


def _launch(state: AgentState, event: Launch) -> tuple[AgentState, list[Command]]:
    if state.leaving:
        # The order and the reason to leave have crossed: nobody would stop what is started now.
        return state, [
            _never_started(worker, signal.SIGTERM, "leaving", "its agent leaves") for worker in event.workers
        ]
    commands: list[Command] = []
    for worker in event.workers:
        holder = state.find(worker.role, worker.rank)
        if holder is not None:
            text = f"incarnation {worker.incarnation} is not started: {holder.incarnation} lives"
            commands.append(ToMaster(Notice(worker.who, text)))
            continue
        state, more = _need_spawner(state, worker.spawner)
        commands += more
        if state.spawners[worker.spawner]:
            worker = replace(worker, phase=Phase.FORKING)
            commands.append(ToSpawner(worker.spawner, worker.request))
        state = state.with_worker(worker)
        store = state.stores.get(worker.role)
        if store is not None and store.ended is not None and worker.role not in state.in_place:
            state, more = _lose_store(state, worker, store.ended)
            commands += more
    return state, commands


def _open_store(state: AgentState, store: Store) -> tuple[AgentState, list[Command]]:
    if state.leaving:
        return state, []
    state, commands = _need_spawner(state, store.spawner)
    if state.spawners[store.spawner]:
        store = replace(store, sent=True)
        commands.append(ToSpawner(store.spawner, store.request))
    return replace(state, stores={**state.stores, store.request.role: store}), commands


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
            state = _without(state, worker)
            commands.append(_never_started(worker, signum, cause, "it had not started"))
            continue
        state = state.with_worker(replace(worker, cause=cause, sent=signum))
        commands.append(ToSpawner(worker.spawner, Kill(worker.id, signum)))
        if signum != signal.SIGKILL:
            commands.append(After(grace, GraceOver(worker.id)))
    return state, commands


def _never_started(worker: Worker, signum: int, cause: Cause, note: str) -> ToMaster:
    """A worker without a process ends as if `signum`, which was meant for it, had reached it."""
    signum = int(signum)
    return ToMaster(
        WorkerExited(
            worker.role, worker.rank, worker.incarnation, 0.0, None, signum, cause, signum, note=note
        )
    )


def _leave(state: AgentState, signum: int, grace: float) -> tuple[AgentState, list[Command]]:
    state = replace(state, leaving=True)
    who = [(worker.role, worker.rank) for worker in state.workers.values()]
    state, commands = _stop(state, who, signum, grace, "leaving")
    return (state, [*commands, Leave()]) if not state.workers else (state, commands)


def _from_spawner(state: AgentState, event: FromSpawner) -> tuple[AgentState, list[Command]]:
    match event.message:
        case Preloaded(seconds):
            return _spawner_ready(state, event.key, seconds)
        case Forked(number) | SpawnFailed(number) | Reaped(number) if number not in state.workers:
            text = f"a spawner speaks of worker {number}, which is not there: {event.message}"
            return state, [ToMaster(Notice(state.node, text))]
        case Forked(number, pid):
            return _forked(state, state.workers[number], pid)
        case SpawnFailed(number, when, reason):
            return _ended(state, number, WorkerExited("", 0, 0, when, 1, None, note=reason))
        case Reaped(number, when, code, signum):
            return _ended(
                state, number, WorkerExited("", 0, 0, when, code, signum, note=event.note, tail=event.tail)
            )
        case Notice() | StoreOpened():
            return state, [ToMaster(event.message)]
        case StoreEnded():
            return _store_ended(state, event.message)
    raise IllegalTransition(f"a spawner sent {type(event.message).__name__}")


def _forked(state: AgentState, worker: Worker, pid: int) -> tuple[AgentState, list[Command]]:
    state = state.with_worker(replace(worker, phase=Phase.ALIVE, pid=pid))
    commands: list[Command] = [
        ToMaster(WorkerStarted(state.node, worker.role, worker.rank, worker.incarnation, pid))
    ]
    if worker.request.kind == "program":
        # A program does not say hello; that it was started is all there is to know.
        commands.append(_runs(state, worker))
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
        # One that was never started is not killed: there is nothing to run it.
        code, signum = (1, None) if worker.phase is Phase.QUEUED else (None, int(signal.SIGKILL))
        end = WorkerExited("", 0, 0, event.time, code, signum, note=event.reason)
        state, more = _ended(state, worker.id, end)
        commands += more
    for role, store in state.stores.items():
        if store.spawner == event.key and not store.ended:
            end_of_it = StoreEnded(role, store.request.generation, event.time, event.reason)
            state, more = _store_ended(state, end_of_it)
            commands += more
    return state, commands


def _store_ended(state: AgentState, event: StoreEnded) -> tuple[AgentState, list[Command]]:
    """Its listening socket is held, so who comes late would wait in vain: the role needs a new generation.

    Workers that cannot form one in place fail.
    """
    store = state.stores.get(event.role)
    if state.leaving or store is None or store.request.generation != event.generation:
        return state, []
    state = replace(state, stores={**state.stores, event.role: replace(store, ended=event)})
    commands: list[Command] = [ToMaster(event)]
    if event.role in state.in_place:
        return state, commands
    for worker in state.workers.values():
        if worker.role == event.role and worker.sent is None:
            state, more = _lose_store(state, worker, event)
            commands += more
    return state, commands


def _lose_store(state: AgentState, worker: Worker, end: StoreEnded) -> tuple[AgentState, list[Command]]:
    """A worker that cannot meet its peers any more fails."""
    why = f"the store of its role is gone: {end.reason}"
    if worker.phase is Phase.QUEUED:
        return _ended(state, worker.id, WorkerExited("", 0, 0, end.time, 1, None, note=why))
    state = state.with_worker(replace(worker, cause="doom", doom=why))
    return state, [ToSpawner(worker.spawner, Kill(worker.id, int(signal.SIGKILL)))]


def _ended(state: AgentState, number: int, end: WorkerExited) -> tuple[AgentState, list[Command]]:
    worker = state.workers[number]
    state = _without(state, worker)
    end = replace(
        end,
        role=worker.role,
        rank=worker.rank,
        incarnation=worker.incarnation,
        cause=worker.cause,
        sent=worker.sent,
        error=worker.error,
        note=worker.doom or end.note,
        tail="" if worker.error else end.tail,
    )
    commands: list[Command] = [ToMaster(end)]
    if state.leaving and not state.workers:
        commands.append(Leave())
    return state, commands


def _without(state: AgentState, worker: Worker) -> AgentState:
    return replace(state, workers={n: w for n, w in state.workers.items() if n != worker.id})


def _from_worker(state: AgentState, event: FromWorker) -> tuple[AgentState, list[Command]]:
    worker = state.workers.get(event.id)
    if worker is None:
        return state, []
    match event.message:
        case Hello(running=True) if not worker.running:
            state = state.with_worker(replace(worker, running=True))
            return state, [_runs(state, worker)]
        case WorkerError():
            # Its code is over; threads or exit handlers that do not end must not keep its peers waiting.
            end = After(worker.grace, GraceOver(worker.id))
            return state.with_worker(replace(worker, error=event.message)), [end]
        case Serving() | GroupFormed() | Metrics():
            return state, [ToMaster(_signed(worker, event.message))]
    return state, []


def _runs(state: AgentState, worker: Worker) -> ToMaster:
    """It was welcomed with this view: it forms that generation, even if it was started for an earlier one."""
    views = {role.name: role for role in state.view.roles} if state.view else {}
    generation = views[worker.role].generation if worker.role in views else 0
    return ToMaster(WorkerRunning(worker.role, worker.rank, worker.incarnation, generation))


def _signed(worker: Worker, message: Serving | GroupFormed | Metrics) -> Message:
    """What a worker said, with who it is."""
    who = worker.role, worker.rank, worker.incarnation
    match message:
        case Serving(addresses, recoverable):
            return WorkerServing(*who, addresses, recoverable)
        case GroupFormed(generation):
            return WorkerFormed(*who, generation)
        case Metrics(values, time):
            return WorkerMetrics(*who, values, time)


def _link_closed(state: AgentState, event: LinkClosed) -> tuple[AgentState, list[Command]]:
    """A link ends with its process; when it ends before, the worker is watched by its process alone."""
    worker = state.workers.get(event.id)
    if worker is None or worker.sent is not None:
        return state, []
    return state, [After(0.5, StillWithoutLink(event.id))]


def _still_without_link(state: AgentState, event: StillWithoutLink) -> tuple[AgentState, list[Command]]:
    worker = state.workers.get(event.id)
    if worker is None:
        return state, []
    text = "closed its link to the agent and runs on; only its exit can be seen now"
    return state, [ToMaster(Notice(worker.who, text))]


def _grace_over(state: AgentState, event: GraceOver) -> tuple[AgentState, list[Command]]:
    worker = state.workers.get(event.id)
    if worker is None:
        return state, []
    # One that was not asked to end has failed before: being killed for it must not look like obedience.
    sent = None if worker.sent is None else int(signal.SIGKILL)
    return (
        state.with_worker(replace(worker, sent=sent)),
        [
            ToSpawner(worker.spawner, Kill(worker.id, int(signal.SIGKILL))),
            ToMaster(Notice(worker.who, "did not end in its grace period and is killed")),
        ],
    )
