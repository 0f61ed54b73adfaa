"""The time when an agent must kill its workers as its node may have been given up (`unirun.failover.silence`)."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import time
from collections import deque

from unirun.failover.silence import FENCE, UNMARKED


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

    def let_in(self, began: float, now: float) -> None:
        """A process of the job on the head, the only host where masters can run, has let this node in. The
        node began to connect at `began`."""
        self._renew(began + FENCE, now)

    def unmarked(self, began: float, now: float) -> None:
        """The store has no mark of this node; it was read from `began` on."""
        self._renew(began + UNMARKED, now)

    def quiet_for(self, now: float) -> float:
        """Seconds since the beginning of what has proved last that the node is not given up."""
        return now - (self.until - FENCE) if self.until < math.inf else 0.0

    def over(self, now: float) -> bool:
        """Return True if the workers must not run any more. That is for good."""
        return now >= self.until

    def _renew(self, until: float, now: float) -> None:
        if not self.over(now):
            self.until = max(self.until, until)


class KillTimer:
    """A timer of the kernel that kills this process, also one that is stopped or whose interpreter is busy.

    Its spawners then end all workers, as after any death of an agent. Where the whole host was stopped they do that in
    the moment in which it goes on, before the agent itself could have looked at the time.
    """

    def __init__(self) -> None:
        self._libc = _library()
        self._timer = ctypes.c_void_p()
        event = _Event(None, int(signal.SIGKILL), _BY_SIGNAL)
        self._check(
            self._libc.timer_create(time.CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(self._timer))
        )

    def set(self, at: float) -> None:
        """Kill at this time of `clock` instead of that which was set before; 0 for never."""
        when = _Times(0, 0, int(at), int(at % 1 * 1e9))
        self._check(self._libc.timer_settime(self._timer, _ABSOLUTE, ctypes.byref(when), None))

    def close(self) -> None:
        """Remove the timer."""
        self._check(self._libc.timer_delete(self._timer))

    def _check(self, result: int) -> None:
        if result != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


_BY_SIGNAL = 0
_ABSOLUTE = 1


class _Event(ctypes.Structure):
    """``struct sigevent``."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_byte * 48),
    )


class _Times(ctypes.Structure):
    """``struct itimerspec``: the interval, then the first time, in seconds and nanoseconds."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every", "every_ns", "first", "first_ns"))


def _library() -> ctypes.CDLL:
    """The C library that has the timers: libc, or before glibc 2.34 a library of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc if hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)
