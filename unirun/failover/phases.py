"""The phases of a job, of its roles and of its workers: which may follow which, because of what, and the function that
brings it about.

`unirun.failover.draft.JobDraft.put` lets no other change of a phase through. ``docs/phases.md`` has the same tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from unirun.failover.state import ROLE_WORKS, JobPhase, RolePhase, WorkerPhase

Phase = JobPhase | RolePhase | WorkerPhase


class PhaseEvent(StrEnum):
    """The reason for which a phase changes, in the words of the documentation."""

    NODES_JOINED = "every node with ranks has joined"
    END_DECIDED = "the end of the job is decided"
    JOB_OVER = "no worker is left; the verdict says which end it is"

    TURN_COMES = "ports are there, and the roles that it starts after are ready"
    ALL_UP = "every rank is up"
    NOT_ALL_UP = "a rank is not up any more"
    STORE_OPENED = "the old ranks are gone, and the next generation can meet"
    ROLE_RESTARTS = "all ranks restart after a loss, to make room, or with the job"
    RANKS_RESTART = "some ranks restart, and the others keep their memory"
    PROGRAMS_RESTART = "some of its programs restart or move"
    STORE_ENDED = "its store has ended, and all ranks live on"
    ALL_SUCCEEDED = "every rank has succeeded"
    GIVEN_UP = "the job goes on without it"
    NONE_WANTED = "its last worker is gone, and the job goes on without it"
    NO_PLACE = "some ranks fit on no node that is left"
    TOLD_TO_END = "it is told to end, as the job ends"
    AGENT_LEAVES = "the only agent has ended one of its workers, and leaves"
    WORKERS_GONE = "no worker of it is left"
    WORKERS_GONE_BY_FAILURE = "no worker of it is left, and one of the last has failed"

    ORDERED = "it is ordered from an agent"
    FORKED = "it has a process"
    RUNS = "it is in the user's code"
    MEMBER_RUNS = "it is in the user's code, and the first rank of its group is probed for all"
    SERVES = "it takes calls"
    READY = "its probe says that it is ready"
    UNREADY = "its probe says that it is not ready"
    ENDED = "its process has ended"
    NODE_LOST = "its node is lost"
    HELD = "its agent says how it stands, as it joins again"
    NOT_HELD = "its agent does not have it, as it joins again: as if it had not been ordered"

    TAKEN_OVER = "another master leads, and does not know yet how it stands"
    SEEN_TO_SUCCEED = "an earlier master saw the job succeed, and could not write that"
    ABORTED = "a bug has ended too many masters"


PhaseChange = tuple[tuple[Phase, ...], PhaseEvent, Phase, str]
"""A row: in one of these phases the event leads to the next phase; the function carries that out."""

J, R, W, E = JobPhase, RolePhase, WorkerPhase, PhaseEvent

NOT_TOLD_TO_END = (R.WAITING, R.STARTING, R.RUNNING, R.REFORMING, R.RESTARTING)
LIVE = (W.STARTING, W.ALIVE, W.RUNNING, W.SERVING)

# fmt: off
JOB_CHANGES: tuple[PhaseChange, ...] = (
    ((J.LAUNCHING,), E.NODES_JOINED, J.RUNNING, "generations.form_if_all_are_there"),
    ((J.LAUNCHING, J.RUNNING), E.END_DECIDED, J.STOPPING, "restart_or_end.stop_all"),
    ((J.LAUNCHING, J.RUNNING), E.ABORTED, J.STOPPING, "crashes.begin_abort"),
    ((J.STOPPING,), E.JOB_OVER, J.SUCCEEDED, "restart_or_end.finish"),
    ((J.STOPPING,), E.JOB_OVER, J.FAILED, "restart_or_end.finish"),
    ((J.STOPPING,), E.JOB_OVER, J.STOPPED, "restart_or_end.finish"),
)

ROLE_CHANGES: tuple[PhaseChange, ...] = (
    ((R.WAITING,), E.TURN_COMES, R.STARTING, "generations.form_first"),
    ((R.STARTING, R.REFORMING), E.ALL_UP, R.RUNNING, "restart_or_end.settle"),
    ((R.RUNNING,), E.NOT_ALL_UP, R.STARTING, "restart_or_end.unsettle"),
    ((R.RUNNING,), E.PROGRAMS_RESTART, R.STARTING, "restart_or_end.restart"),
    ((R.STARTING, R.RUNNING), E.RANKS_RESTART, R.REFORMING, "restart_or_end.restart"),
    ((R.RUNNING,), E.STORE_ENDED, R.REFORMING, "worker_failure.store_ended"),
    (ROLE_WORKS, E.ROLE_RESTARTS, R.RESTARTING, "restart_or_end.restart_all"),
    ((R.SUCCEEDED,), E.ROLE_RESTARTS, R.RESTARTING, "moving.restart_job"),
    ((R.RESTARTING,), E.STORE_OPENED, R.STARTING, "generations.opened"),
    ((R.RUNNING,), E.TAKEN_OVER, R.STARTING, "takeover.resume"),
    (ROLE_WORKS, E.ALL_SUCCEEDED, R.SUCCEEDED, "restart_or_end.advance"),
    (ROLE_WORKS, E.SEEN_TO_SUCCEED, R.SUCCEEDED, "restart_or_end.end_as_told"),
    (NOT_TOLD_TO_END, E.GIVEN_UP, R.FAILED, "restart_or_end.give_up"),
    (NOT_TOLD_TO_END, E.GIVEN_UP, R.STOPPING, "restart_or_end.give_up"),
    ((*ROLE_WORKS, R.RESTARTING), E.NONE_WANTED, R.FAILED, "restart_or_end.advance"),
    ((R.REFORMING, R.RESTARTING), E.NO_PLACE, R.STOPPING, "restart_or_end.form_anew"),
    (ROLE_WORKS, E.AGENT_LEAVES, R.STOPPING, "worker_failure.exited"),
    (NOT_TOLD_TO_END, E.TOLD_TO_END, R.STOPPING, "restart_or_end.stop_role"),
    (NOT_TOLD_TO_END, E.ABORTED, R.STOPPING, "crashes.begin_abort"),
    ((R.STOPPING,), E.WORKERS_GONE, R.STOPPED, "restart_or_end.advance"),
    ((R.STOPPING,), E.WORKERS_GONE_BY_FAILURE, R.FAILED, "restart_or_end.advance"),
    ((R.STOPPING,), E.ABORTED, R.STOPPED, "crashes._ended_if_over"),
)

WORKER_CHANGES: tuple[PhaseChange, ...] = (
    ((W.WAITING,), E.TURN_COMES, W.STARTING, "generations.form_first"),
    ((W.WAITING, W.EXITED), E.ORDERED, W.STARTING, "generations._complete"),
    ((W.STARTING,), E.FORKED, W.ALIVE, "step._started"),
    ((W.STARTING, W.ALIVE), E.RUNS, W.RUNNING, "step._running"),
    ((W.STARTING, W.ALIVE), E.MEMBER_RUNS, W.SERVING, "step._running"),
    ((W.STARTING, W.ALIVE, W.RUNNING), E.SERVES, W.SERVING, "step._serving"),
    ((W.STARTING, W.ALIVE, W.RUNNING), E.READY, W.SERVING, "readiness.health_changed"),
    ((W.STARTING, W.ALIVE, W.SERVING), E.UNREADY, W.RUNNING, "readiness.health_changed"),
    (LIVE, E.ENDED, W.EXITED, "worker_failure.exited, crashes.abort_step"),
    (LIVE, E.NODE_LOST, W.EXITED, "nodes._fall, crashes.abort_step"),
    ((W.ALIVE, W.RUNNING, W.SERVING), E.TAKEN_OVER, W.STARTING, "takeover.resume"),
    ((W.STARTING,), E.HELD, W.ALIVE, "takeover._take_up_role"),
    ((W.STARTING, W.ALIVE, W.SERVING), E.HELD, W.RUNNING, "takeover._take_up_role"),
    ((W.STARTING, W.ALIVE, W.RUNNING), E.HELD, W.SERVING, "takeover._take_up_role"),
    (LIVE, E.NOT_HELD, W.WAITING, "takeover._take_up_role"),
    (LIVE, E.NOT_HELD, W.EXITED, "takeover._take_up_role"),
    ((W.WAITING, *LIVE), E.SEEN_TO_SUCCEED, W.EXITED, "restart_or_end.end_as_told"),
    (LIVE, E.ABORTED, W.EXITED, "crashes._ended_if_over"),
)
# fmt: on

_ALLOWED = frozenset(
    (type(then), phase, event, then)
    for phases, event, then, _ in (*JOB_CHANGES, *ROLE_CHANGES, *WORKER_CHANGES)
    for phase in phases
)


def is_allowed(before: Phase, event: PhaseEvent | None, after: Phase) -> bool:
    """Return True if `event` may lead from the phase `before` to `after`."""
    return (type(after), before, event, after) in _ALLOWED


def tables() -> str:
    """The tables, in Markdown."""
    whole = {"a job": JOB_CHANGES, "a role": ROLE_CHANGES, "a worker": WORKER_CHANGES}
    parts = ["\n".join((f"## Phases of {one}\n", *_table(rows))) for one, rows in whole.items()]
    return "\n\n".join(parts)


def _table(rows: tuple[PhaseChange, ...]) -> Iterator[str]:
    yield "| phase | event | next phase | function |"
    yield "| --- | --- | --- | --- |"
    for phases, event, then, function in rows:
        yield f"| {', '.join(phases)} | {event} | {then} | `{function}` |"
