"""The budgets of restarts: of a rank, of a role and of the job, each of them one value."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

from msgspec.structs import replace

from unirun.failover.state import JobState, Ranks, RoleState
from unirun.spec.job import RoleSpec
from unirun.values import Value

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
