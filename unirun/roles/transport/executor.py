"""`SerialExecutor`: a thread that runs actions one at a time, in the order of their submission."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

JOIN_TIMEOUT = 1.0
"""Seconds for which a thread that was told to end is waited for."""


def await_end(thread: threading.Thread | None) -> None:
    """Join a thread that was told to end, for at most `JOIN_TIMEOUT`; the current thread is not joined.

    A daemon thread that still runs when the interpreter exits, and frees a tensor then, aborts the process
    ("terminate called without an active exception").
    """
    if thread is not None and thread is not threading.current_thread():
        thread.join(JOIN_TIMEOUT)


class SerialExecutor:
    """Its thread starts with the first action."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, action: Callable[[], None]) -> None:
        """Run `action` in the thread. It must not raise."""
        self._queue.put(action)
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()

    def close(self) -> None:
        """End the thread after the actions that were submitted before."""
        if self._thread is not None:
            self._queue.put(None)
            await_end(self._thread)

    def _run(self) -> None:
        while (action := self._queue.get()) is not None:
            action()
