"""Counts the connections that a listener refuses, and limits how many of them are told of."""

from __future__ import annotations

import time
from collections.abc import Callable

BURST = 20
"""Refusals that are told of at once; after these one a second, as whoever can connect must not fill a log."""


class Refusals:
    """Those of one listener. `tell` gets a text and the number of refusals so far."""

    def __init__(self, tell: Callable[[str, int], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._count, self._left, self._since = 0, float(BURST), clock()

    def add(self, error: Exception | str, origin: str = "") -> None:
        """Count the refusal of a connection from the address `origin`, and perhaps tell of it."""
        now = self._clock()
        self._count += 1
        self._left, self._since = min(self._left + now - self._since, BURST), now
        if self._left >= 1:
            self._left -= 1
            whence = f" from {origin}" if origin else ""
            self._tell(f"a connection{whence} was refused: {error}", self._count)
