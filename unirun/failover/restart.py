"""Carries out what the policy has decided about a role: it restarts, in part or as a whole, or the job ends."""

from __future__ import annotations

import signal

from msgspec.structs import replace

from unirun.errors import EXIT_BUDGET
from unirun.failover.ending import advance, form_anew, stop_all
from unirun.failover.policy import Budget, Decision, History
from unirun.job.generations import start_missing
from unirun.job.state import JobPhase, JobState, RolePhase, RoleState, Verdict
from unirun.job.transition import Transition


def history_of(state: JobState, role: RoleState) -> History:
    """What the policy knows of `role`."""
    budget = Budget(state.role_spec(role.name).max_restarts, role.restarts)
    return History(budget, role.kind, role.restart, role.living, role.generation)


def restart(transition: Transition, role: RoleState, decision: Decision) -> None:
    """Restart the whole `role`, or start its lost ranks again, as was decided."""
    if decision.action == "join":
        start_missing(transition, role)
        return
    role = replace(role, restarts=role.restarts + 1)
    if decision.action == "restart_worker":
        form_anew(transition, replace(role, phase=RolePhase.REFORMING))
        return
    role = replace(role, phase=RolePhase.RESTARTING)
    transition.put(role)
    transition.stop(role, signal.SIGTERM, transition.state.spec.shutdown_timeout)
    advance(transition, role)


def end_job(transition: Transition, decision: Decision, code: int, *, by_failure: bool) -> None:
    """End the job as was decided, with exit code `code` unless a budget is spent."""
    code = EXIT_BUDGET if decision.budget_spent else code
    stop_all(transition, Verdict(JobPhase.FAILED, code, decision.reason, by_failure), signal.SIGTERM, None)
