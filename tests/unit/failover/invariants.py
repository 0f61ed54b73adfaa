"""The invariants of the state of a job, after every step."""

from __future__ import annotations

from collections import Counter

from unirun.errors import IllegalTransition
from unirun.failover.state import JOB_ENDS, ROLE_ENDS, JobState, Looked, RolePhase, RoleState, WorkerPhase


def check_role(role: RoleState, max_restarts: int, *, has_window: bool = False) -> None:
    """Raise `IllegalTransition` when an invariant does not hold."""

    def hold(true: bool, otherwise: str) -> None:
        if not true:
            raise IllegalTransition(f"role {role.name} {otherwise}")

    counted = Counter(worker.count_key for worker in role.workers)
    hold(role.workers.counts == counted, f"has {counted} and counts {role.workers.counts}")
    ranks = [worker.rank for worker in role.workers]
    hold(ranks == list(range(len(ranks))), "has ranks that are not 0..n-1")
    hold(role.phase not in ROLE_ENDS or not role.living, f"is {role.phase} and has live workers")
    hold(role.phase is not RolePhase.RUNNING or role.settled, f"is running with {role.running} ranks")
    hold(role.phase is not RolePhase.REFORMING or not role.settled, "is reforming and complete")
    survives = role.restart == "process" or any(worker.resilient is not None for worker in role.workers)
    # All ranks may have been on a node that is drained.
    survives |= all(worker.incarnation > 0 for worker in role.workers)
    hold(role.phase is not RolePhase.REFORMING or survives, "reforms, which it cannot")
    own_budgets = role.is_program and role.restart == "process"
    # Of a role with a window, `paid` are those that count; of others, `restarts` have to.
    paid = max((len(w.paid) for w in role.workers), default=0) if own_budgets else len(role.paid)
    restarts = paid if own_budgets or has_window else role.restarts
    hold(restarts <= max_restarts, f"has {restarts} restarts, which is over its budget")
    hold(role.opened <= role.generation, f"has a store of generation {role.opened}, which is to come")
    for worker in role.workers:
        who = f"has rank {worker.rank}"
        formed = role.is_program or worker.incarnation <= role.generation
        hold(formed, f"{who} started more often than it was formed")
        hold(worker.generation <= role.generation, f"{who} in a generation that is to come")
        hold(not worker.addresses or worker.phase is WorkerPhase.SERVING, f"{who} called though it is away")
    if role.phase is RolePhase.SUCCEEDED:
        hold(role.has_done_its_work, "succeeded without all of its workers")


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
    if state.phase in JOB_ENDS and (state.live or state.verdict is None or state.ended is None):
        raise IllegalTransition(f"the job is {state.phase} and not over")


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
