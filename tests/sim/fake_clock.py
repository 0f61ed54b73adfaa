"""Fake time for simulations: nothing happens between two events, and no test waits."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class FakeClock:
    """Fake time: events in order of time, then of their making."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0
        self.steps = 0

    def after(self, delay: float, do: Callable[[], None]) -> None:
        """Call `do` in `delay` seconds."""
        self._made += 1
        heapq.heappush(self._queue, (self.now + delay, self._made, do))

    def run_next(self) -> bool:
        """Let the next thing happen; False when nothing is left."""
        if not self._queue:
            return False
        self.now, _, do = heapq.heappop(self._queue)
        self.steps += 1
        do()
        return True
