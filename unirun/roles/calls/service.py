"""A thread that does what must not hold up the one that reads: deadlines, connecting again, calling later."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import traceback
from collections.abc import Callable


class Ticket:
    """Something that will be done later, unless it is cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action


class Service:
    """Runs actions at their time, one after the other. Starts its thread with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._news = threading.Condition()
        self._heap: list[tuple[float, int, Ticket]] = []
        self._number = itertools.count()
        self._clear_at = 1024
        self._thread: threading.Thread | None = None
        self._closed = False

    def soon(self, action: Callable[[], None]) -> None:
        """Do it now, in the service's thread."""
        self.at(0.0, action)

    def at(self, when: float, action: Callable[[], None]) -> Ticket:
        """Do it at `when`, on the clock of `time.monotonic`."""
        ticket = Ticket(action)
        with self._news:
            if len(self._heap) >= self._clear_at:
                self._heap = [entry for entry in self._heap if entry[2].action is not None]
                heapq.heapify(self._heap)
                self._clear_at = 2 * len(self._heap) + 1024
            heapq.heappush(self._heap, (when, next(self._number), ticket))
            if self._heap[0][2] is ticket:
                self._news.notify()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Not any more. What it held is free at once; its place, when the heap has doubled."""
        ticket.action = None

    def close(self) -> None:
        """End the thread; nothing is done any more."""
        with self._news:
            self._closed = True
            self._news.notify()

    def _work(self) -> None:
        while (action := self._next()) is not None:
            try:
                action()
            except Exception:  # noqa: BLE001 - an action's bug is shown
                # A bug; the deadlines of other calls must be kept all the same.
                traceback.print_exc()

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
                ticket = heapq.heappop(self._heap)[2]
                action, ticket.action = ticket.action, None
                if action is not None:
                    return action
            return None
