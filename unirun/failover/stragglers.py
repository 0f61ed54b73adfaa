"""Stragglers: the ranks of a role for which the others wait again and again. Pure: from times of arrival to a verdict.

In a role with collectives all steps are as long as those of its slowest rank, so their lengths say nothing. The order
of arrival does: each rank has the times at which it has begun the same collectives. A rank costs the others the time by
which it comes later than the median of them. As a share of all time, that is compared between the ranks by a robust
z-score, in which one slow rank does not hide itself, as it would in a standard deviation.

A rank is a straggler when it is far from the others in several windows, one after the other. A pause of one rank, as
for a save or the collection of garbage, is the delay of few collectives, which do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from unirun.values import Value, WorkerId

WINDOWS = 3
"""Windows in which a rank has to be late, one after the other."""

MIN_RANKS, MIN_COMMON = 3, 8
"""Ranks, and collectives that all of them have begun, without which nothing is said."""

DROPPED = 2
"""The longest delays of a rank in a window that do not count."""

SHARE, SCORE = 0.15, 6.0
"""The share of the time, and the z-score, from which on a rank is late."""

SPREAD = 0.02
"""The least spread of the shares: without it, a z-score of ranks that are alike is large."""

LEAST_DELAY = 0.005
"""Seconds of delay that may be a difference between the clocks of two hosts."""


class Lateness(Value):
    """The `share` of the time that a rank costs the others, and its z-score."""

    share: float
    score: float


def late_ranks(arrivals: Mapping[WorkerId, Mapping[int, float]]) -> dict[WorkerId, Lateness]:
    """The ranks that are late, by the times at which each has begun collectives, by their numbers."""
    common = sorted(set.intersection(*map(set, arrivals.values()))) if arrivals else []
    if len(arrivals) < MIN_RANKS or len(common) < MIN_COMMON:
        return {}
    usual = {number: median(times[number] for times in arrivals.values()) for number in common}
    period = (usual[common[-1]] - usual[common[0]]) / (common[-1] - common[0])
    if period <= 0:
        return {}
    shares = {
        who: _delay([times[number] - usual[number] for number in common]) / period
        for who, times in arrivals.items()
    }
    middle = median(shares.values())
    # The median distance from the median of a normal distribution is 0.67 of its standard deviation.
    spread = max(1.4826 * median(abs(share - middle) for share in shares.values()), SPREAD)
    found = {who: Lateness(share, (share - middle) / spread) for who, share in shares.items()}
    return {who: each for who, each in found.items() if each.share - middle >= SHARE and each.score >= SCORE}


def _delay(delays: Sequence[float]) -> float:
    """The mean of these delays, without the longest ones."""
    kept = [max(each, 0.0) for each in sorted(delays)[:-DROPPED]]
    return fmean(kept) if kept[-1] >= LEAST_DELAY else 0.0


class Windows(Value):
    """The ranks that are late now, and in how many windows one after the other."""

    late: Mapping[WorkerId, int] = {}

    def after(self, judged: Sequence[WorkerId], late: Mapping[WorkerId, Lateness]) -> Windows:
        """The state after one more window, in which the ranks `judged` could be compared."""
        rest = {who: count for who, count in self.late.items() if who not in judged}
        return Windows({**rest, **{who: self.late.get(who, 0) + 1 for who in late}})

    def told(self) -> tuple[WorkerId, ...]:
        """The ranks that have just become stragglers."""
        return tuple(who for who, count in self.late.items() if count == WINDOWS)

    @property
    def stragglers(self) -> tuple[WorkerId, ...]:
        """All ranks that are stragglers now."""
        return tuple(who for who, count in self.late.items() if count >= WINDOWS)
