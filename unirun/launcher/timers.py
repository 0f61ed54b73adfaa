"""torch's timers (``torch.distributed.elastic.timer``): a worker that does not release one in time is killed.

A worker writes requests to a named pipe, a line of JSON each, as `FileTimerClient` does. When a timer expires, the
agent sends the signal in the request to its process. Enabled by ``TORCHELASTIC_ENABLE_FILE_TIMER=1``, as under
torchrun.
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
from unirun.wire.frames import from_json

ENABLE, PIPE = "TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_TIMER_FILE"

CLOCK_POLL_INTERVAL = 1.0
"""Maximum seconds between two looks at the clock, as the time of day can be set."""

MANY = 10_000
"""Maximum number of running timers, to bound the agent's memory."""

MAX_PID = 1 << 22
"""The highest pid of Linux."""

_LINE = 4096
"""Maximum length of a request in bytes: ``PIPE_BUF``, up to which writes to a pipe are atomic."""


class TimerRequest(Value):
    """torch's ``FileTimerRequest``: `expiration_time` is in seconds since the epoch, negative to release the timer."""

    version: int
    pid: int
    scope_id: str
    expiration_time: float
    signal: int


class Timers:
    """The running timers. Time is an argument."""

    def __init__(self) -> None:
        self._running: dict[tuple[int, str], TimerRequest] = {}

    def take(self, request: TimerRequest) -> None:
        """Start, restart or release a timer. Requests with an invalid pid are ignored."""
        key = request.pid, request.scope_id
        self._running.pop(key, None)
        if request.expiration_time >= 0 and 0 < request.pid <= MAX_PID and len(self._running) < MANY:
            self._running[key] = request

    def expired(self, now: float) -> list[tuple[int, tuple[str, ...], int]]:
        """Remove expired timers. Returns for each process its pid, its timers that were not released in time, in the
        order of expiry, and the signal that is to be sent to it. All timers of a process end with the first that
        expires.

        A timer without a valid signal expires without consequences, as in torch.
        """
        late: dict[int, list[TimerRequest]] = {}
        for request in sorted(self._running.values(), key=lambda each: each.expiration_time):
            if request.expiration_time <= now:
                late.setdefault(request.pid, []).append(request)
        self._running = {key: each for key, each in self._running.items() if key[0] not in late}
        return [
            (pid, tuple(each.scope_id for each in found), signum)
            for pid, found in late.items()
            if (signum := next((each.signal for each in found if 0 < each.signal < signal.NSIG), 0))
        ]

    def until(self, now: float) -> float | None:
        """Seconds until the next expiry; None when no timer is running."""
        ends = [request.expiration_time for request in self._running.values()]
        return max(min(ends) - now, 0.0) if ends else None


class TimerPipe:
    """The pipe at `path`, read by the running loop, which calls `expired` for each process with an expired timer, with
    what `Timers.expired` returns of it."""

    def __init__(self, path: Path, expired: Callable[[int, tuple[str, ...], int], None]) -> None:
        self._path, self._expired = path, expired
        self._timers = Timers()
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._alarm: asyncio.TimerHandle | None = None
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        # Also open for writing, so that there is no end of file between two writers.
        self._handle = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._loop.add_reader(self._handle, self._read)

    def _read(self) -> None:
        *lines, rest = (self._rest + os.read(self._handle, 1 << 16)).split(b"\n")
        self._rest = rest[-_LINE:]
        for line in lines:
            try:
                self._timers.take(from_json(TimerRequest, line.decode()))
            except (FrameError, UnicodeDecodeError):
                # Not a request of torch's. Only processes of this user can write here.
                continue
        self._look()

    def _look(self) -> None:
        """Report expired timers, and schedule the next look."""
        if self._alarm is not None:
            self._alarm.cancel()
        for late in self._timers.expired(time.time()):
            self._expired(*late)
        left = self._timers.until(time.time())
        self._alarm = (
            None if left is None else self._loop.call_later(min(left, CLOCK_POLL_INTERVAL), self._look)
        )

    def close(self) -> None:
        """Stop and remove the pipe."""
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
