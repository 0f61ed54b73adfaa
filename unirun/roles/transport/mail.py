"""A thread that does what it is given, one after the other: what must not be done where it came up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

FAREWELL = 1.0
"""Seconds that a thread has to end: more than one needs that has nothing to do."""


def await_end(thread: threading.Thread | None) -> None:
    """Wait for a thread that was told to end, unless it is this one; no longer than `FAREWELL` for one that is busy.

    One that is still there when the interpreter ends, and frees a tensor, takes the process with it ("terminate called
    without an active exception").
    """
    if thread is not None and thread is not threading.current_thread():
        thread.join(FAREWELL)


class Mail:
    """Starts its thread with the first delivery."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, delivery: Callable[[], None]) -> None:
        """Do it soon. Must not raise."""
        self._queue.put(delivery)
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._deliver, name=self._name, daemon=True)
                    self._thread.start()

    def close(self) -> None:
        """End the thread after what it has been given."""
        if self._thread is not None:
            self._queue.put(None)
            await_end(self._thread)

    def _deliver(self) -> None:
        while (delivery := self._queue.get()) is not None:
            delivery()
