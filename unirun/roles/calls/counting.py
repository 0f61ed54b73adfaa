"""Counts of the calls that this process makes, from which the job's graph is learned (`collocation.graph.learn`).

A report has the totals since the process started, so it may be lost or arrive twice.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable

from unirun.errors import WireError
from unirun.roles.transport.protocol import Scheduler
from unirun.wire.reports import CallCount, Calls, RankRange

FIRST, SELDOM = 1.0, 60.0
"""Seconds from a call to the report of it: the first time, and at most; they double each time. So the graph is known
soon, and the reports of ten thousand callers do not load the master."""

MAX_COUNTS = 100
"""Methods in a report; of more, those with the most bytes."""

MAX_SPANS = 16
"""Ranges of ranks in a count; if there are more, one range from the first rank to the last."""


class Count:
    """The calls of one method of a role. Answers come in several threads."""

    __slots__ = ("_bytes", "_calls", "_lock", "_news", "_ranks", "_returned", "_seconds", "split", "what")

    def __init__(self, what: tuple[str, str, bool], news: Callable[[], None]) -> None:
        self.what = what
        """The role, the method, and whether the call is asynchronous."""
        self.split = False
        """True if the workers of one call got different arguments."""
        self._news = news
        self._lock = threading.Lock()
        self._calls = self._bytes = self._returned = 0
        self._seconds = 0.0
        self._ranks: set[int] = set()

    def add(self, rank: int, sent: int, returned: int, seconds: float) -> None:
        """Add a call that was answered: bytes sent and returned, and the seconds from its start to the answer."""
        with self._lock:
            self._calls += 1
            self._bytes += sent
            self._returned += returned
            self._seconds += seconds
            self._ranks.add(rank)
        self._news()

    def value(self) -> CallCount:
        """The totals so far."""
        role, method, asynchronous = self.what
        with self._lock:
            return CallCount(
                role=role,
                method=method,
                calls=self._calls,
                bytes=self._bytes,
                returned=self._returned,
                seconds=self._seconds,
                ranks=rank_ranges(self._ranks),
                asynchronous=asynchronous,
                split=self.split,
            )


class CallBook:
    """The counts of one process."""

    def __init__(self, scheduler: Scheduler, tell: Callable[[Calls], None]) -> None:
        """`tell` may raise `WireError`, and is called in the thread of `scheduler` or of `report`."""
        self._scheduler, self._tell = scheduler, tell
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._counts: dict[tuple[str, str, bool], Count] = {}
        self._delay = FIRST
        self._due = False

    def count(self, role: str, method: str, *, asynchronous: bool) -> Count:
        """The count of one method."""
        what = role, method, asynchronous
        with self._lock:
            if what not in self._counts:
                self._counts[what] = Count(what, self._news)
            return self._counts[what]

    def report(self) -> None:
        """Report all counts, if any has changed."""
        # One report at a time: the last one must have the highest totals.
        with self._telling:
            if not self._due:
                return
            self._due = False
            with self._lock:
                # Methods with two underscores are unirun's own.
                mine = [count for what, count in self._counts.items() if not what[1].startswith("__")]
            counts = [each for count in mine if (each := count.value()).calls]
            counts.sort(key=lambda each: each.bytes + each.returned, reverse=True)
            # Without its agent this process ends, too.
            with contextlib.suppress(WireError):
                self._tell(Calls(tuple(counts[:MAX_COUNTS])))

    def _news(self) -> None:
        if not self._due:
            self._due = True
            self._scheduler.at(self._scheduler.now() + self._delay, self._in_time)

    def _in_time(self) -> None:
        self._delay = min(2 * self._delay, SELDOM)
        self.report()


def rank_ranges(ranks: Iterable[int]) -> tuple[RankRange, ...]:
    """`ranks` as ascending ranges of consecutive ranks; one range for all if there are more than `MAX_SPANS`."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    if len(found) > MAX_SPANS:
        found = [[found[0][0], found[-1][1]]]
    return tuple(RankRange(first, last) for first, last in found)
