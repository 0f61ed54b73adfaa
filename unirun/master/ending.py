"""How roles and the job end."""

from __future__ import annotations

import signal

from msgspec.structs import replace

from unirun.errors import EXIT_BUDGET, EXIT_PLACEMENT, IllegalTransition
from unirun.failover import Exit, diagnose, episode
from unirun.graph import spans
from unirun.master.events import Finish
from unirun.master.formation import form_next
from unirun.master.report import failure_report
from unirun.master.state import ROLE_ENDS, ROLE_WORKS, JobPhase, JobState, RolePhase, RoleState, Verdict
from unirun.master.turn import Turn
from unirun.wire.messages import Shutdown
from unirun.wire.reports import Ending


def advance(turn: Turn, role: RoleState) -> None:
    """What follows when a worker of `role` has ended and that was no new failure."""
    if role.phase in ROLE_WORKS:
        if all(worker.ended_well for worker in role.workers):
            turn.put(replace(role, phase=RolePhase.SUCCEEDED))
            turn.record("role", f"role {role.name} succeeded")
        else:
            settle(turn, role)
        return
    if role.live:
        return
    if role.phase is RolePhase.RESTARTING:
        form_anew(turn, role)
    elif role.phase is RolePhase.STOPPING:
        last = {(role.name, worker.rank, worker.incarnation) for worker in role.workers}
        failed = any((each.role, each.rank, each.incarnation) in last for each in turn.state.failures)
        turn.put(replace(role, phase=RolePhase.FAILED if failed else RolePhase.STOPPED))


def form_anew(turn: Turn, role: RoleState) -> None:
    """Form the next generation of `role`; end the job when some of its ranks have no place for that.

    Those had done their work when their node was lost, and there was no room for them elsewhere.
    """
    places = turn.state.placement.of_role(role.name)
    lost = [place.rank for place in places if place.node in turn.state.placement.lost]
    if not lost:
        form_next(turn, role)
        return
    turn.put(replace(role, phase=RolePhase.STOPPING))
    who = f"{role.name}:{spans(lost)}"
    reason = f"role {role.name} cannot start again: the node of {who} is gone, and they fit nowhere else"
    stop_all(turn, Verdict(JobPhase.FAILED, EXIT_PLACEMENT, reason), signal.SIGTERM, None)


def settle(turn: Turn, role: RoleState) -> None:
    """Take over `role`, which runs as soon as all of its ranks do."""
    if role.phase in (RolePhase.STARTING, RolePhase.REFORMING) and role.settled:
        role = replace(role, phase=RolePhase.RUNNING)
        turn.record("running", f"role {role.name}: all {len(role.workers)} ranks run")
        turn.tell_soon()
    turn.put(role)


def stop_all(turn: Turn, verdict: Verdict, signum: int, grace: float | None) -> None:
    """Stop every role; the job ends with `verdict` when the last worker is gone."""
    turn.state = replace(turn.state, phase=JobPhase.STOPPING, verdict=verdict)
    turn.record("stopping", verdict.reason)
    grace = turn.state.spec.shutdown_timeout if grace is None else grace
    for role in list(turn.state.roles.values()):
        if role.phase in ROLE_ENDS:
            continue
        role = replace(role, phase=RolePhase.STOPPING)
        turn.put(role)
        turn.stop(role, signum, grace)
        advance(turn, role)


def shutdown_order(state: JobState, verdict: Verdict) -> Shutdown:
    """What agents are told when the job ends with a verdict that cannot be written: they end what they have, and tell
    the next master."""
    ending = Ending(verdict.phase.value, verdict.code, verdict.reason, verdict.by_failure)
    return Shutdown(state.spec.shutdown_timeout, ending)


def end_as_told(turn: Turn, ending: Ending) -> None:
    """End the job as an earlier master has decided that could not write it."""
    verdict = Verdict(JobPhase(ending.phase), ending.code, ending.reason, ending.by_failure)
    if verdict.phase is JobPhase.SUCCEEDED:
        # It has seen them succeed, and agents that have left since can tell of nobody.
        for name in turn.state.spec.primary:
            role = turn.state.roles[name]
            workers = tuple(w.ended(Exit(code=0)) for w in role.workers)
            turn.put(replace(role, phase=RolePhase.SUCCEEDED, workers=workers))
    stop_all(turn, verdict, signal.SIGTERM, None)


def end_if_over(turn: Turn) -> None:
    """Stop the job when its primary roles have succeeded; end it when it stops and nobody lives."""
    state = turn.state
    if state.phase is JobPhase.RUNNING and all(
        state.roles[name].phase is RolePhase.SUCCEEDED for name in state.spec.primary
    ):
        names = ", ".join(state.spec.primary)
        stop_all(turn, Verdict(JobPhase.SUCCEEDED, 0, f"{names} succeeded"), signal.SIGTERM, None)
        state = turn.state
    if state.phase is not JobPhase.STOPPING or state.live:
        return
    verdict = state.verdict
    if verdict is None:
        raise IllegalTransition("the job is stopping without a verdict")
    verdict = replace(verdict, report=verdict.reason)
    if verdict.by_failure and state.failures:
        diagnosis = diagnose(episode(state.failures))
        code = verdict.code if verdict.code == EXIT_BUDGET else diagnosis.cause.exit.status
        report = failure_report(verdict.reason, diagnosis)
        verdict = replace(verdict, code=code, report=report, error_file=f"{diagnosis.cause.log}/error.json")
    turn.state = replace(state, phase=verdict.phase, verdict=verdict, ended=turn.now)
    turn.record("end", f"{verdict.phase}: {verdict.reason} (exit code {verdict.code})")
    turn.send(Finish(verdict))
