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
    ToMaster,
    ToSpawner,
    ToWorkers,
    Worker,
)
from unirun.wire.messages import (
    Hello,
    Notice,
    Shutdown,
    SpawnerReady,
    StopWorkers,
    View,
    WorkerError,
    WorkerExited,
    WorkerRunning,
    WorkerStarted,
)
from unirun.wire.spawning import (
    Forked,
    Kill,
    OpenStore,
    Preloaded,
    Reaped,
    SpawnFailed,
    StoreEnded,
)

LOST_GRACE = 0.4
"""Seconds between TERM and KILL when the master or the command is gone: workers must be gone within one."""


@dataclass(frozen=True, slots=True)
class AgentState:
    """What this node does. `spawners`: whether each is ready; `stores`: which spawner serves a role's."""

    node: str
    workers: Mapping[int, Worker] = field(default_factory=dict)
    spawners: Mapping[SpawnerKey, bool] = field(default_factory=dict)
    stores: Mapping[str, SpawnerKey] = field(default_factory=dict)
    pending_stores: Mapping[SpawnerKey, tuple[OpenStore, ...]] = field(default_factory=dict)
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
        case StopWorkers():
            return _stop(state, [(event.role, rank) for rank in event.ranks], event.signal, event.grace)
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
            _never_started(worker, int(signal.SIGTERM), "its agent leaves") for worker in event.workers
        ]
    commands: list[Command] = []
    wanted = [worker.spawner for worker in event.workers]
    for key in dict.fromkeys([*wanted, event.store_spawner] if event.store else wanted):
        if key not in state.spawners:
            state = replace(state, spawners={**state.spawners, key: False})
            commands.append(StartSpawner(key))
    if event.store is not None:
        key = event.store_spawner
        state = replace(state, stores={**state.stores, event.store.role: key})
        if state.spawners[key]:
            commands.append(ToSpawner(key, event.store))
        else:
            queue = (*state.pending_stores.get(key, ()), event.store)
            state = replace(state, pending_stores={**state.pending_stores, key: queue})
    for worker in event.workers:
        if state.find(worker.role, worker.rank) is not None:
            raise IllegalTransition(f"{worker.role}:{worker.rank} has a worker already")
        if state.spawners[worker.spawner]:
            worker = replace(worker, phase=Phase.FORKING)
            commands.append(ToSpawner(worker.spawner, worker.request))
        state = state.with_worker(worker)
    return state, commands


def _stop(
    state: AgentState, who: list[tuple[str, int]], signum: int, grace: float
) -> tuple[AgentState, list[Command]]:
    commands: list[Command] = []
    for role, rank in who:
        worker = state.find(role, rank)
        if worker is None:
            continue
        if worker.phase is Phase.QUEUED:
            state = _without(state, worker)
            commands.append(_never_started(worker, signum, "it had not started"))
            continue
        state = state.with_worker(replace(worker, asked=signum))
        commands.append(ToSpawner(worker.spawner, Kill(worker.id, signum)))
        if signum != signal.SIGKILL:
            commands.append(After(grace, GraceOver(worker.id)))
    return state, commands


def _never_started(worker: Worker, signum: int, note: str) -> ToMaster:
    """A worker without a process ends as if `signum`, for which it was asked, had reached it."""
    return ToMaster(
        WorkerExited(worker.role, worker.rank, worker.incarnation, 0.0, None, signum, signum, note=note)
    )


def _leave(state: AgentState, signum: int, grace: float) -> tuple[AgentState, list[Command]]:
    state = replace(state, leaving=True)
    who = [(worker.role, worker.rank) for worker in state.workers.values()]
    state, commands = _stop(state, who, signum, grace)
    return (state, [*commands, Leave()]) if not state.workers else (state, commands)


def _from_spawner(state: AgentState, event: FromSpawner) -> tuple[AgentState, list[Command]]:
    match event.message:
        case Preloaded(seconds):
            return _spawner_ready(state, event.key, seconds)
        case Forked(number, pid):
            worker = state.workers[number]
            state = state.with_worker(replace(worker, phase=Phase.ALIVE, pid=pid))
            commands: list[Command] = [
                ToMaster(WorkerStarted(state.node, worker.role, worker.rank, worker.incarnation, pid))
            ]
            if worker.request.kind == "program":
                # A program does not say hello; that it was started is all there is to know.
                commands.append(ToMaster(WorkerRunning(worker.role, worker.rank, worker.incarnation)))
            return state, commands
        case Notice():
            return state, [ToMaster(event.message)]
        case StoreEnded(role, when, reason):
            return _store_ended(state, role, when, reason)
        case SpawnFailed(number, when, reason):
            return _ended(state, number, WorkerExited("", 0, 0, when, 1, None, note=reason))
        case Reaped(number, when, code, signum):
            return _ended(
                state, number, WorkerExited("", 0, 0, when, code, signum, note=event.note, tail=event.tail)
            )
    raise IllegalTransition(f"a spawner sent {type(event.message).__name__}")


def _spawner_ready(state: AgentState, key: SpawnerKey, seconds: float) -> tuple[AgentState, list[Command]]:
    state = replace(state, spawners={**state.spawners, key: True})
    commands: list[Command] = [ToMaster(SpawnerReady(state.node, seconds))] if seconds >= 0.1 else []
    pending = dict(state.pending_stores)
    commands += [ToSpawner(key, store) for store in pending.pop(key, ())]
    state = replace(state, pending_stores=pending)
    for worker in state.workers.values():
        if worker.spawner == key and worker.phase is Phase.QUEUED:
            state = state.with_worker(replace(worker, phase=Phase.FORKING))
            commands.append(ToSpawner(key, worker.request))
    return state, commands


def _spawner_down(state: AgentState, event: SpawnerDown) -> tuple[AgentState, list[Command]]:
    spawners = {key: ready for key, ready in state.spawners.items() if key != event.key}
    pending = {key: stores for key, stores in state.pending_stores.items() if key != event.key}
    orphaned = [role for role, key in state.stores.items() if key == event.key]
    stores = {role: key for role, key in state.stores.items() if key != event.key}
    state = replace(state, spawners=spawners, pending_stores=pending, stores=stores)
    lost = [worker for worker in state.workers.values() if worker.spawner == event.key]
    commands: list[Command] = [KillGroups(tuple(w.pid for w in lost if w.pid is not None))]
    for worker in lost:
        # One that was never started is not killed: there is nothing to run it.
        code, signum = (1, None) if worker.phase is Phase.QUEUED else (None, int(signal.SIGKILL))
        end = WorkerExited("", 0, 0, event.time, code, signum, note=event.reason)
        state, more = _ended(state, worker.id, end)
        commands += more
    for role in orphaned:
        state, more = _store_ended(state, role, event.time, event.reason)
        commands += more
    return state, commands


def _store_ended(state: AgentState, role: str, when: float, reason: str) -> tuple[AgentState, list[Command]]:
    """Its listening socket is held, so who comes late would wait in vain: the role needs a new generation."""
    commands: list[Command] = []
    for worker in state.workers.values():
        if worker.role == role and worker.asked is None:
            state, more = _give_up(state, worker, f"the store of its role is gone: {reason}", when)
            commands += more
    return state, commands


def _give_up(state: AgentState, worker: Worker, why: str, now: float) -> tuple[AgentState, list[Command]]:
    """A worker that cannot do its work any more fails, for the reason `why`."""
    if worker.phase is Phase.QUEUED:
        return _ended(state, worker.id, WorkerExited("", 0, 0, now, 1, None, note=why))
    state = state.with_worker(replace(worker, doom=why))
    return state, [ToSpawner(worker.spawner, Kill(worker.id, int(signal.SIGKILL)))]


def _ended(state: AgentState, number: int, end: WorkerExited) -> tuple[AgentState, list[Command]]:
    worker = state.workers[number]
    state = _without(state, worker)
    end = replace(
        end,
        role=worker.role,
        rank=worker.rank,
        incarnation=worker.incarnation,
        asked=worker.asked,
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
            return state, [ToMaster(WorkerRunning(worker.role, worker.rank, worker.incarnation))]
        case WorkerError():
            # Its code is over; threads or exit handlers that do not end must not keep its peers waiting.
            end = After(worker.grace, GraceOver(worker.id))
            return state.with_worker(replace(worker, error=event.message)), [end]
    return state, []


def _link_closed(state: AgentState, event: LinkClosed) -> tuple[AgentState, list[Command]]:
    """A link ends with its process; when it ends before, the worker is watched by its process alone."""
    worker = state.workers.get(event.id)
    if worker is None or worker.asked is not None:
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
    asked = None if worker.asked is None else int(signal.SIGKILL)
    return (
        state.with_worker(replace(worker, asked=asked)),
        [
            ToSpawner(worker.spawner, Kill(worker.id, int(signal.SIGKILL))),
            ToMaster(Notice(worker.who, "did not end in its grace period and is killed")),
        ],
    )
