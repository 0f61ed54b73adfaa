"""Masters that were ended by an exception of their own: how they are counted, and how the job is aborted then.

Agents report to the next master again what no master has written. An event that raises would therefore end one master
after another. The store has how many were ended, and by which exceptions. When the same exception has ended
`MAX_MASTERS_PER_ERROR` of them, or any exceptions `MAX_MASTERS_IN_ALL` of them, the next one does not lead the job but
aborts it: `begin_abort` and `abort_step` replace `resume` and `step`, one of which has raised. They tell the agents to
end their workers and to leave; the only state that they use is which agents are left.
"""

from __future__ import annotations

import json
import signal
import traceback
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from msgspec import convert, to_builtins
from msgspec.structs import replace

from unirun.errors import StoreRefused
from unirun.failover.draft import (
    After,
    AgentLost,
    Command,
    Due,
    Event,
    JobDraft,
    OwnerLost,
    ToWatchers,
)
from unirun.failover.phases import PhaseEvent
from unirun.failover.restart_or_end import finish
from unirun.failover.state import (
    JOB_ENDS,
    ROLE_ENDS,
    Exit,
    JobPhase,
    JobState,
    Ranks,
    RolePhase,
    RoleState,
    Verdict,
)
from unirun.failover.takeover import REJOIN_TIMEOUT, bare
from unirun.rendezvous.election import Term, crashes_key
from unirun.rendezvous.store.protocol import Put, Store
from unirun.values import Value
from unirun.wire.messages import Shutdown, Stop
from unirun.wire.reports import Join, Notice, WorkerExited

MAX_MASTERS_PER_ERROR = 3
"""Masters that the same error may end."""

MAX_MASTERS_IN_ALL = 2 * MAX_MASTERS_PER_ERROR
"""Masters that errors may end, the same or not: one that depends on timing may come from another place each time."""

CRASH_RESET_SECONDS = 300.0
"""Seconds after which a term has brought the job on: what ended masters before it is forgotten."""

STORY = 12
"""Events in a report: the one that could not be handled, and those before it."""

_WORDS = 600
_TRACE = 8000
"""Characters of an event, and of a traceback, that are kept."""

_PACKAGE = str(Path(__file__).parents[1])


class Crash(Value):
    """The end of the master of term `epoch` by an exception, `lasted` seconds after the beginning of the term.

    `cause` tells one exception from another: its class and where it was raised. `message` is its last line. `story` are
    the latest events; the last one could not be handled. `causes` are the entries of
    the event log that led to an illegal draft, the earliest first.
    """

    epoch: int
    lasted: float
    cause: str
    message: str
    story: tuple[str, ...]
    traceback: str
    causes: tuple[str, ...] = ()


def crash_of(
    error: BaseException, epoch: int, lasted: float, events: Iterable[object], causes: Iterable[str] = ()
) -> Crash:
    """The crash of a master by `error`, after `events`, the last `STORY` or fewer; `causes` are those of the state."""
    return Crash(
        epoch=epoch,
        lasted=lasted,
        cause=f"{type(error).__name__} in {_place(error)}",
        message="".join(traceback.format_exception_only(error)).strip()[:_WORDS],
        story=tuple(repr(event)[:_WORDS] for event in events),
        traceback="".join(traceback.format_exception(error))[-_TRACE:],
        causes=tuple(text[:_WORDS] for text in causes),
    )


def _place(error: BaseException) -> str:
    """The innermost line of unirun that the error has passed; of any other code when there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE)] or frames
    if not ours:
        return "nowhere"
    last = ours[-1]
    return f"{last.name} ({Path(last.filename).name}:{last.lineno})"


def fatal(crashes: Iterable[Crash]) -> Crash | None:
    """The latest crash by an exception that has ended `MAX_MASTERS_PER_ERROR` masters, else the latest of
    `MAX_MASTERS_IN_ALL`; None when there is none."""
    known = [*crashes]
    counts = Counter(crash.cause for crash in known)
    again = next((crash for crash in reversed(known) if counts[crash.cause] >= MAX_MASTERS_PER_ERROR), None)
    return again or (known[-1] if len(known) >= MAX_MASTERS_IN_ALL else None)


def with_crash(crashes: Iterable[Crash], crash: Crash) -> tuple[Crash, ...]:
    """`crashes`, as far as they still count, and one more. What was fatal stays so."""
    known = tuple(crashes)
    forgotten = crash.lasted >= CRASH_RESET_SECONDS and fatal(known) is None
    return (crash,) if forgotten else (*known, crash)


def reason_of(crash: Crash) -> str:
    """The reason why a fatal crash ends a job, in one line."""
    last = crash.message.splitlines()[-1]
    return f"one master after another was ended by a bug in unirun: {crash.cause}: {last}"


def report_of(crash: Crash, log: str) -> str:
    """The report of a fatal crash for people, with what is needed to mend the bug; `log` is the masters' log."""
    *before, last = crash.story or ("nothing",)
    lines = [f"job failed: {reason_of(crash)}", f"the event that could not be handled: {last}"]
    if before:
        lines += ["before it:", *(f"  {event}" for event in before)]
    if crash.causes:
        lines += ["the state follows from:", *(f"  {cause}" for cause in crash.causes)]
    lines += [f"  {line}" for line in crash.traceback.rstrip().splitlines()]
    lines.append(f"  log: {log}")
    return "\n".join(lines)


def read_crashes(store: Store, run_id: str) -> tuple[Crash, ...]:
    """Return the crashes of a job that the store has. Raises `StoreError`."""
    item = store.get(crashes_key(run_id))
    if item is None:
        return ()
    try:
        return convert(json.loads(item.value), tuple[Crash, ...])
    except (ValueError, RecursionError) as error:
        raise StoreRefused(f"{item.key} holds {item.value!r:.80}, which no unirun has written") from error


def record_crash(store: Store, run_id: str, term: Term, crash: Crash) -> None:
    """Write a crash, unless another master leads by now. Raises `StoreError`."""
    crashes = with_crash(read_crashes(store, run_id), crash)
    text = json.dumps(to_builtins(crashes[-MAX_MASTERS_IN_ALL:]))
    store.txn([term.fence], [Put(crashes_key(run_id), text)])


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
    draft = JobDraft(state, now)
    draft.record("stopping", verdict.reason)
    stopping = replace(state, phase=JobPhase.STOPPING, verdict=verdict, roles=roles, cause=draft.cause)
    draft.put(replace(stopping, agents=agents, away=away, view_due=False), PhaseEvent.ABORTED)
    draft.send(ToWatchers(Notice("master", verdict.reason)), After(REJOIN_TIMEOUT, Due.REJOIN))
    return _ended_if_over(draft)


def abort_step(state: JobState, event: Event, now: float) -> tuple[JobState, list[Command]]:
    """The state after `event`, and what is to be done. The job ends when no agent is left."""
    if state.phase in JOB_ENDS:
        return state, []
    draft = JobDraft(state, now)
    draft.cause = state.cause
    grace = state.spec.shutdown_timeout
    match event:
        case Join(node):
            agents = {**state.agents, node: bare(event)}
            draft.put(replace(state, agents=agents, away=state.away - {node}))
            late = AgentLost(node, "it has not ended in time")
            draft.order(node, Shutdown(grace))
            draft.send(After(grace + REJOIN_TIMEOUT, late))
        case AgentLost(node, reason):
            draft.put(_without(state, node), PhaseEvent.NODE_LOST)
            draft.record("agent_lost", f"{node}: {reason}", node)
        case Due.REJOIN:
            for node in state.away:
                draft.put(_without(draft.state, node), PhaseEvent.NODE_LOST)
        case WorkerExited():
            draft.put(_with_exit(state, event), PhaseEvent.ENDED)
        case Stop() | OwnerLost():
            # As in `step`, the first request to stop a job that is ending changes nothing unless it has a grace period.
            patient = (
                isinstance(event, Stop) and event.grace is None and not event.hurries(state.asked_to_stop)
            )
            draft.put(replace(state, asked_to_stop=True))
            for node in () if patient else sorted(state.agents.keys() - state.away):
                draft.order(node, Shutdown())
        case Notice():
            draft.record("notice", f"{event.source}: {event.text}", event.source)
            draft.send(ToWatchers(event))
    return _ended_if_over(draft)


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


def _ended_if_over(draft: JobDraft) -> tuple[JobState, list[Command]]:
    state = draft.state
    verdict = state.verdict
    if state.agents or state.away or verdict is None:
        return draft.done()
    roles = {
        name: role
        if role.phase in ROLE_ENDS
        else replace(_killed(role, state.nodes), phase=RolePhase.STOPPED)
        for name, role in state.roles.items()
    }
    draft.put(replace(state, roles=roles), PhaseEvent.ABORTED)
    finish(draft, verdict)
    return draft.done()


def _killed(role: RoleState, nodes: Collection[str]) -> RoleState:
    """The role after its workers on `nodes` were killed."""
    workers = Ranks(w.ended(_KILLED) if w.live and w.node in nodes else w for w in role.workers)
    return replace(role, workers=workers)
