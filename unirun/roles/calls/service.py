"""A thread that does what must not hold up the one that reads: deadlines, connecting again, calling later."""

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


class Service:
    """Runs actions at their time, one after the other. Starts its thread with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._news = threading.Condition()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def now(self) -> float:
        """The time, in seconds, on the clock of `at`."""
        return time.monotonic()

    def soon(self, action: Callable[[], None]) -> None:
        """Do it now, in the service's thread."""
        self.at(0.0, action)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do it at the time `when`, in the service's thread."""
        with self._news:
            heapq.heappush(self._heap, (when, next(self._number), action))
            if self._heap[0][2] is action:
                self._news.notify()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread; nothing is done any more."""
        with self._news:
            self._closed = True
            self._news.notify()
        await_end(self._thread)

    def _work(self) -> None:
        while (action := self._next()) is not None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - an action's bug is shown
                # A bug; the deadlines of other calls must be kept all the same.
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

    So the service looks at the first item only, and an item that is dropped in time costs it nothing.
    """

    def __init__(self, seconds: float, service: Service, late: Callable[[T], None]) -> None:
        """`late` is called, by `service`, with what was not dropped `seconds` after it was added."""
        self.seconds = seconds
        self._service, self._late = service, late
        self._open: dict[T, float] = {}
        self._lock = threading.Lock()
        self._watched = False

    def add(self, thing: T) -> None:
        """Its time begins."""
        self._open[thing] = self._service.now() + self.seconds
        if not self._watched:
            self._watch()

    def drop(self, thing: T) -> None:
        """It was in time, or is late already. Nothing of it is held any more."""
        self._open.pop(thing, None)

    def _watch(self) -> None:
        with self._lock:
            if self._watched:
                return
            self._watched = True
        self._service.at(self._service.now() + self.seconds, self._look)

    def _look(self) -> None:
        for thing in list(self._open):
            when = self._open.get(thing)
            if when is not None and when > self._service.now():
                self._service.at(when, self._look)
                return
            if when is not None:
                self.drop(thing)
                self._service.soon(partial(self._late, thing))
        self._watched = False
        # What was added meanwhile has seen that this looks.
        if self._open:
            self._watch()
