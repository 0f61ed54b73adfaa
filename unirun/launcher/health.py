"""Transitions of the agent's state machine on the answers of programs to their probes."""

from __future__ import annotations

import signal

from msgspec.structs import replace

from unirun.launcher.events import Command, Probed, ReadyDue, ToMaster, ToSpawner, Worker
from unirun.launcher.state import AgentState
from unirun.wire.reports import Cause, FromWorker, Health
from unirun.wire.spawning import Kill


def probed(state: AgentState, event: Probed) -> tuple[AgentState, list[Command]]:
    """Take an answer. A program that was ready stays so while it misses some; after too many in a row it is killed.

    It is not called unready at the first miss: clients would send all of its requests to others, and a server that is
    busy for a moment has not lost them.
    """
    worker = state.workers.get(event.id)
    if worker is None or worker.cause != "own":
        return state, []
    before = worker.health
    misses = worker.misses + 1 if worker.was_ready and not event.ok else 0
    worker = replace(worker, misses=misses)
    ready = event.ok or worker.was_ready
    why = (
        f"did not answer {misses} of {worker.alive.misses} times: {event.why}"
        if misses and worker.alive
        else event.why
    )
    if before is None or (before.ready, before.why) != (ready, why):
        since = before.since if before is not None and before.ready == ready else event.time
        health = Health(ready, since, why)
        worker = replace(worker, health=health, was_ready=worker.was_ready or event.ok)
        state = state.with_worker(worker)
        told: list[Command] = [ToMaster(FromWorker(worker.who, health))]
    else:
        state, told = state.with_worker(worker), []
    if worker.was_ready and worker.alive is not None and misses >= worker.alive.misses:
        times = f"{misses} times in a row" if misses > 1 else "once"
        state, more = _kill(state, worker, "silent", f"did not answer {times}: {event.why}")
        return state, [*told, *more]
    return state, told


def ready_due(state: AgentState, event: ReadyDue) -> tuple[AgentState, list[Command]]:
    """Kill a program that is not ready in time."""
    worker = state.workers.get(event.id)
    if worker is None or worker.cause != "own" or worker.was_ready:
        return state, []
    why = worker.health.why if worker.health is not None else "it was not asked yet"
    return _kill(state, worker, "unready", f"was not ready within {worker.ready_timeout:g} s: {why}")


def _kill(state: AgentState, worker: Worker, cause: Cause, why: str) -> tuple[AgentState, list[Command]]:
    state = state.with_worker(replace(worker, cause=cause, doom=why))
    return state, [ToSpawner(worker.spawner, Kill(worker.id, int(signal.SIGKILL)))]
