"""Transitions of the agent's state machine on the answers of programs to their probes, and on the weights of engines.

An engine that was started, for the first time or again, has other weights than its channel. Its companion, a worker of
the same node, learns here which engines there are, and tells when one has the latest version: then it is ready.
"""

from __future__ import annotations

import signal

from msgspec.structs import replace

from unirun.launcher.events import Command, Probed, ReadyDue, ToLink, ToMaster, ToSpawner, Worker
from unirun.launcher.state import AgentState
from unirun.values import Engine
from unirun.wire.reports import VERSION, Cause, EngineWeights, FromWorker, Health, LocalEngines, Metrics
from unirun.wire.spawning import Kill


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
    state = state.with_worker(replace(worker, cause=cause, doom=why))
    return state, [ToSpawner(worker.spawner, Kill(worker.id, int(signal.SIGKILL)))]
