"""When an agent must kill its workers because its node may have been given up (`unirun.failover.silence`)."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from unirun.failover.silence import FENCE, UNMARKED

CHECK = 0.25
"""Seconds between two looks at the clock, at most: a host may be suspended for longer than the wait was meant to be."""


def clock() -> float:
    """Seconds that also pass while the host is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Fence:
    """Until when the workers may run: `until`. Times are seconds of `clock`; there is no I/O.

    Each renewal counts from the moment at which what proves it was begun. So it does not matter when the agent comes
    to read an answer: one that was stopped and continues finds its time over, whatever waits in its sockets.
    """

    def __init__(self) -> None:
        self.until = math.inf
        self._sent: deque[float] = deque()

    def joins(self, now: float) -> None:
        """A stream to a master begins. Before the first one there are no workers."""
        self._sent.clear()
        self.until = min(self.until, now + FENCE)

    def beats(self, now: float) -> None:
        """A beat is sent."""
        self._sent.append(now)

    def answered(self, now: float, *, sure: bool) -> None:
        """The master has answered the oldest beat; `sure`: it may say that the node has not been given up."""
        if self._sent:
            began = self._sent.popleft()
            if sure:
                self._renew(began + FENCE, now)

    def nobody_leads(self, began: float, now: float) -> None:
        """No master has answered on the only host where one can be; what shows that has begun at `began`."""
        self._renew(began + FENCE, now)

    def unmarked(self, began: float, now: float) -> None:
        """The store has no mark of this node; it was read from `began` on."""
        self._renew(began + UNMARKED, now)

    def quiet_for(self, now: float) -> float:
        """Seconds since the beginning of what has proved last that the node is not given up."""
        return now - (self.until - FENCE) if self.until < math.inf else 0.0

    def over(self, now: float) -> bool:
        """Whether the workers must not run any more. That is for good."""
        return now >= self.until

    def _renew(self, until: float, now: float) -> None:
        if not self.over(now):
            self.until = max(self.until, until)


class Guard:
    """A thread that calls `expire` when the fence is over, also while the event loop is busy."""

    def __init__(self, fence: Fence, expire: Callable[[], None]) -> None:
        self._fence, self._expire = fence, expire
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unirun-fence", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            left = self._fence.until - clock()
            if left <= 0:
                self._expire()
                return
            self._closed.wait(min(left, CHECK))
