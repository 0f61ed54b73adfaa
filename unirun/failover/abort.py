"""How a job ends that no master can lead: every agent is told to end its workers and to leave; nothing else is decided.

Takes the place of `resume` and `step`, one of which has raised repeatedly. It only looks at which agents are there.
"""

from __future__ import annotations

import signal
from collections.abc import Collection

from msgspec.structs import replace

from unirun.failover.takeover import REJOIN_TIMEOUT, bare
from unirun.job.events import (
    After,
    AgentLost,
    Command,
    Event,
    Finish,
    OwnerLost,
    Record,
    RejoinTimedOut,
    ToAgent,
    ToWatchers,
)
from unirun.job.failures import Exit
from unirun.job.ranks import Ranks
from unirun.job.state import (
    JOB_ENDS,
    ROLE_ENDS,
    JobPhase,
    JobState,
    RolePhase,
    RoleState,
    Verdict,
)
from unirun.wire.messages import Shutdown, Stop
from unirun.wire.reports import Join, Notice, WorkerExited

_KILLED = Exit(signal=signal.SIGKILL)


def begin_abort(state: JobState, verdict: Verdict, now: float) -> tuple[JobState, list[Command]]:
    """Take over the `state` that another master has left, to end the job with `verdict`."""
    if state.phase in JOB_ENDS:
        return state, []
    known = state.nodes if state.phase is JobPhase.LAUNCHING else tuple(state.agents)
    away = frozenset(node for node in known if not state.given_up(node))
    roles = {
        name: role if role.phase in ROLE_ENDS else replace(role, phase=RolePhase.STOPPING)
        for name, role in state.roles.items()
    }
    agents = {node: agent for node, agent in state.agents.items() if node in away}
    state = replace(
        state, phase=JobPhase.STOPPING, verdict=verdict, roles=roles, agents=agents, away=away, view_due=False
    )
    commands: list[Command] = [
        Record("stopping", verdict.reason),
        ToWatchers(Notice("master", verdict.reason)),
        After(REJOIN_TIMEOUT, RejoinTimedOut()),
    ]
    return _ended_if_over(state, now, commands)


def abort_step(state: JobState, event: Event, now: float) -> tuple[JobState, list[Command]]:
    """The state after `event`, and what is to be done. The job ends when no agent is left."""
    if state.phase in JOB_ENDS:
        return state, []
    commands: list[Command] = []
    grace = state.spec.shutdown_timeout
    match event:
        case Join(node):
            state = replace(state, agents={**state.agents, node: bare(event)}, away=state.away - {node})
            late = AgentLost(node, "it has not ended in time")
            commands += [ToAgent(node, Shutdown(grace)), After(grace + REJOIN_TIMEOUT, late)]
        case AgentLost(node, reason):
            state = _without(state, node)
            commands.append(Record("agent_lost", f"{node}: {reason}"))
        case RejoinTimedOut():
            for node in state.away:
                state = _without(state, node)
        case WorkerExited():
            state = _with_exit(state, event)
        case Stop() | OwnerLost():
            # As ever, the first wish to end a job that ends by itself changes nothing, unless it has no patience.
            patient = isinstance(event, Stop) and event.grace is None and not state.asked_to_stop
            state = replace(state, asked_to_stop=True)
            if not patient:
                commands += [ToAgent(node, Shutdown()) for node in state.agents if node not in state.away]
        case Notice():
            commands += [Record("notice", f"{event.source}: {event.text}"), ToWatchers(event)]
    return _ended_if_over(state, now, commands)


def _without(state: JobState, node: str) -> JobState:
    """An agent is gone, and its workers are with it."""
    roles = {name: _killed(role, (node,)) for name, role in state.roles.items()}
    agents = {name: agent for name, agent in state.agents.items() if name != node}
    return replace(state, roles=roles, agents=agents, away=state.away - {node})


def _with_exit(state: JobState, event: WorkerExited) -> JobState:
    """A worker's end, where it is one that is known of; else its agent's end tells."""
    name, rank, incarnation = event.worker
    role = state.roles.get(name)
    for worker in role.workers[rank : rank + 1] if role is not None and rank >= 0 else ():
        if role is not None and worker.live and worker.incarnation == incarnation:
            end = Exit(event.code, event.signal)
            return state.with_role(role.with_worker(worker.ended(end)))
    return state


def _ended_if_over(state: JobState, now: float, commands: list[Command]) -> tuple[JobState, list[Command]]:
    verdict = state.verdict
    if state.agents or state.away or verdict is None:
        return state, commands
    roles = {
        name: role
        if role.phase in ROLE_ENDS
        else replace(_killed(role, state.nodes), phase=RolePhase.STOPPED)
        for name, role in state.roles.items()
    }
    state = replace(state, phase=verdict.phase, roles=roles, ended=now)
    end = Record("end", f"{verdict.phase}: {verdict.reason} (exit code {verdict.code})")
    return state, [*commands, end, Finish(verdict)]


def _killed(role: RoleState, nodes: Collection[str]) -> RoleState:
    """The role when whoever lives of it on `nodes` is gone."""
    workers = Ranks(w.ended(_KILLED) if w.live and w.node in nodes else w for w in role.workers)
    return replace(role, workers=workers)
