"""torch's timers (``torch.distributed.elastic.timer``): a worker that does not release one in time is killed.

A worker writes requests to a named pipe, a line of JSON each, as `FileTimerClient` does, and the agent sends the signal
that the request asks for to the process that made it. With ``TORCHELASTIC_ENABLE_FILE_TIMER=1``, as under torchrun.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from unirun.errors import FrameError
from unirun.values import Value
from unirun.wire.codec import from_json

ENABLE, PIPE = "TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_TIMER_FILE"

LOOK = 1.0
"""Seconds between two looks at the clock, at most: the time of day can be set."""

MANY = 10_000
"""Timers at a time: a worker that releases none must not fill the agent's memory."""

MAX_PID = 1 << 22
"""The greatest that Linux gives."""

_LINE = 4096
"""Bytes that are written to a pipe at once, and so the longest request (``PIPE_BUF``)."""


class Request(Value):
    """torch's ``FileTimerRequest``: `expiration_time` is in seconds since the epoch, negative to release the timer."""

    version: int
    pid: int
    scope_id: str
    expiration_time: float
    signal: int


class Expiry(Value):
    """Timers of the process `pid` that were not released in time, the first one first; `signal` is what it is sent."""

    pid: int
    scopes: tuple[str, ...]
    signal: int


class Timers:
    """Which timers are running. Time comes in as an argument."""

    def __init__(self) -> None:
        self._running: dict[tuple[int, str], Request] = {}

    def take(self, request: Request) -> None:
        """Start a timer, start it anew, or release it. What is no process has none."""
        key = request.pid, request.scope_id
        self._running.pop(key, None)
        if request.expiration_time >= 0 and 0 < request.pid <= MAX_PID and len(self._running) < MANY:
            self._running[key] = request

    def expired(self, now: float) -> list[Expiry]:
        """What has expired, by process. With one of them, all timers of a process are over.

        A timer without a signal (0 or less, or a number that is none) expires without consequences, as in torch.
        """
        late: dict[int, list[Request]] = {}
        for request in sorted(self._running.values(), key=lambda each: each.expiration_time):
            if request.expiration_time <= now:
                late.setdefault(request.pid, []).append(request)
        self._running = {key: each for key, each in self._running.items() if key[0] not in late}
        return [
            Expiry(pid, tuple(each.scope_id for each in found), signum)
            for pid, found in late.items()
            if (signum := next((each.signal for each in found if 0 < each.signal < signal.NSIG), 0))
        ]

    def until(self, now: float) -> float | None:
        """Seconds until the next one expires; None when none is running."""
        ends = [request.expiration_time for request in self._running.values()]
        return max(min(ends) - now, 0.0) if ends else None


class TimerPipe:
    """The pipe at `path`, read by the running loop; `expired` is told of each process that is late."""

    def __init__(self, path: Path, expired: Callable[[Expiry], None]) -> None:
        self._path, self._expired = path, expired
        self._timers = Timers()
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._alarm: asyncio.TimerHandle | None = None
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        # Open for writing too: there is no end of file between two writers.
        self._handle = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._loop.add_reader(self._handle, self._read)

    def _read(self) -> None:
        *lines, rest = (self._rest + os.read(self._handle, 1 << 16)).split(b"\n")
        self._rest = rest[-_LINE:]
        for line in lines:
            try:
                self._timers.take(from_json(Request, line.decode()))
            except (FrameError, UnicodeDecodeError):
                # Nobody but this user's processes can write here; whatever it is, it is no request of torch's.
                continue
        self._look()

    def _look(self) -> None:
        """Tell what is late, and come back when the next one may be."""
        if self._alarm is not None:
            self._alarm.cancel()
        for expiry in self._timers.expired(time.time()):
            self._expired(expiry)
        left = self._timers.until(time.time())
        self._alarm = None if left is None else self._loop.call_later(min(left, LOOK), self._look)

    def close(self) -> None:
        """Stop, and remove the pipe."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._loop.remove_reader(self._handle)
        os.close(self._handle)
        self._path.unlink(missing_ok=True)


def session_of(pid: int) -> int:
    """The session of a process, which is the pid of its worker; 0 when it is gone."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0
