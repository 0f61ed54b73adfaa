"""Who reads from sockets: a thread, and whoever has nothing else to do.

A thread that is woken runs some 30 us later, as long as all the rest of a call takes. So nobody is woken where that
can be helped: a thread that waits for an answer reads it by itself, and the one that runs calls reads the requests
as long as it has none to run (`Desk.get`). When it has one, the reading thread sees to the sockets again.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from typing import Any, Protocol

from unirun.errors import ChannelError
from unirun.reporting import report_error
from unirun.wire.handshake import DEADLINE


class File(Protocol):
    """Something with a descriptor."""

    number: int

    def ready(self, events: int) -> None:
        """It can be read, or written, or is at its end."""

    def close(self) -> None:
        """Remove it, then close it."""


class Newcomer(File, Protocol):
    """One that has to be `done` before its deadline."""

    deadline: float
    done: bool


class Files:
    """Descriptors that are looked at together. Any thread adds and removes; one at a time does `turn`."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._files: dict[int, File] = {}
        self._wanted: dict[int, int] = {}
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._lock = threading.Lock()
        self._closed = False

    def add(self, file: File) -> None:
        """Call ``file.ready(events)`` when it can be read."""
        with self._lock:
            if self._closed:
                raise ChannelError("the transport is closed")
            self._files[file.number] = file
            self._want(file.number, select.EPOLLIN)

    def writable(self, file: File, wanted: bool) -> None:
        """Whether ``ready`` shall also be called when the file can be written."""
        self._change(file, select.EPOLLOUT, wanted)

    def readable(self, file: File, wanted: bool) -> None:
        """Whether ``ready`` shall be called when the file can be read. Another thread may do that for a while."""
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
            # Not only without events: an end would be told all the same, again and again.
            self._epoll.unregister(number)

    def remove(self, file: File) -> None:
        """Not any more; before the file is closed. Its number may belong to another one the next time."""
        with self._lock:
            if self._files.get(file.number) is file and not self._closed:
                self._want(file.number, 0)
                del self._files[file.number], self._wanted[file.number]

    def ring(self) -> None:
        """Let the present `turn`, or the next one, return soon."""
        os.eventfd_write(self._bell, 1)

    def turn(self, found: list[tuple[int, int]]) -> None:
        """Call those that were found to be ready."""
        for number, events in found:
            file = self._files.get(number)
            if self._closed:
                return
            if number == self._bell:
                os.eventfd_read(self._bell)
            elif file is not None:
                try:
                    file.ready(events)
                except Exception as error:  # noqa: BLE001 - a handler's bug is shown
                    # A bug in a handler: this connection ends, the others go on.
                    report_error(error)
                    file.close()

    def _shut(self) -> bool:
        """From now on nothing is added, and `ready` is not called. False when it was so before."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        if not was_closed:
            self.ring()
        return not was_closed

    def _release(self) -> None:
        for file in list(self._files.values()):
            file.close()
        self._files.clear()
        self._epoll.close()
        os.close(self._bell)


class Loop(Files):
    """The thread that reads; it starts with the first file."""

    def __init__(self) -> None:
        super().__init__()
        self._newcomers: deque[Newcomer] = deque()
        self._thread: threading.Thread | None = None

    def add(self, file: File) -> None:
        """The same; from any thread."""
        super().add(file)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="unirun-socket", daemon=True)
                self._thread.start()

    def expect(self, newcomer: Newcomer) -> None:
        """Add one that has to prove the token until its deadline. Only for the thread that reads."""
        self._newcomers.append(newcomer)
        self.add(newcomer)

    def close(self) -> None:
        """End the thread and close the files."""
        if not self._shut():
            return
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(DEADLINE)
        self._release()

    def _patience(self) -> float | None:
        """Seconds until the next newcomer is late; those that are late already are closed."""
        while self._newcomers:
            newcomer = self._newcomers[0]
            left = newcomer.deadline - time.monotonic()
            if left > 0 and not newcomer.done:
                return left
            self._newcomers.popleft()
            newcomer.close()
        return None

    def _work(self) -> None:
        while not self._closed:
            self.turn(self._epoll.poll(self._patience()))


class Desk(Files):
    """Where requests come in, and what they order is put for the thread that does it.

    All of it is one file of the loop, whose thread sees to it unless the other thread waits here.
    """

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.number = self._epoll.fileno()
        self._loop = loop
        self._items: deque[Any] = deque()
        self._reading = threading.Lock()
        self._resting = False

    def put(self, item: Any) -> None:
        """For the thread in `get`."""
        self._items.append(item)
        if self._resting:
            self.ring()

    def get(self) -> Any:
        """The next item. While there is none this thread reads. Raises `ChannelError` when the transport is closed."""
        while not self._items:
            self._rest()
        return self._items.popleft()

    def _rest(self) -> None:
        with self._reading:
            try:
                self._loop.readable(self, False)
                while not self._items:
                    if self._closed:
                        raise ChannelError("the transport is closed")
                    self._resting = True
                    # Whoever put something before that line has not rung.
                    found = self._epoll.poll(0 if self._items else None)
                    self._resting = False
                    self.turn(found)
            finally:
                self._resting = False
                self._loop.readable(self, True)

    def ready(self, events: int) -> None:
        """For the loop: see to it, unless somebody has just begun to wait here."""
        if self._reading.acquire(blocking=False):
            try:
                self.turn(self._epoll.poll(0))
            finally:
                self._reading.release()

    def close(self) -> None:
        """Close all connections."""
        self._loop.remove(self)
        if self._shut():
            with self._reading:
                self._release()
