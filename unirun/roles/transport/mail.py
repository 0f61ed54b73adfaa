"""A thread that does what it is given, one after the other: what must not be done where it came up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


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

    def _deliver(self) -> None:
        while (delivery := self._queue.get()) is not None:
            delivery()
