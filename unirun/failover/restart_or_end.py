"""Restarts, the end of roles and of the job, and the root cause that its report names."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from unirun.errors import EXIT_FAILURE, EXIT_PLACEMENT, IllegalTransition, shortened
from unirun.failover.diagnosis import collective_of, is_consequence, lost, missed, waited_for_a_peer
from unirun.failover.draft import After, Due, Finish, JobDraft, ToWatchers
from unirun.failover.generations import form_next, start_missing, without_pending
from unirun.failover.phases import PhaseEvent
from unirun.failover.policy import Decision, budget_for, with_payment
from unirun.failover.state import (
    NEVER,
    ROLE_ENDS,
    ROLE_WORKS,
    Exit,
    Failure,
    JobPhase,
    JobState,
    Ranks,
    RolePhase,
    RoleState,
    Verdict,
)
from unirun.values import Value, WorkerId, show_ranks
from unirun.wire.messages import FollowSteps, Shutdown, StopWorkers
from unirun.wire.reports import Ending, Notice

# The choice of the root cause among several failures, and its report for a person.
#
# It is the first failure in time, with two corrections. A process that is killed drops its connections, and its peers
# may raise an error about that before the kill itself is seen: a failure whose text says that a peer went away is a
# consequence as long as there is one that does not say so. When all failures say so, the cause is a rank that has not
# failed, if it is known: one that left its peers with exit code 0, or the one that they all waited for. Without one, it
# is a rank that waited in another collective than most of its role.

MAX_DETECTION_DELAY = 1.0
"""Seconds by which the end of a process may be seen later than its consequences."""

CONSEQUENCE_SECONDS = 60.0
"""Seconds from the end of a rank to the failures in another role that are taken for a consequence of it."""


class Diagnosis(Value):
    """The `cause`, the `reason` for taking it, and the `others` in order of time. The reason for a cause that is
    inferred is its `note`, which says how it caused the other failures."""

    cause: Failure
    reason: str
    others: tuple[Failure, ...]

    @property
    def failure(self) -> Failure:
        """The first rank that has failed itself: the one with an error to show."""
        return self.others[0] if self.cause.inferred else self.cause

    @property
    def code(self) -> int:
        """The exit code of the job. A rank that ended with 0 gives none."""
        return EXIT_FAILURE if self.cause.exit.ok else self.failure.exit.status

    def __str__(self) -> str:
        what = self.reason if self.cause.inferred else f"{self.cause.exit} ({self.reason})"
        return f"{self.cause.worker} on {self.cause.node}: {what}"


def episode(failures: Sequence[Failure], gap: float = 5.0) -> tuple[Failure, ...]:
    """The failures that belong together with the last one.

    Of each role only the latest generation that failed counts, and, going back from the last failure, no
    silence longer than `gap` seconds lies between two of them. Inferred failures do not count.
    """
    failures = [failure for failure in failures if not failure.inferred]
    latest = {
        f.worker.role: max(g.generation for g in failures if g.worker.role == f.worker.role) for f in failures
    }
    ordered = sorted((f for f in failures if f.generation == latest[f.worker.role]), key=lambda f: f.time)
    start = len(ordered) - 1
    while start > 0 and ordered[start].time - ordered[start - 1].time <= gap:
        start -= 1
    return tuple(ordered[max(start, 0) :])


def bystanders(state: JobState, failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """The workers that are not among `failures`: those of the same generations, and those of other roles. They may be
    the cause. The time of each is that at which it ended with 0 by itself; 0 if it lived until it was told to end."""
    failed = {failure.worker for failure in (*state.failures, *failures)}
    generations = {failure.worker.role: failure.generation for failure in failures}
    found = []
    for role in state.roles.values():
        for worker in role.workers:
            who = WorkerId(role.name, worker.rank, worker.incarnation)
            if who in failed or worker.generation != generations.get(role.name, worker.generation):
                continue
            log = f"{state.logs}/{role.name}/{worker.rank}/{worker.incarnation}"
            generation, end = generations.get(role.name, 0), worker.exit or Exit()
            found.append(
                Failure(
                    who,
                    generation,
                    worker.node,
                    worker.left,
                    end,
                    log=log,
                    inferred=True,
                    rule="peers",
                    slots=worker.own,
                )
            )
    return tuple(found)


def diagnose(failures: Sequence[Failure], others: Sequence[Failure] = ()) -> Diagnosis:
    """The root cause among `failures` (at least one), or among the `others`, which have not failed."""
    ordered = sorted(failures, key=lambda f: (f.time, f.worker.role, f.worker.rank, f.generation))
    firsts = [failure for failure in ordered if not is_consequence(failure)]
    inferred = None if firsts else _without_failure(ordered, others)
    if inferred is not None:
        return Diagnosis(inferred, inferred.note, tuple(ordered))
    apart, where = ([], "") if firsts else _in_another_collective(ordered)
    cause = (firsts or apart or ordered)[0]
    rest = tuple(failure for failure in ordered if failure is not cause)
    if not rest:
        reason = "the only failure"
    elif apart:
        reason = where
    elif not firsts:
        reason = f"the first of {len(ordered)} failures, all about a lost peer or connection{_idle(ordered, others)}"
    elif cause is ordered[0]:
        reason = f"the first of {len(ordered)} failures"
    else:
        reason = f"the first of {len(ordered)} failures that is not about a lost peer"
    return Diagnosis(cause, reason, rest)


def _in_another_collective(failures: Sequence[Failure]) -> tuple[list[Failure], str]:
    """The failures of the ranks that waited in another collective than most ranks of their role, and that in words;
    empty if there are none, or if it is not known of all from the same source."""
    places = {failure.worker: collective_of(failure) for failure in failures}
    most, count = Counter(places.values()).most_common(1)[0]
    apart = [failure for failure in failures if places[failure.worker] != most]
    roles = {who.role for who in places}
    # NCCL has other names than Python, and numbers.
    sources = {" " in place for place in places.values()}
    if not apart or "" in places.values() or len(roles) > 1 or len(sources) > 1 or count <= len(places) / 2:
        return [], ""
    first, *rest = apart
    others = _named(who for who, place in places.items() if place == most)
    text = f"it waited in {places[first.worker]}, {others} in {most}"
    return apart, text + (f"; {_named(each.worker for each in rest)} elsewhere, too" if rest else "")


def _idle(failures: Sequence[Failure], others: Sequence[Failure]) -> str:
    """The hint for the case that all ranks of a role have waited for a peer in vain: it may be of another role, with
    which they have a group."""
    roles = {failure.worker.role for failure in failures}
    silent = [each.worker for each in others if not each.time]
    if not any(map(waited_for_a_peer, failures)) or not silent or any(each.role in roles for each in silent):
        return ""
    return f"; {_named(silent)} had not failed"


def _without_failure(failures: Sequence[Failure], others: Sequence[Failure]) -> Failure | None:
    """The rank that all `failures` are a consequence of, though it has not failed itself; None if it is not known."""
    left = "ended with exit code 0 while {others} waited for {it}"
    for each in others:
        who = each.worker.role, each.worker.rank
        if each.time and (callers := [failure for failure in failures if who in lost(failure)]):
            return _blamed([each], callers, left)
    waiting = [failure for failure in failures if waited_for_a_peer(failure)]
    if not waiting:
        return None
    roles = {failure.worker.role for failure in waiting}
    first = waiting[0].time
    early = [each for each in others if each.time and each.time <= first + MAX_DETECTION_DELAY]
    if mates := [each for each in early if each.worker.role in roles]:
        return _blamed(mates, waiting, left)
    silent = [each for each in others if each.worker.role in roles and not each.time]
    named = {(failure.worker.role, rank) for failure in waiting for rank in missed(failure)}
    if absent := [each for each in silent if (each.worker.role, each.worker.rank) in named]:
        return _blamed(absent, waiting, "did not come to the collective in which {others} waited for {it}")
    if len(silent) == 1 or 0 < len(silent) < len(waiting):
        # If there are more such ranks, most of them were told to end before their own wait was over.
        return _blamed(silent, waiting, "had not failed when {others} waited for a peer in vain")
    if gone := [each for each in early if each.time >= first - CONSEQUENCE_SECONDS]:
        return _blamed(gone, waiting, left)
    return None


def _blamed(ranks: Sequence[Failure], waiting: Sequence[Failure], words: str) -> Failure:
    """The first of `ranks` as the cause of what `waiting` ranks report."""
    first = min(ranks, key=lambda each: (each.time, each.worker.role, each.worker.rank))
    note = words.format(
        others=_named(failure.worker for failure in waiting), it="it" if len(ranks) == 1 else "them"
    )
    if rest := [each.worker for each in ranks if each is not first]:
        note = f"{note}, as {_named(rest)} did"
    return replace(first, time=first.time or waiting[0].time, note=note)


def _named(workers: Iterable[WorkerId]) -> str:
    """``actor:0-3 and rollout:1``"""
    roles: dict[str, list[int]] = {}
    for worker in workers:
        roles.setdefault(worker.role, []).append(worker.rank)
    return " and ".join(f"{role}:{show_ranks(sorted(ranks))}" for role, ranks in sorted(roles.items()))


OTHERS_SHOWN = 8


def failure_report(reason: str, diagnosis: Diagnosis) -> str:
    """Several lines: the consequences first, then the cause with its traceback and its log."""
    cause = diagnosis.cause
    lines = [f"job failed: {reason}"]
    if diagnosis.others:
        lines.append(f"other failures ({len(diagnosis.others)}):")
        # They lost a connection to the rank that is the cause, or to one another, and say no more.
        followed = () if is_consequence(cause) else tuple(filter(is_consequence, diagnosis.others))
        followed = followed if len(followed) > 1 else ()
        own = [each for each in diagnosis.others if each not in followed]
        lines += [f"  {_short(failure, cause)}" for failure in own[:OTHERS_SHOWN]]
        if len(own) > OTHERS_SHOWN:
            lines.append(f"  … and {len(own) - OTHERS_SHOWN} more")
        if followed:
            ranks = _named(failure.worker for failure in followed)
            lines.append(f"  {ranks} only lost a connection to a peer")
    lines.append(f"root cause: {diagnosis}")
    if cause.note and not cause.inferred:
        lines.append(f"  {cause.note}")
    words = cause.traceback or cause.message
    if not words and cause.tail:
        lines.append("  the end of its output:")
        words = cause.tail
    lines += [f"  {line}" for line in shortened(words.rstrip().splitlines(), "the log has them")]
    if cause.log:
        lines.append(f"  log: {cause.log}/stderr.log")
    return "\n".join(lines)


def _short(failure: Failure, cause: Failure) -> str:
    later = failure.time - cause.time
    when = f"{abs(later):.3f} s {'later' if later >= 0 else 'before'}"
    words = failure.message.splitlines()[0][:160] if failure.message else failure.note
    return f"{failure.worker} on {failure.node}: {failure.exit}, {when}{': ' + words if words else ''}"


EVIDENCE_DELAY = 1.0
"""Seconds that peers get to fail or end by themselves after a failure that blames a peer: a rank that does
neither is the cause. A hang has lasted longer by then; when a peer is gone, all others fail within
milliseconds, and there is no wait."""


def advance(draft: JobDraft, name: str) -> None:
    """Advance a role after a worker ended without a new failure."""
    role = draft.role(name)
    if role.phase in ROLE_WORKS:
        if role.has_done_its_work and role.workers[0].due == NEVER:
            draft.put(replace(role, phase=RolePhase.FAILED), PhaseEvent.NONE_WANTED)
        elif role.has_done_its_work:
            draft.put(replace(role, phase=RolePhase.SUCCEEDED, grows=False), PhaseEvent.ALL_SUCCEEDED)
            draft.record("role", f"role {name} succeeded", name)
        else:
            settle(draft, name)
        return
    if role.living:
        return
    if role.phase is RolePhase.RESTARTING and len(role.given_up) == len(role.workers):
        draft.put(replace(role, phase=RolePhase.FAILED), PhaseEvent.NONE_WANTED)
    elif role.phase is RolePhase.RESTARTING:
        _tell_cause(draft, role)
        form_anew(draft, name)
    elif role.phase is RolePhase.STOPPING:
        last = {WorkerId(name, worker.rank, worker.incarnation) for worker in role.workers}
        if any(each.worker in last for each in draft.state.failures):
            draft.put(replace(role, phase=RolePhase.FAILED), PhaseEvent.WORKERS_GONE_BY_FAILURE)
        else:
            draft.put(replace(role, phase=RolePhase.STOPPED), PhaseEvent.WORKERS_GONE)


def _tell_cause(draft: JobDraft, role: RoleState) -> None:
    """Report the cause of a restart of `role` if the failure that was decided about is a consequence of another one: of
    a rank of which the master has heard later, as on another node, or of one that has not failed. It is known only once
    all failures are."""
    failures = [each for each in draft.state.failures if each.worker.role == role.name and not each.inferred]
    if role.orderly or not failures or failures[-1].generation != role.generation:
        return
    found = [each for each in failures if each.generation == role.generation]
    diagnosis = diagnose(found, bystanders(draft.state, found))
    apart, _ = _in_another_collective(found)
    others = is_consequence(found[0]) and (diagnosis.cause in apart or not is_consequence(diagnosis.cause))
    if diagnosis.cause.inferred or others:
        _keep_cause(draft, diagnosis)
        draft.send(ToWatchers(Notice(role.name, f"the cause of its restart: {diagnosis}")))


def _keep_cause(draft: JobDraft, diagnosis: Diagnosis) -> None:
    """Write the cause of other failures, and remember it if it is a rank that has not failed itself."""
    draft.record("cause", str(diagnosis), str(diagnosis.cause.worker))
    if diagnosis.cause.inferred:
        draft.fail(diagnosis.cause)


def form_anew(draft: JobDraft, name: str) -> None:
    """Form the next generation of a role; end the job when some of its ranks have no place.

    That is so for ranks that had succeeded before their node was lost, when they did not fit on another node.
    """
    role = draft.role(name)
    places = draft.state.placement.of_role(name)
    gone, given_up = draft.state.placement.lost, role.given_up
    lost = [place.rank for place in places if place.node in gone and place.rank not in given_up]
    if not lost:
        form_next(draft, name)
        return
    draft.put(replace(role, phase=RolePhase.STOPPING), PhaseEvent.NO_PLACE)
    who = f"{name}:{show_ranks(lost)}"
    reason = f"role {name} cannot start again: the node of {who} is gone, and they fit nowhere else"
    stop_all(draft, Verdict(JobPhase.FAILED, EXIT_PLACEMENT, reason), signal.SIGTERM, None)


def settle(draft: JobDraft, name: str) -> None:
    """Set a role that starts to running once all of its ranks run."""
    role = draft.role(name)
    if role.phase in (RolePhase.STARTING, RolePhase.REFORMING) and role.settled:
        draft.put(replace(role, phase=RolePhase.RUNNING), PhaseEvent.ALL_UP)
        draft.record("running", f"role {name}: every rank runs", name)
        _follow_steps(draft, name)
        draft.tell_soon()
        draft.grow_soon()


def _follow_steps(draft: JobDraft, name: str) -> None:
    """Ask for the steps of a role that runs again after a failure in its last generation."""
    role = draft.role(name)
    failed = [each for each in draft.state.failures if each.worker.role == name]
    if not failed or failed[-1].generation != role.generation - 1 or role.is_program:
        return
    furthest = max(worker.step for worker in role.workers)
    for worker in role.workers if furthest >= 0 else ():
        if worker.step >= 0:
            draft.put_worker(name, replace(worker, step=-1))
    order = FollowSteps(name, role.generation, furthest, max(draft.now - failed[-1].noticed, 0.0))
    for node in sorted({worker.node for worker in role.live}):
        draft.order(node, order)


def unsettle(draft: JobDraft, name: str) -> None:
    """Set a running role to starting when one of its ranks is not up any more."""
    role = draft.role(name)
    if role.phase is RolePhase.RUNNING and not role.settled:
        draft.put(replace(role, phase=RolePhase.STARTING), PhaseEvent.NOT_ALL_UP)


def stop_all(
    draft: JobDraft, verdict: Verdict, signum: int, grace: float | None, *, together: bool = False
) -> None:
    """Stop every role; the job ends with `verdict` when the last worker is gone. The role that has failed may have some
    time before that (`_patience`). Unless all stop `together`, services are told later, when others have ended
    (`unirun.failover.readiness.stop_due`)."""
    if draft.state.verdict is not None:
        return
    grace = draft.state.spec.shutdown_timeout if grace is None else grace
    verdict = replace(verdict, signal=int(signum), grace=grace)
    draft.record("stopping", verdict.reason)
    stopping = replace(draft.state, phase=JobPhase.STOPPING, verdict=verdict, cause=draft.cause)
    draft.put(stopping, PhaseEvent.END_DECIDED)
    for name in draft.state.roles:
        role = draft.role(name)
        service = draft.state.role_spec(name).service and role.phase in ROLE_WORKS
        later = service and role.living and not together
        if role.phase not in ROLE_ENDS and not later:
            stop_role(draft, name, verdict)


def stop_role(draft: JobDraft, name: str, verdict: Verdict) -> None:
    """Tell the workers of a role to end, as the job ends with `verdict`."""
    draft.put(replace(draft.role(name), phase=RolePhase.STOPPING), PhaseEvent.TOLD_TO_END)
    after = _patience(draft.state, name) if verdict.by_failure else 0.0
    draft.stop(name, verdict.signal, verdict.grace, after)
    advance(draft, name)


def shutdown_order(state: JobState, verdict: Verdict) -> Shutdown:
    """The order to end workers when the verdict cannot be written to the store. Agents tell the verdict to the next
    master."""
    ending = Ending(verdict.phase.value, verdict.code, verdict.reason, verdict.by_failure)
    return Shutdown(state.spec.shutdown_timeout, ending)


def end_as_told(draft: JobDraft, ending: Ending) -> None:
    """End the job with the verdict of an earlier master, which could not write it."""
    verdict = Verdict(JobPhase(ending.phase), ending.code, ending.reason, ending.by_failure)
    if verdict.phase is JobPhase.SUCCEEDED:
        # That master saw them succeed; agents that have left since cannot report it again.
        for role in map(draft.role, draft.state.spec.primary):
            if role.phase in ROLE_WORKS:
                workers = Ranks(w.ended(Exit(code=0)) for w in role.workers)
                seen = replace(role, phase=RolePhase.SUCCEEDED, workers=workers)
                draft.put(seen, PhaseEvent.SEEN_TO_SUCCEED)
    stop_all(draft, verdict, signal.SIGTERM, None)


def end_if_over(draft: JobDraft) -> None:
    """Stop the job when its primary roles have succeeded; end it when it is stopping and no worker is left. A job of
    services alone goes on until it is stopped, or none of them is left."""
    state = draft.state
    if state.phase is JobPhase.RUNNING and (verdict := _verdict(state)) is not None:
        stop_all(draft, verdict, signal.SIGTERM, None)
        state = draft.state
    if state.phase is not JobPhase.STOPPING:
        return
    for name in state.roles:
        # A service that was not told to end yet may have lost a rank, which does not start again.
        unsettle(draft, name)
    state = draft.state
    if state.live:
        return
    verdict = state.verdict
    if verdict is None:
        raise IllegalTransition("the job is stopping without a verdict")
    verdict = replace(verdict, report=verdict.reason)
    if verdict.by_failure and (found := episode(state.failures)):
        diagnosis = diagnose(found, bystanders(state, found))
        report = failure_report(verdict.reason, diagnosis)
        if diagnosis.cause.inferred:
            _keep_cause(draft, diagnosis)
            verdict = replace(verdict, reason=f"{diagnosis}; {verdict.reason}")
        code = verdict.code or diagnosis.code
        verdict = replace(verdict, code=code, report=report, error_file=f"{diagnosis.failure.log}/error.json")
    elif verdict.by_failure:
        # An earlier master knew the failures, and could not write them.
        verdict = replace(verdict, code=verdict.code or EXIT_FAILURE)
    finish(draft, verdict)


def _verdict(state: JobState) -> Verdict | None:
    """The end of a running job that is due."""
    names = state.spec.primary
    if not names and all(role.phase in ROLE_ENDS for role in state.roles.values()):
        return Verdict(JobPhase.FAILED, EXIT_FAILURE, "no role is left")
    if names and all(state.roles[name].phase is RolePhase.SUCCEEDED for name in names):
        return Verdict(JobPhase.SUCCEEDED, 0, f"{', '.join(names)} succeeded")
    return None


def finish(draft: JobDraft, verdict: Verdict) -> None:
    """End the job with this verdict."""
    ended = replace(draft.state, phase=verdict.phase, verdict=verdict, ended=draft.now)
    draft.put(ended, PhaseEvent.JOB_OVER)
    draft.cause = draft.state.cause
    draft.record("end", f"{verdict.phase}: {verdict.reason} (exit code {verdict.code})")
    draft.send(Finish(verdict))


def restart(draft: JobDraft, name: str, decision: Decision) -> None:
    """Restart a whole role, or start its lost ranks again, as was decided."""
    if decision.action == "join":
        start_missing(draft, name)
        return
    if draft.role(name).is_program:
        _back_off(draft, name, decision)
    elif not decision.free:
        delay(draft, name, budget_for(draft.state, draft.role(name), draft.now).back_off)
    role = draft.role(name)
    if not decision.free:
        role = replace(role, restarts=role.restarts + 1, paid=_paid(draft, name, role.paid))
    if decision.action == "restart_worker" and role.is_program:
        draft.put(replace(role, phase=RolePhase.STARTING), PhaseEvent.PROGRAMS_RESTART)
        stop_groups(draft, name)
        return
    if decision.action == "restart_worker":
        draft.put(replace(role, phase=RolePhase.REFORMING), PhaseEvent.RANKS_RESTART)
        form_anew(draft, name)
        return
    restart_all(draft, replace(role, orderly=decision.free))


def delay(draft: JobDraft, name: str, seconds: float, *, with_job: bool = False) -> None:
    """Let the next generation of a role meet in `seconds` at the earliest; `with_job`, not before its turn either."""
    role = draft.role(name)
    if seconds or with_job:
        draft.put(replace(role, due=max(role.due, draft.now + seconds)))
        draft.send(After(seconds, Due.START))


def restart_all(draft: JobDraft, role: RoleState) -> None:
    """End all ranks of a role, and start new ones when they are gone."""
    draft.put(replace(draft.state, commits=without_pending(draft.state.commits, role.name)))
    draft.put(replace(role, phase=RolePhase.RESTARTING), PhaseEvent.ROLE_RESTARTS)
    grace = draft.state.spec.shutdown_timeout
    draft.stop(role.name, signal.SIGTERM, grace, _patience(draft.state, role.name))
    advance(draft, role.name)


def stop_groups(draft: JobDraft, name: str) -> None:
    """Tell the live ranks of groups to end of which a rank has ended: a group starts again as a whole."""
    spec, role, ranks = draft.state.role_spec(name), draft.role(name), set[int]()
    for worker in role.workers if spec.group else ():
        if not worker.live and not worker.ended_well:
            ranks.update(spec.members(worker.rank))
    draft.stop(name, signal.SIGTERM, draft.state.spec.shutdown_timeout, ranks=ranks)


def give_up(draft: JobDraft, name: str, ranks: Collection[int], reason: str, *, tail: str = "") -> None:
    """Go on without these ranks of an optional service, and those that are one server with them, and tell the `reason`.
    A role that restarts as a whole is given up as a whole. `tail` are its last lines."""
    who, text = f"{name}:{show_ranks(ranks)}", f"{reason}; the job goes on without it"
    draft.record("decision", text, who)
    draft.send(ToWatchers(Notice(who, f"{text}{tail}")))
    role = draft.role(name)
    spec, grace = draft.state.role_spec(name), draft.state.spec.shutdown_timeout
    if role.restart == "role":
        draft.put(replace(role, phase=RolePhase.STOPPING), PhaseEvent.GIVEN_UP)
        draft.stop(name, signal.SIGTERM, grace)
        advance(draft, name)
        return
    left = {member for rank in ranks for member in spec.members(rank)}
    for rank in left:
        worker = role.workers[rank]
        role = role.with_worker(replace(worker, due=NEVER))
        if worker.live and role.phase in ROLE_WORKS:
            draft.order(worker.node, StopWorkers(name, (rank,), int(signal.SIGTERM), grace))
    if all(worker.due == NEVER and not worker.live for worker in role.workers):
        draft.put(replace(role, phase=RolePhase.FAILED), PhaseEvent.GIVEN_UP)
    else:
        draft.put(role)
        unsettle(draft, name)
        settle(draft, name)


def _back_off(draft: JobDraft, name: str, decision: Decision) -> None:
    """The ranks that have just ended start again after the back-off of their budget. A rank that has a time for its
    start already has paid; for those of a group, the role pays."""
    now, free = draft.now, decision.free or draft.role(name).grouped
    for worker in draft.role(name).workers:
        if worker.live or worker.ended_well or worker.due or worker.exit is None:
            continue
        delay = budget_for(draft.state, draft.role(name), now, [worker.rank]).back_off
        paid = worker.paid if free else _paid(draft, name, worker.paid)
        draft.put_worker(name, replace(worker, due=now + delay, paid=paid))
        if delay:
            draft.send(After(delay, Due.START))


def _paid(draft: JobDraft, name: str, before: Sequence[float]) -> tuple[float, ...]:
    return with_payment(before, draft.now, draft.state.role_spec(name).max_restarts)


def end_job(draft: JobDraft, decision: Decision, code: int, *, by_failure: bool) -> None:
    """End the job with the exit code that was decided, else with that of the root cause if it ends `by_failure`, else
    with `code`."""
    code = decision.code or (0 if by_failure else code)
    stop_all(draft, Verdict(JobPhase.FAILED, code, decision.reason, by_failure), signal.SIGTERM, None)


def _patience(state: JobState, role: str) -> float:
    """Seconds before the workers of `role` are told to end because of the last failure, if that is one of theirs."""
    last = state.failures[-1] if state.failures else None
    if last is None or role != last.worker.role or not waited_for_a_peer(last):
        return 0.0
    return EVIDENCE_DELAY if last.generation == state.roles[last.worker.role].generation else 0.0
