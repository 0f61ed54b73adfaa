"""What this process has called, counted: the job's graph as it is (`unirun.graph.learn`).

A count is told to the agent with all that it has been since the process began, so a report may be lost and come twice.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable

from unirun.errors import WireError
from unirun.roles.calls.service import Service
from unirun.wire.reports import CallCount, Calls, Span

FIRST, SELDOM = 1.0, 60.0
"""Seconds from a call to the report of it, at first and at most; each time twice as many. What a job calls is soon
known, and ten thousand workers that all call must not keep a master busy with it."""

MAX_COUNTS = 100
"""In a report: of more methods, those that have moved most."""

MAX_SPANS = 16
"""Of ranks in a count; of more, one from the first to the last."""


class Count:
    """The calls of one method of a role. Answers come in several threads."""

    __slots__ = ("_bytes", "_calls", "_lock", "_news", "_ranks", "_returned", "_seconds", "split", "what")

    def __init__(self, what: tuple[str, str, bool], news: Callable[[], None]) -> None:
        self.what = what
        """The role, the method, and whether nobody waits for it."""
        self.split = False
        """Whether workers got different arguments in one call."""
        self._news = news
        self._lock = threading.Lock()
        self._calls = self._bytes = self._returned = 0
        self._seconds = 0.0
        self._ranks: set[int] = set()

    def add(self, rank: int, sent: int, returned: int, seconds: float) -> None:
        """A call was answered: bytes there and back, and how long that took."""
        with self._lock:
            self._calls += 1
            self._bytes += sent
            self._returned += returned
            self._seconds += seconds
            self._ranks.add(rank)
        self._news()

    def value(self) -> CallCount:
        """As it stands now."""
        role, method, asynchronous = self.what
        with self._lock:
            return CallCount(
                role=role,
                method=method,
                calls=self._calls,
                bytes=self._bytes,
                returned=self._returned,
                seconds=self._seconds,
                ranks=spans(self._ranks),
                asynchronous=asynchronous,
                split=self.split,
            )


class CallBook:
    """All counts of one process."""

    def __init__(self, service: Service, tell: Callable[[Calls], None]) -> None:
        """`tell` may raise `WireError`, and is called in the thread of `service` or of `report`."""
        self._service, self._tell = service, tell
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._counts: dict[tuple[str, str, bool], Count] = {}
        self._delay = FIRST
        self._due = False

    def count(self, role: str, method: str, *, asynchronous: bool) -> Count:
        """That of one method."""
        what = role, method, asynchronous
        with self._lock:
            if what not in self._counts:
                self._counts[what] = Count(what, self._news)
            return self._counts[what]

    def report(self) -> None:
        """Tell how all counts stand, if any is new."""
        # One after the other: what is told last holds all that was told before.
        with self._telling:
            self._report()

    def _report(self) -> None:
        if not self._due:
            return
        self._due = False
        with self._lock:
            # What unirun itself asks of workers has a name that no user's method has.
            mine = [count for what, count in self._counts.items() if not what[1].startswith("__")]
        counts = [each for count in mine if (each := count.value()).calls]
        counts.sort(key=lambda each: each.bytes + each.returned, reverse=True)
        # An agent that is gone takes this process with it: there is nobody left to tell.
        with contextlib.suppress(WireError):
            self._tell(Calls(tuple(counts[:MAX_COUNTS])))

    def _news(self) -> None:
        if not self._due:
            self._due = True
            self._service.at(self._service.now() + self._delay, self._in_time)

    def _in_time(self) -> None:
        self._delay = min(2 * self._delay, SELDOM)
        self.report()


def spans(ranks: Iterable[int]) -> tuple[Span, ...]:
    """`ranks` as runs of consecutive ones, ascending; one for all when there are more than `MAX_SPANS`."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    if len(found) > MAX_SPANS:
        found = [[found[0][0], found[-1][1]]]
    return tuple(Span(first, last) for first, last in found)
