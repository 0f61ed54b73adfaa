"""The invariants of the state of a job, after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

from msgspec import convert, to_builtins

from unirun.errors import IllegalTransition
from unirun.failover.draft import Command, Record, ToAgent, ToAgents, ToGuest, ToVisitors, ToWatchers
from unirun.failover.state import (
    JOB_ENDS,
    ROLE_ENDS,
    JobState,
    Looked,
    RolePhase,
    RoleState,
    WorkerPhase,
    WorkerState,
)
from unirun.observe.status import FailureStatus
from unirun.wire.frames import decode, encode


def check_role(role: RoleState, max_restarts: int, *, has_window: bool = False) -> None:
    """Raise `IllegalTransition` when an invariant does not hold."""

    def wrong(what: str) -> NoReturn:
        raise IllegalTransition(f"role {role.name} {what}")

    # Texts are made for what is wrong alone: this runs after each step of each history.
    counted = Counter(worker.count_key for worker in role.workers)
    if role.workers.counts != counted:
        wrong(f"has {counted} and counts {role.workers.counts}")
    ranks = [worker.rank for worker in role.workers]
    if ranks != list(range(len(ranks))):
        wrong("has ranks that are not 0..n-1")
    if role.phase in ROLE_ENDS and role.living:
        wrong(f"is {role.phase} and has live workers")
    if role.phase is RolePhase.RUNNING and not role.settled:
        wrong(f"is running with {role.running} ranks")
    if role.phase is RolePhase.REFORMING:
        if role.settled:
            wrong("is reforming and complete")
        survives = role.restart == "process" or any(worker.resilient is not None for worker in role.workers)
        # All ranks may have been on a node that is drained.
        if not survives and any(worker.incarnation == 0 for worker in role.workers):
            wrong("reforms, which it cannot")
    own_budgets = role.is_program and role.restart == "process"
    # Of a role with a window, `paid` are those that count; of others, `restarts` have to.
    paid = max((len(w.paid) for w in role.workers), default=0) if own_budgets else len(role.paid)
    restarts = paid if own_budgets or has_window else role.restarts
    if restarts > max_restarts:
        wrong(f"has {restarts} restarts, which is over its budget")
    if role.opened > role.generation:
        wrong(f"has a store of generation {role.opened}, which is to come")
    for worker in role.workers:
        if worker.incarnation > role.generation and not role.is_program:
            wrong(f"has rank {worker.rank} started more often than it was formed")
        if worker.generation > role.generation:
            wrong(f"has rank {worker.rank} in a generation that is to come")
        if worker.addresses and worker.phase is not WorkerPhase.SERVING:
            wrong(f"has rank {worker.rank} called though it is away")
    if role.phase is RolePhase.SUCCEEDED and not role.has_done_its_work:
        wrong("succeeded without all of its workers")


def check_job(state: JobState) -> None:
    """Raise `IllegalTransition` when an invariant does not hold."""
    restarts = len(state.paid) if state.spec.restart_window else state.restarts
    if restarts > state.spec.max_job_restarts:
        raise IllegalTransition(f"the job has {restarts} restarts, which is over its budget")
    for role in state.roles.values():
        spec = state.role_spec(role.name)
        check_role(role, spec.max_restarts, has_window=spec.restart_window > 0)
        if role.name in state.looked:
            _check_looked(state.looked[role.name], role, spec.group)
    if len({cut.nodes for cut in state.cuts}) < len(state.cuts):
        raise IllegalTransition(f"a pair of nodes is there twice: {state.cuts}")
    if state.phase in JOB_ENDS and (state.live or state.verdict is None or state.ended is None):
        raise IllegalTransition(f"the job is {state.phase} and not over")


def check_types(state: JobState, commands: Sequence[Command]) -> None:
    """Raise when a field of the state, of a message or of a record has another type than it should: others read it from
    a store, a stream or a file, and refuse it there."""
    convert(to_builtins(state, enc_hook=list), JobState, dec_hook=_ranks)
    for command in commands:
        match command:
            case (
                ToAgent(message=message)
                | ToAgents(message=message)
                | ToWatchers(message)
                | ToGuest(_, message)
            ):
                assert decode(encode(message)) == message
            case ToVisitors(view):
                assert decode(encode(view)) == view
            case Record(details=details):
                convert(to_builtins(command), Record)
                if "failure" in details:
                    convert(details["failure"], FailureStatus)
        if isinstance(command, ToAgent):
            assert isinstance(command.cause, str)


def _ranks(kind: type, rows: Any) -> Any:
    return kind(convert(rows, tuple[WorkerState, ...]))


def _check_looked(looked: Looked, role: RoleState, group: int | None) -> None:
    workers = looked.workers
    heads = workers[::group] if group else ()
    counted = (
        sum(worker.portless for worker in workers),
        sum(worker.ended_well or role.up(worker) for worker in heads),
        frozenset(worker.rank for worker in workers if not worker.live and not worker.ended_well),
    )
    if counted != (looked.portless, looked.ready, looked.missing):
        raise IllegalTransition(f"role {role.name} was {counted}, and was taken for {looked}")
