"""The decision about a loss: restart what the role's level says while its budget lasts, else the job, else end it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Literal

from msgspec.structs import replace

from unirun.collocation.graph import (
    Affected,
    LearnedEdge,
    RoleGraph,
    added,
    affected,
    declared,
    learn,
)
from unirun.errors import EXIT_BUDGET
from unirun.failover.state import ROLE_WORKS, JobState, Ranks, RolePhase, RoleState, Strike
from unirun.spec.job import RoleSpec
from unirun.values import Value

# The budgets of restarts: of a rank, of a role and of the job, each of them one value.

LONGEST_DELAY = 60.0
"""Seconds of back-off before a restart, at most."""


class Budget(Value):
    """The number of restarts that a rank, a role or the job may have, and the number that it has had: in the last
    `window` seconds, or since its start for 0. A restart of one worker counts for its role like one of all.

    The first is at once; the second comes `delay` seconds after the failure, each further one after twice as long.
    """

    limit: int
    spent: int = 0
    window: float = 0.0
    delay: float = 0.0

    @property
    def left(self) -> int:
        """Restarts that are left."""
        return self.limit - self.spent

    @property
    def back_off(self) -> float:
        """Seconds before the next restart."""
        return min(self.delay * 2.0 ** min(self.spent - 1, 32), LONGEST_DELAY) if self.spent else 0.0

    def used_up(self, whose: str) -> str:
        """The words for a budget of which nothing is left."""
        time = f" in {self.window:g} s" if self.window else ""
        return f"all {self.limit} restarts of {whose}{time} are used up"

    def __str__(self) -> str:
        when = f" in {self.back_off:g} s" if self.back_off else ""
        return f"restart {self.spent + 1} of {self.limit}{when}"


NO_RESTARTS = Budget(0)


def budget_for(state: JobState, role: RoleState, now: float, ranks: Collection[int] = ()) -> Budget:
    """The budget of `role` at the time `now`, when these of its ranks have ended. Ranks of a service without a group
    have one each."""
    spec = state.role_spec(role.name)
    if role.grouped:
        return budget_of(spec, role.restarts, role.paid, now)
    ended = [role.workers[rank].paid for rank in ranks] or [()]
    return max((budget_of(spec, len(paid), paid, now) for paid in ended), key=lambda each: each.spent)


def budget_of(spec: RoleSpec, restarts: int, paid: Sequence[float], now: float) -> Budget:
    """The budget of a role, or of one rank of a service; `paid` are the times of the latest of its `restarts`."""
    spent = _spent(spec.restart_window, restarts, paid, now)
    return Budget(spec.max_restarts, spent, spec.restart_window, spec.restart_delay)


def budget_of_rank(state: JobState, role: RoleState, rank: int, now: float) -> Budget | None:
    """The budget that a rank of a group has besides that of its role, if it has one."""
    spec = state.role_spec(role.name)
    if spec.rank_restarts is None:
        return None
    paid = role.workers[rank].paid
    spent = _spent(spec.restart_window, len(paid), paid, now)
    return Budget(spec.rank_restarts, spent, spec.restart_window)


def budget_above(state: JobState, role: str, now: float) -> Budget:
    """The budget that counts when that of `role` is spent: the job's, but for an optional service none."""
    return NO_RESTARTS if state.role_spec(role).optional else budget_of_job(state, now)


def budget_of_job(state: JobState, now: float) -> Budget:
    """The budget of the job."""
    spec = state.spec
    spent = _spent(spec.restart_window, state.restarts, state.paid, now)
    return Budget(spec.max_job_restarts, spent, spec.restart_window, spec.restart_delay)


def _spent(window: float, restarts: int, paid: Sequence[float], now: float) -> int:
    return sum(now - window < time <= now for time in paid) if window else restarts


def with_payment(paid: Sequence[float], now: float, limit: int) -> tuple[float, ...]:
    """The times of the latest restarts, with one `now`; as many as the budget has."""
    return (*paid, now)[-limit:]


def on_this_clock(state: JobState, now: float) -> JobState:
    """`state` with the times of restarts as a clock has them that shows `now`.

    The clock of the master before may have been ahead. Its latest restart counts as one of now then, and those before
    keep their distances.
    """
    roles = state.roles.values()
    times = chain(
        state.paid,
        *(role.paid for role in roles),
        *(worker.paid for role in roles for worker in role.workers),
        (strike.time for strike in state.strikes),
    )
    ahead = max(times, default=now) - now
    if ahead <= 0:
        return state

    def earlier(paid: Sequence[float]) -> tuple[float, ...]:
        return tuple(min(time - ahead, now) for time in paid)

    rebased = {
        role.name: replace(
            role,
            paid=earlier(role.paid),
            workers=Ranks(replace(w, paid=earlier(w.paid)) if w.paid else w for w in role.workers),
        )
        for role in roles
    }
    strikes = tuple(replace(strike, time=strike.time - ahead) for strike in state.strikes)
    return replace(state, paid=earlier(state.paid), roles=rebased, strikes=strikes)


# The decision.

Action = Literal["restart_job", "restart_role", "restart_worker", "join", "end_job"]


class Decision(Value):
    """`action` and the `reason` for it in words. `code` is the exit code of the job that ends; 0 for that of the root
    cause. `free`: it is no consequence of a failure, and spends no restart.

    ``restart_worker`` starts the lost workers again and makes a new generation; ``join`` starts one again for the
    generation that is being formed, and spends no restart. ``restart_job`` restarts every role.
    """

    action: Action
    reason: str
    code: int = 0
    free: bool = False


class Loss(Value):
    """The loss that a role has suffered, with the event in words (`what`).

    `ranks` are those whose processes are gone or have to go (``2``, ``0-3``); empty when only the rendezvous store is.
    `recoverable`: all of them have reported that they are; None when one has not reported yet. Only trainers need it.
    `first_start`: the rank was never restarted. `permanent`: its error would come again in every restart.
    `stale`: the worker had not begun to form the role's present generation; it was still in an earlier one, which
    another death had ended, or could not be woken in that. `called`: calls for the present one may have been sent to
    it.
    `elsewhere`: the ranks go to other nodes. `together`: all ranks of the role have to restart, whatever its level is.
    `fatal` is the exit code, if no restart follows it. `asked`: nothing has failed, somebody wants them to leave.
    `taken`: another process has its port, so that it cannot have started. `leaving`: so many of the ranks live still.
    """

    what: str
    role: str
    ranks: str = ""
    recoverable: bool | None = None
    first_start: bool = False
    permanent: bool = False
    stale: bool = False
    called: bool = False
    elsewhere: bool = False
    together: bool = False
    fatal: int = 0
    asked: bool = False
    taken: bool = False
    leaving: int = 0

    @property
    def who(self) -> str:
        """``actor:0-3``"""
        return f"{self.role}:{self.ranks}"


def decide(
    loss: Loss, role: RoleState, budget: Budget, *, job: Budget = NO_RESTARTS, rank: Budget | None = None
) -> Decision:
    """The decision after the `loss` of a role that has this budget. What it has lost has ended in `role`, or leaves.

    A spent budget escalates: that of a `rank` which restarts alone to its role, that of the role to the `job`, and that
    of the job ends it.

    A restart resets nothing: the second failure is handled like the first, with one restart less left. However many
    ranks are lost at once, that is one restart of the role. A `stale` worker costs none: the death that ended its
    generation has paid. It has left nothing in the store of the present one, so its successor can take its place there.
    It does not if the worker was `called` in that: no rank may wait in a call for a successor that does not get it.

    A permanent error ends the job when it comes in the first start of a rank. Later it may be an accident all the same,
    as the code has run on that rank: its restarts are spent first.
    """
    if loss.fatal:
        reason = f"{loss.what}, and no restart follows exit code {loss.fatal} (--fatal-exit-codes)"
        return Decision("end_job", reason, code=loss.fatal)
    if loss.permanent and loss.recoverable is None and loss.first_start:
        return Decision("end_job", f"{loss.what}, before it was up, with an error that a restart cannot mend")
    if role.kind == "trainer" and loss.ranks and not loss.recoverable:
        job = NO_RESTARTS if loss.asked else job
        return _above_the_role(f"{loss.what}; {_why_not_recoverable(loss)}", job)
    if loss.stale:
        joins = f"joins generation {role.generation + loss.called} at no cost"
        reason = f"{loss.what}; it was in a generation that another death had ended, and {joins}"
        return Decision("restart_worker" if loss.called else "join", reason, free=True)
    if loss.asked:
        return _move(loss, role)
    if loss.taken:
        others = f"{loss.what}, as another process listens on its port; it gets another one, at no cost"
        return Decision("restart_worker" if role.in_place else "restart_role", others, free=True)
    if rank is not None and rank.left <= 0:
        loss = replace(loss, what=f"{loss.what}; {rank.used_up(loss.who)}", together=True)
        if not role.in_place:
            return _above_the_role(loss.what, job, EXIT_BUDGET)
    if budget.left <= 0:
        return _without_budget(loss, budget, job)
    restart = f"{loss.what}; {budget}"
    if not role.in_place or loss.together:
        others = f", with {loss.who} elsewhere" if loss.elsewhere else ""
        return Decision("restart_role", f"{restart} of role {loss.role}{others}")
    if not loss.ranks:
        return Decision("restart_worker", f"{restart} of role {loss.role}")
    manner = "elsewhere" if loss.elsewhere else "alone"
    if not role.grouped:
        return Decision("restart_worker", f"{restart}, {manner}")
    return Decision("restart_worker", f"{restart}: {loss.who} {manner}, {_survivors(role, loss)}")


def _move(loss: Loss, role: RoleState) -> Decision:
    """The decision when ranks leave because somebody has asked for that."""
    if not role.in_place or loss.together:
        others = f", with {loss.who} elsewhere" if loss.elsewhere else ""
        return Decision("restart_role", f"{loss.what}; role {loss.role} starts again{others}", free=True)
    others = f", {_survivors(role, loss)}" if role.grouped else ""
    return Decision("restart_worker", f"{loss.what}; {loss.who} moves{others}", free=True)


def _without_budget(loss: Loss, budget: Budget, job: Budget) -> Decision:
    if budget.limit <= 0:
        return _above_the_role(f"{loss.what}; role {loss.role} has no restarts (--max-restarts 0)", job)
    return _above_the_role(f"{loss.what}; {budget.used_up(f'role {loss.role}')}", job, EXIT_BUDGET)


def _above_the_role(reason: str, job: Budget, code: int = 0) -> Decision:
    """The decision when a restart of the role is no help: the job restarts, or ends with `code`."""
    if job.left > 0:
        return Decision("restart_job", f"{reason}; {job} of the job")
    if job.limit > 0:
        return Decision("end_job", f"{reason}; {job.used_up('the job')}", EXIT_BUDGET)
    return Decision("end_job", reason, code)


def _why_not_recoverable(loss: Loss) -> str:
    if loss.recoverable is None:
        return f"{loss.who} had not told yet whether it is recoverable"
    return f"{loss.who} is not recoverable (is_recoverable() returned False)"


def _survivors(role: RoleState, loss: Loss) -> str:
    forms = f"generation {role.generation + 1}"
    match role.living - loss.leaving:
        case 0:
            return f"as {forms}"
        case 1:
            return f"{role.name}'s other rank keeps its memory and forms {forms}"
        case count:
            return f"{role.name}'s other {count} ranks keep their memory and form {forms}"


def decide_in(state: JobState, loss: Loss, now: float, ranks: Collection[int] = ()) -> Decision:
    """The decision after a loss that is no failure of one rank, with the budgets that `state` has."""
    role = state.roles[loss.role]
    job = budget_above(state, loss.role, now)
    return decide(loss, role, budget_for(state, role, now, ranks), job=job)


# Nodes on which ranks fail again and again: such a rank goes elsewhere, and such a node gets no more ranks.

STRIKES = 3
"""Failures of a rank on one node after which it is started elsewhere, if there is room."""

STRIKE_SECONDS = 3600.0
"""Seconds for which a failure counts against its node."""

KEPT_STRIKES = 256


def with_strike(state: JobState, strike: Strike) -> JobState:
    """`state` with one more strike, and without those that do not count any more."""
    recent = [each for each in state.strikes if strike.time - each.time < STRIKE_SECONDS]
    return replace(state, strikes=(*recent, strike)[-KEPT_STRIKES:])


def strikes_like(state: JobState, strike: Strike) -> int:
    """The number of strikes of the same rank on the same node."""
    who = strike.role, strike.rank, strike.node
    return sum((each.role, each.rank, each.node) == who for each in state.strikes)


def suspects(state: JobState, node: str) -> tuple[str, ...]:
    """The roles whose failures make `node` one that gets no more ranks: several. Empty when it is sound, tainted
    already, or the last one that is not."""
    roles = tuple(dict.fromkeys(each.role for each in state.strikes if each.node == node))
    return roles if len(roles) > 1 and may_be_tainted(state, node) else ()


def may_be_tainted(state: JobState, node: str) -> bool:
    """Return True if `node` is not tainted, and not the last one that is not."""
    sound = [name for name in state.without(()) if name not in (*state.tainted, node)]
    return node not in state.tainted and bool(sound)


# The job's graph as far as it is known, and who is affected when a part of the job fails.


def learned(state: JobState) -> tuple[LearnedEdge, ...]:
    """The calls between roles that were observed so far."""
    callers = (
        (role.name, worker.rank, added(worker.called, worker.calls))
        for role in state.roles.values()
        for worker in role.workers
        if worker.calls or worker.called
    )
    return learn(callers, state.sizes)


def unit_of(state: JobState, failed: Sequence[str]) -> tuple[Affected, ...]:
    """The roles and ranks that are affected when `failed` (roles or single ranks) fail."""
    return affected(seen_graph(state), failed)


def consequences(unit: Sequence[Affected]) -> str:
    """The callers and callees that wait while the failed ranks are away, in words; empty when none does."""
    return "; ".join(f"{each} {each.reason}" for each in unit if each.side in ("upstream", "downstream"))


def seen_graph(state: JobState) -> RoleGraph:
    """The job's graph: the edges of the spec and those that were observed."""
    graph = declared(state.spec)
    edges = {(edge.source, edge.target, edge.invocation): edge for edge in graph.edges}
    for seen in learned(state):
        edge = seen.edge
        # An observed edge replaces the default edge from the trainer to every role, but not one of the spec.
        if not state.spec.edges:
            edges.pop((edge.source, edge.target, ""), None)
        edges.setdefault((edge.source, edge.target, edge.invocation), edge)
    # A role may have grown.
    sizes = state.sizes
    roles = tuple(replace(role, count=max(role.count, sizes[role.name])) for role in graph.roles)
    return replace(graph, roles=roles, edges=tuple(edges.values()))


def waiting(state: JobState) -> tuple[str, ...]:
    """The callers that are blocked because ranks are being restarted, in words."""
    missing = [
        f"{role.name}:{worker.rank}"
        for role in state.roles.values()
        if role.phase is RolePhase.RESTARTING or (role.phase in ROLE_WORKS and role.restarts)
        for worker in role.workers
        if not role.up(worker) and not worker.ended_well
    ]
    unit = unit_of(state, missing) if missing else ()
    return tuple(f"{each} {each.reason}" for each in unit if each.side == "upstream" and each.blocked)
