"""`Scheduler`: a thread that runs actions at given times, such as deadlines and reconnects, or one after the other."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable

from unirun.wire.reporting import report_error

JOIN_TIMEOUT = 1.0
"""Seconds for which a thread that was told to end is waited for."""


def await_end(thread: threading.Thread | None) -> None:
    """Join a thread that was told to end, for at most `JOIN_TIMEOUT`; the current thread is not joined.

    A daemon thread that still runs when the interpreter exits, and frees a tensor then, aborts the process
    ("terminate called without an active exception").
    """
    if thread is not None and thread is not threading.current_thread():
        thread.join(JOIN_TIMEOUT)


class Scheduler:
    """Runs actions at their times, one at a time, in a thread that starts with the first action."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._news = threading.Condition()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def now(self) -> float:
        """The time in seconds, on the clock of `at`."""
        return time.monotonic()

    def soon(self, action: Callable[[], None]) -> None:
        """Run `action` after those that are due already, in the scheduler's thread."""
        self.at(0.0, action)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Run `action` at the time `when`, in seconds on the clock of `now`, in the scheduler's thread."""
        with self._news:
            if self._closed:
                return
            heapq.heappush(self._heap, (when, next(self._number), action))
            if self._heap[0][2] is action:
                self._news.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread after the actions that are due. Later ones do not run."""
        with self._news:
            self._closed = True
            self._news.notify()
        await_end(self._thread)

    def _work(self) -> None:
        while (action := self._next()) is not None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - an action's bug is shown
                # A bug in one action must not stop the deadlines of other calls.
                report_error(error)

    def _next(self) -> Callable[[], None] | None:
        with self._news:
            while True:
                left = self._heap[0][0] - time.monotonic() if self._heap else math.inf
                if left <= 0:
                    return heapq.heappop(self._heap)[2]
                if self._closed:
                    return None
                self._news.wait(min(left, threading.TIMEOUT_MAX))
