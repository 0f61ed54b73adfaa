"""Reading from the sockets of this process: by a reading thread, or by a thread that would only wait.

Waking a thread takes some 30 us, as long as the rest of a call. So a thread that waits for an answer reads the socket
itself, and the serving thread reads the requests while it has none to run (`RequestInbox.get`). Otherwise the reading
thread does. Waking a processor that sleeps takes longer still, so both of them poll for a short time before they sleep
(`SpinningPoll`).
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from unirun.errors import ChannelError
from unirun.roles.transport.protocol import await_end
from unirun.wire.reporting import report_error

SPIN_SECONDS = 200e-6
"""Seconds for which a waiting thread polls before it sleeps. To wake the processor of a sleeping thread takes about 100
us on a virtual machine."""
PREEMPTED_SECONDS, SPIN_PAUSE_SECONDS = 500e-6, 0.1
"""Seconds between two polls from which on another thread has had the processor, and for which no thread spins then."""


class File(Protocol):
    """An object with a descriptor to be polled."""

    number: int

    def ready(self, events: int) -> None:
        """Called when the descriptor is readable, writable or at its end."""

    def close(self) -> None:
        """Remove it from the poller, then close it."""


Poll = Callable[[float | None], list[tuple[int, int]]]
"""Waits for at most so many seconds (None: no limit). Returns descriptors and their events."""


class SpinningPoll:
    """Polls again and again for `SPIN_SECONDS` seconds before it sleeps, if the wait before was about as short.

    So a worker without calls, or a caller of a slow method, sleeps. Between two polls other threads of the same
    processor may run. If they do so for long, there is no free processor, and it does not spin for `SPIN_PAUSE_SECONDS`
    seconds.
    """

    def __init__(self, poll: Poll, now: Callable[[], float] = time.monotonic) -> None:
        self._poll, self._now = poll, now
        self._last, self._pause = math.inf, -math.inf

    def __call__(self, timeout: float | None) -> list[tuple[int, int]]:
        """As `poll`, up to `SPIN_SECONDS` seconds longer."""
        began = now = self._now()
        # The wake-up of a sleeping thread is a part of the time, so the limit is higher than `SPIN_SECONDS`.
        end = began + SPIN_SECONDS if self._last < 2 * SPIN_SECONDS and began > self._pause else began
        while not (found := self._poll(0)) and now < end:
            os.sched_yield()
            before, now = now, self._now()
            if now - before > PREEMPTED_SECONDS:
                self._pause = now + SPIN_PAUSE_SECONDS
        found = found or self._poll(timeout)
        self._last = self._now() - began
        return found


class Poller:
    """An epoll set. Any thread may add and remove files; one thread at a time calls `dispatch`."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._files: dict[int, File] = {}
        self._wanted: dict[int, int] = {}
        self._wake_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_event, select.EPOLLIN)
        self._lock = threading.Lock()
        self._closed = False

    def add(self, file: File) -> None:
        """Call ``file.ready(events)`` when the file is readable."""
        with self._lock:
            if self._closed:
                raise ChannelError("the transport is closed")
            self._files[file.number] = file
            self._want(file.number, select.EPOLLIN)

    def writable(self, file: File, wanted: bool) -> None:
        """Set whether ``ready`` is also called when the file is writable."""
        self._change(file, select.EPOLLOUT, wanted)

    def readable(self, file: File, wanted: bool) -> None:
        """Set whether ``ready`` is called when the file is readable; not while another thread reads it."""
        self._change(file, select.EPOLLIN, wanted)

    def _change(self, file: File, event: int, wanted: bool) -> None:
        with self._lock:
            if self._files.get(file.number) is file and not self._closed:
                events = self._wanted.get(file.number, 0)
                self._want(file.number, events | event if wanted else events & ~event)

    def _want(self, number: int, events: int) -> None:
        before = self._wanted.get(number, 0)
        if events == before:
            return
        self._wanted[number] = events
        if not before:
            self._epoll.register(number, events)
        elif events:
            self._epoll.modify(number, events)
        else:
            # Without events, epoll would still report a hang-up all the time.
            self._epoll.unregister(number)

    def remove(self, file: File) -> None:
        """Stop polling the file. To be called before it is closed, as its number may be used again."""
        with self._lock:
            if self._files.get(file.number) is file and not self._closed:
                self._want(file.number, 0)
                del self._files[file.number], self._wanted[file.number]

    def wake(self) -> None:
        """Wake the thread that polls, now or the next time."""
        os.eventfd_write(self._wake_event, 1)

    def dispatch(self, found: list[tuple[int, int]]) -> None:
        """Call ``ready`` of the files that `poll` has found."""
        for number, events in found:
            file = self._files.get(number)
            if self._closed:
                return
            if number == self._wake_event:
                os.eventfd_read(self._wake_event)
            elif file is not None:
                try:
                    file.ready(events)
                except Exception as error:  # noqa: BLE001 - a handler's bug is shown
                    # A bug in a handler ends this connection only.
                    report_error(error)
                    file.close()

    def _shut(self) -> bool:
        """Add nothing and call no `ready` from now on. False if this was called before."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        if not was_closed:
            self.wake()
        return not was_closed

    def _release(self) -> None:
        for file in list(self._files.values()):
            file.close()
        self._files.clear()
        self._epoll.close()
        os.close(self._wake_event)


class Loop(Poller):
    """The reading thread. It starts with the first file."""

    def __init__(self) -> None:
        super().__init__()
        self._thread: threading.Thread | None = None

    def add(self, file: File) -> None:
        """As `Poller.add`; starts the thread."""
        super().add(file)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="unirun-socket", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread and close the files."""
        if not self._shut():
            return
        await_end(self._thread)
        self._release()

    def _work(self) -> None:
        while not self._closed:
            self.dispatch(self._epoll.poll())


class RequestInbox(Poller):
    """The connections of callers, and the queue of the requests for the serving thread.

    The whole is one file of the loop, whose thread reads the connections unless the serving thread waits in `get`.
    """

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.number = self._epoll.fileno()
        self._loop = loop
        self._poll = SpinningPoll(self._epoll.poll)
        self._items: deque[Any] = deque()
        self._reading = threading.Lock()
        self._waiting = False

    def put(self, item: Any) -> None:
        """Add an item for the thread in `get`."""
        self._items.append(item)
        if self._waiting:
            self.wake()

    def get(self) -> Any:
        """Return the next item; read the connections while there is none. Raises `ChannelError` if the transport is
        closed."""
        while not self._items:
            self._read()
        return self._items.popleft()

    def _read(self) -> None:
        with self._reading:
            try:
                self._loop.readable(self, False)
                while not self._items:
                    if self._closed:
                        raise ChannelError("the transport is closed")
                    self._waiting = True
                    # An item that was put before `_waiting` was set has not woken this thread.
                    found = [] if self._items else self._poll(None)
                    self._waiting = False
                    self.dispatch(found)
            finally:
                self._waiting = False
                self._loop.readable(self, True)

    def ready(self, events: int) -> None:
        """Called in the reading thread: read the connections, unless the serving thread does."""
        if self._reading.acquire(blocking=False):
            try:
                self.dispatch(self._epoll.poll(0))
            finally:
                self._reading.release()

    def close(self) -> None:
        """Close all connections."""
        self._loop.remove(self)
        if self._shut():
            with self._reading:
                self._release()
