"""Hangs: when a rank is late, and which rank of a role is the cause. Stragglers: which ranks are slow. Pure: from the
ranks' progress, and their times of arrival, to a verdict.

A rank makes progress when it reports a step, answers a call, or begins a collective. One that does not for its role's
``hang_timeout`` is late. That says little about who hangs: in a role with collectives all ranks are late when one is.
So the agents of the role are asked for all of them, and the cause is, in this order:

1. a rank that cannot run: it is stopped (SIGSTOP), has not come to its user's code since its start, or no Python thread
   of it runs, as another one holds the GIL;
2. a rank that is not in the collective in which others wait, and waits in no other;
3. a rank that is in another collective than most of its group;
4. where no rank waits in a collective: the late ones that have come least far.

A rank is never the cause while it makes progress, has nothing to do, has an allowance, or a debugger holds a rank of
the role. What is not known is not guessed: then there is no cause.

With a time-out or without one, the console says after a minute which ranks are late (`notice`): those that wait in a
collective and those for which they wait, and those that report or answer calls and do not go on. A script that reports
nothing may compute for as long as no rank waits for it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from unirun.spec.job import FIRST_STEP_TIMEOUT
from unirun.values import Value, WorkerId, show_ranks
from unirun.wire.reports import RankProgress, Wait

NOTICE_SECONDS = 60.0
"""Seconds without progress after which the console says which ranks are late."""

MUTE_SECONDS = 2.0
"""Seconds in which no Python thread has run, after which a rank that is late holds the GIL; at most half of the
time-out. On a busy host a thread may wait for a good part of a second."""

STOPPED = ("T", "t")
"""The letters of a process that is stopped."""


class HangTimeouts(Value):
    """The time-outs of a role, in seconds: `timeout` for any progress, and `first_step` for the first report after the
    start of a rank."""

    timeout: float
    first_step: float = FIRST_STEP_TIMEOUT


class HangNotice(Value):
    """One line for the console about the late ranks of a role, and for how many `seconds` they are late at most."""

    seconds: float
    text: str


def due_in(rank: RankProgress, limits: HangTimeouts) -> float:
    """Seconds until `rank` is late, negative since it is."""
    if rank.idle:
        return limits.timeout
    left = limits.timeout - rank.quiet
    if rank.count == 0:
        left = max(left, limits.first_step - rank.age)
    return max(left, rank.allowed + limits.timeout) if rank.allowed > 0 else left


def is_late(rank: RankProgress, limits: HangTimeouts) -> bool:
    """Return True if `rank` has made no progress for too long."""
    return due_in(rank, limits) <= 0


def judge(ranks: Sequence[RankProgress], limits: HangTimeouts) -> dict[WorkerId, str]:
    """The ranks that hang, each with the reason in words, of all ranks of a role that could be asked."""
    late = [rank for rank in ranks if is_late(rank, limits)]
    if not late or any(rank.traced for rank in ranks):
        return {}
    return (
        _halted(late, min(MUTE_SECONDS, limits.timeout / 2))
        or _absent(late, ranks)
        or _elsewhere(late)
        or _behind(late, ranks)
    )


def is_watched(rank: RankProgress) -> bool:
    """Return True if the time without progress of `rank` is news: it waits in a collective, or it reports or answers
    calls, has something to do, and no allowance."""
    return bool(rank.waits or rank.count or rank.calls) and not rank.idle and not rank.allowed


def is_noticed(rank: RankProgress, limits: HangTimeouts) -> bool:
    """Return True if `rank` is late for the console. A wait in a collective is no first step, which may take longer."""
    return is_watched(rank) and is_late(rank, _any_step(limits) if rank.waits else limits)


def notice(ranks: Sequence[RankProgress], limits: HangTimeouts) -> HangNotice | None:
    """The notice about a role with these ranks, all that could be asked; None if none is late.

    A rank is not late while it waits for one that has an allowance, or for one that waits for such a rank.
    """
    spared = _spared(ranks)
    told = [rank for rank in ranks if is_noticed(rank, limits) and spared.isdisjoint(rank.waits)]
    if not told:
        return None
    missed = _absent([rank for rank in ranks if is_late(rank, _any_step(limits))], told)
    waits, reporting = collectives(told), {rank.worker for rank in told if not rank.waits}
    late = [
        rank
        for rank in ranks
        if rank.worker in missed or rank.worker in reporting or not waits.keys().isdisjoint(rank.waits)
    ]
    traced = [rank.worker for rank in ranks if rank.traced]
    text = f"a debugger holds {named(traced)}" if traced else describe(late, ranks)
    return HangNotice(max(rank.quiet for rank in told), text)


def _spared(ranks: Sequence[RankProgress]) -> set[Wait]:
    """The collectives that wait for a rank with an allowance, or for one that waits in such a collective."""
    causes, spared = [rank.worker.rank for rank in ranks if rank.allowed], set[Wait]()
    present = (
        {wait: {who.rank for who in there} for wait, there in collectives(ranks).items()} if causes else {}
    )
    of_all = [wait for wait in present if not wait.ranks]
    wanting: dict[int, list[Wait]] = {}
    for wait, there in present.items():
        for number in (members(wait) or frozenset()) - there:
            wanting.setdefault(number, []).append(wait)
    while causes:
        number = causes.pop()
        for wait in (*of_all, *wanting.pop(number, ())):
            if wait not in spared and number not in present[wait]:
                spared.add(wait)
                causes += present[wait]
    return spared


def _any_step(limits: HangTimeouts) -> HangTimeouts:
    """The same limits without more time for a first step."""
    return HangTimeouts(limits.timeout, 0.0)


def _halted(late: Sequence[RankProgress], mute: float) -> dict[WorkerId, str]:
    """The ranks that cannot run. Those of several that are only mute may wait for the same thing, so a stopped one
    takes precedence, and then one that has not begun."""
    stopped = {rank.worker: f"{_quiet(rank)}: it is stopped" for rank in late if rank.state in STOPPED}
    unbegun = "hangs: its process has not come to the code of its role for {:.1f} s"
    stopped = stopped or {rank.worker: unbegun.format(rank.age) for rank in late if not rank.begun}
    held = "{}: one of its threads holds the GIL, no other has run for {:.0f} s{}"
    return stopped or {
        rank.worker: held.format(_quiet(rank), rank.mute, _at(rank)) for rank in late if rank.mute > mute
    }


def _absent(late: Sequence[RankProgress], ranks: Sequence[RankProgress]) -> dict[WorkerId, str]:
    """The late ranks that are not in a collective in which others of their group wait."""
    found: dict[WorkerId, str] = {}
    outside = _outside(late)
    for wait, present in collectives(ranks).items():
        missing = _missing(wait, outside)
        # Once for all of them, as there may be thousands on both sides.
        others = f"{named(present)} wait{'s' if len(present) == 1 else ''}" if missing else ""
        for rank in missing:
            found.setdefault(rank.worker, f"{_quiet(rank)}: {others} for it in {_words(wait)}{_at(rank)}")
    return found


def _outside(ranks: Sequence[RankProgress]) -> dict[int, RankProgress]:
    """Those of these ranks of a role that wait in no collective, by their numbers."""
    return {rank.worker.rank: rank for rank in ranks if not rank.waits}


def _missing(wait: Wait, outside: Mapping[int, RankProgress]) -> list[RankProgress]:
    """Those of the ranks outside of all collectives that belong to the group of this one."""
    group = members(wait)
    return list(outside.values()) if group is None else [outside[n] for n in sorted(group & outside.keys())]


def _elsewhere(late: Sequence[RankProgress]) -> dict[WorkerId, str]:
    """The ranks that wait in another collective of a group than most of it, or than those that are further."""
    groups: dict[tuple[str, str], Counter[tuple[int, str]]] = {}
    for rank in late:
        for wait in rank.waits:
            groups.setdefault((wait.group, wait.ranks), Counter())[wait.number, wait.name] += 1
    for (group, ranks), counts in groups.items():
        if len(counts) < 2:
            continue
        # Where as many ranks are in each, those that have begun fewer collectives are behind.
        most = max(counts, key=lambda each: (counts[each], each))
        others = _words(Wait(group, *most))
        return {
            rank.worker: f"{_quiet(rank)}: it waits in {_words(wait)}, the others in {others}{_at(rank)}"
            for rank in late
            for wait in rank.waits
            if (wait.group, wait.ranks) == (group, ranks) and (wait.number, wait.name) != most
        }
    return {}


def _behind(late: Sequence[RankProgress], ranks: Sequence[RankProgress]) -> dict[WorkerId, str]:
    """The late ranks that have come least far, of a role in which no rank waits in a collective. Collectives alone
    say nothing here: a rank may send and receive, which nobody counts."""
    if any(rank.waits for rank in ranks):
        return {}
    least = min(rank.step for rank in late)
    return {
        rank.worker: f"{_quiet(rank)}{_at(rank)}" for rank in late if rank.step == least and rank.count > 0
    }


def collectives(ranks: Sequence[RankProgress]) -> dict[Wait, list[WorkerId]]:
    """The workers that wait in each collective."""
    found: dict[Wait, list[WorkerId]] = {}
    for rank in ranks:
        for wait in rank.waits:
            found.setdefault(wait, []).append(rank.worker)
    return found


def members(wait: Wait) -> frozenset[int] | None:
    """The ranks of its group; None for all of the role. Nobody is missed in a group whose ranks are not known."""
    return frozenset(map(int, re.findall(r"\d+", wait.ranks))) if wait.ranks else None


def describe(late: Sequence[RankProgress], ranks: Sequence[RankProgress]) -> str:
    """One line about the late ranks of a role: since when, where they are, and how far the others are."""
    longest = max(rank.quiet for rank in late)
    text = f"{named([rank.worker for rank in late])}: no progress for {longest:.0f} s"
    if (steps := [rank.step for rank in late if rank.step >= 0]) and min(steps) != max(steps):
        text += f", at steps {min(steps)} to {max(steps)}"
    elif steps:
        text += f", at step {steps[0]}"
    outside = _outside(ranks)
    for wait, present in list(collectives(late).items())[:4]:
        missing = [rank.worker for rank in _missing(wait, outside)]
        text += f"; {named(present)} in {_words(wait)}" + (
            f", not there: {named(missing)}" if missing else ""
        )
    if stopped := [rank.worker for rank in late if rank.state in STOPPED]:
        text += f"; stopped: {named(stopped)}"
    known = {rank.worker for rank in late}
    if further := [rank.step for rank in ranks if rank.worker not in known and rank.step >= 0]:
        text += f"; the others are at step {max(further)}"
    return text


def _words(wait: Wait) -> str:
    """``all_reduce 6 of default_pg``"""
    return f"{wait.name} {wait.number} of {wait.group}"


def _quiet(rank: RankProgress) -> str:
    step = f" since step {rank.step}" if rank.step >= 0 else ""
    return f"hangs: no progress{step} for {rank.quiet:.1f} s"


def _at(rank: RankProgress) -> str:
    return f"; it was at {rank.at}" if rank.at else ""


def named(workers: Sequence[WorkerId]) -> str:
    """``actor:0-3``"""
    role = workers[0].role if workers else ""
    return f"{role}:{show_ranks(sorted(worker.rank for worker in workers))}"


# Stragglers: the ranks of a role for which the others wait again and again.
#
# In a role with collectives all steps are as long as those of its slowest rank, so their lengths say nothing. The order
# of arrival does: each rank has the times at which it has begun the same collectives. A rank costs the others the time
# by which it comes later than the median of them. As a share of all time, that is compared between the ranks by a
# robust z-score, in which one slow rank does not hide itself, as it would in a standard deviation.
#
# A rank is a straggler when it is far from the others in several windows, one after the other. A pause of one rank, as
# for a save or the collection of garbage, is the delay of few collectives, which do not count.

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
    # Imported here: it takes long, and agents do not need it.
    from statistics import median

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
    return sum(kept) / len(kept) if kept[-1] >= LEAST_DELAY else 0.0


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
