"""A thread that runs actions at given times: deadlines, reconnects, retries. The reading thread never waits for
them."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from unirun.reporting import report_error
from unirun.roles.transport.executor import await_end

T = TypeVar("T")


class Scheduler:
    """Runs actions at their times, one after the other, in a thread that starts with the first action."""

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
        """Run `action` as soon as possible, in the scheduler's thread."""
        self.at(0.0, action)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Run `action` at the time `when`, in seconds on the clock of `now`, in the scheduler's thread."""
        with self._news:
            heapq.heappush(self._heap, (when, next(self._number), action))
            if self._heap[0][2] is action:
                self._news.notify()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread. Actions that are still waiting do not run."""
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
            while not self._closed:
                if not self._heap:
                    self._news.wait()
                    continue
                left = self._heap[0][0] - time.monotonic()
                if left > 0:
                    self._news.wait(min(left, threading.TIMEOUT_MAX))
                    continue
                return heapq.heappop(self._heap)[2]
            return None


class Deadlines(Generic[T]):
    """A FIFO of items that share one timeout: they expire in the order in which they were added.

    So the scheduler looks at the first item only, and an item that is dropped in time costs it nothing.
    """

    def __init__(self, seconds: float, scheduler: Scheduler, late: Callable[[T], None]) -> None:
        """`late` is called, by `scheduler`, with what was not dropped `seconds` after it was added."""
        self.seconds = seconds
        self._scheduler, self._late = scheduler, late
        self._open: dict[T, float] = {}
        self._lock = threading.Lock()
        self._watched = False

    def add(self, thing: T) -> None:
        """Add `thing`; its timeout begins."""
        self._open[thing] = self._scheduler.now() + self.seconds
        if not self._watched:
            self._watch()

    def drop(self, thing: T) -> None:
        """Forget `thing`, which was in time or has expired already."""
        self._open.pop(thing, None)

    def _watch(self) -> None:
        with self._lock:
            if self._watched:
                return
            self._watched = True
        self._scheduler.at(self._scheduler.now() + self.seconds, self._look)

    def _look(self) -> None:
        for thing in list(self._open):
            when = self._open.get(thing)
            if when is not None and when > self._scheduler.now():
                self._scheduler.at(when, self._look)
                return
            if when is not None:
                self.drop(thing)
                self._scheduler.soon(partial(self._late, thing))
        self._watched = False
        # `add` starts no watch while this function runs, so what was added meanwhile needs one now.
        if self._open:
            self._watch()
