"""How a job ends after its masters have crashed repeatedly: agents are told to end their workers and to leave.

Replaces `resume` and `step`, one of which has raised repeatedly. The only state that it uses is which agents are left.
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
    RejoinTimedOut,
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
from unirun.job.transition import Transition
from unirun.wire.messages import Shutdown, Stop
from unirun.wire.reports import Join, Notice, WorkerExited

_KILLED = Exit(signal=signal.SIGKILL)


def begin_abort(state: JobState, verdict: Verdict, now: float) -> tuple[JobState, list[Command]]:
    """Take over the `state` of the master before, to end the job with `verdict`."""
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
    transition = Transition(state, now)
    transition.record("stopping", verdict.reason)
    transition.state = replace(transition.state, cause=transition.cause)
    transition.send(ToWatchers(Notice("master", verdict.reason)), After(REJOIN_TIMEOUT, RejoinTimedOut()))
    return _ended_if_over(transition)


def abort_step(state: JobState, event: Event, now: float) -> tuple[JobState, list[Command]]:
    """The state after `event`, and what is to be done. The job ends when no agent is left."""
    if state.phase in JOB_ENDS:
        return state, []
    transition = Transition(state, now)
    transition.cause = state.cause
    grace = state.spec.shutdown_timeout
    match event:
        case Join(node):
            agents = {**state.agents, node: bare(event)}
            transition.state = replace(state, agents=agents, away=state.away - {node})
            late = AgentLost(node, "it has not ended in time")
            transition.order(node, Shutdown(grace))
            transition.send(After(grace + REJOIN_TIMEOUT, late))
        case AgentLost(node, reason):
            transition.state = _without(state, node)
            transition.record("agent_lost", f"{node}: {reason}", node)
        case RejoinTimedOut():
            for node in state.away:
                transition.state = _without(transition.state, node)
        case WorkerExited():
            transition.state = _with_exit(state, event)
        case Stop() | OwnerLost():
            # As in `step`, the first request to stop a job that is ending changes nothing unless it has a grace period.
            patient = isinstance(event, Stop) and event.grace is None and not state.asked_to_stop
            transition.state = replace(state, asked_to_stop=True)
            for node in () if patient else sorted(state.agents.keys() - state.away):
                transition.order(node, Shutdown())
        case Notice():
            transition.record("notice", f"{event.source}: {event.text}", event.source)
            transition.send(ToWatchers(event))
    return _ended_if_over(transition)


def _without(state: JobState, node: str) -> JobState:
    """The state after an agent and its workers are gone."""
    roles = {name: _killed(role, (node,)) for name, role in state.roles.items()}
    agents = {name: agent for name, agent in state.agents.items() if name != node}
    return replace(state, roles=roles, agents=agents, away=state.away - {node})


def _with_exit(state: JobState, event: WorkerExited) -> JobState:
    """The state after a worker has ended. An unknown worker changes nothing."""
    name, rank, incarnation = event.worker
    role = state.roles.get(name)
    for worker in role.workers[rank : rank + 1] if role is not None and rank >= 0 else ():
        if role is not None and worker.live and worker.incarnation == incarnation:
            end = Exit(event.code, event.signal)
            return state.with_role(role.with_worker(worker.ended(end)))
    return state


def _ended_if_over(transition: Transition) -> tuple[JobState, list[Command]]:
    state = transition.state
    verdict = state.verdict
    if state.agents or state.away or verdict is None:
        return transition.done()
    roles = {
        name: role
        if role.phase in ROLE_ENDS
        else replace(_killed(role, state.nodes), phase=RolePhase.STOPPED)
        for name, role in state.roles.items()
    }
    transition.state = replace(state, phase=verdict.phase, roles=roles, ended=transition.now)
    transition.cause = state.cause
    transition.record("end", f"{verdict.phase}: {verdict.reason} (exit code {verdict.code})")
    transition.send(Finish(verdict))
    return transition.done()


def _killed(role: RoleState, nodes: Collection[str]) -> RoleState:
    """The role after its workers on `nodes` were killed."""
    workers = Ranks(w.ended(_KILLED) if w.live and w.node in nodes else w for w in role.workers)
    return replace(role, workers=workers)
