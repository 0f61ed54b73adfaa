"""The common restart point of a job: the last step that all ranks of the roles that take part have committed.

A rank commits a step when it has saved what it needs to go on from there. The step counts once all ranks have, in one
decision over all roles. A restart of the job goes back to it: no role can have a later state than another one.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from unirun.failover.draft import JobDraft
from unirun.failover.state import Commits, JobState, PendingCommit, RolePhase
from unirun.values import WorkerId
from unirun.wire.reports import CommitJob, MasterReply

MAX_PENDING = 64
"""Steps that some ranks have committed and others have not. A role that is further ahead loses the oldest ones."""


def commit(draft: JobDraft, who: WorkerId, ask: CommitJob) -> None:
    """Note that a rank has committed a step, and answer it. A request that comes again changes nothing."""
    worker = draft.find(who)
    if worker is None:
        return
    before = draft.state.commits
    roles = (*dict.fromkeys(ask.roles),) or before.roles or taking_part(draft.state)
    problem = _why_not(draft.state, who, ask.step, roles)
    # What a role that starts again has saved may be written anew by its next ranks.
    if not problem and draft.role(who.role).phase is not RolePhase.RESTARTING:
        draft.put(replace(draft.state, commits=with_commit(draft.state, who, ask.step, roles)))
    step = draft.state.commits.step
    if step > before.step:
        text = f"the job can go back to step {step}, which every rank of {', '.join(roles)} has committed"
        draft.record("commit", text, *roles)
    data = None if problem or step < 0 else str(step)
    draft.order(worker.node, MasterReply(who, ask.number, data, problem))


def taking_part(state: JobState) -> tuple[str, ...]:
    """The roles that take part unless ranks name others: all but services and programs."""
    return tuple(role.name for role in state.spec.roles if not (role.service or role.is_program))


def _why_not(state: JobState, who: WorkerId, step: int, roles: Sequence[str]) -> str:
    """The reason why a rank cannot commit a step; empty if it can."""
    if step < 0:
        return f"step {step} is negative: count from 0"
    if unknown := [name for name in roles if name not in state.roles]:
        return f"this job has no role {', '.join(unknown)}: it has {', '.join(state.roles)}"
    if who.role not in roles:
        return f"{who.role} is not one of the roles that commit together: {', '.join(roles)}"
    before = state.commits.roles
    if before and {*before} != {*roles}:
        return f"ranks have committed with the roles {', '.join(before)}, and {who} with {', '.join(roles)}"
    return ""


def with_commit(state: JobState, who: WorkerId, step: int, roles: Sequence[str]) -> Commits:
    """The commits of a job after one of a rank."""
    before = replace(state.commits, roles=state.commits.roles or (*roles,))
    if step <= before.step:
        return before
    steps = {each.step: dict(each.ranks) for each in before.pending}
    ranks = steps.setdefault(step, {})
    committed = ranks.get(who.role, ())
    ranks[who.role] = committed if who.rank in committed else (*committed, who.rank)
    if all(len(ranks.get(name, ())) == len(state.roles[name].workers) for name in before.roles):
        before = replace(before, step=step)
    later = (PendingCommit(each, steps[each]) for each in sorted(steps) if each > before.step)
    return replace(before, pending=(*later,)[-MAX_PENDING:])


def without_pending(commits: Commits, role: str) -> Commits:
    """The commits without what ranks of `role`, which starts again, have committed and others have not."""
    left = (
        replace(each, ranks={name: ranks for name, ranks in each.ranks.items() if name != role})
        for each in commits.pending
    )
    return replace(commits, pending=tuple(each for each in left if each.ranks))
