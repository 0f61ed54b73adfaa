"""The interface between calls and transports: a transport moves parcels to and from the process of one worker.

It gives no other guarantees. Ids, at most once, deadlines, retries and errors are implemented once, in
`unirun.roles.calls`, above every transport.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from unirun.values import WorkerId
from unirun.wire.reporting import report_error


@dataclass(slots=True)
class Lent:
    """Shared memory of the sender: a sealed memfd of `size` bytes, which the receiver maps as the only buffer of the
    parcel. `released` is called once when it has freed that, or has ended. `handle` may be closed after the parcel was
    sent."""

    handle: int
    size: int
    released: Callable[[], None]


@dataclass(slots=True)
class Parcel:
    """A message: `head`, and `buffers`, the memory of its tensors, which is not pickled.

    The receiver owns the buffers and may write to them. Nobody changes the parcel itself. It is not a frozen dataclass,
    as that takes four times as long to make, and each call makes several. Memory that is `lent`, in place of buffers,
    goes over unix sockets only.
    """

    head: bytes
    buffers: tuple[memoryview, ...] = ()
    lent: Lent | None = None

    @property
    def size(self) -> int:
        """The size in bytes, with the buffers."""
        return len(self.head) + (sum(buffer.nbytes for buffer in self.buffers) if self.buffers else 0)


Reply = Callable[[Parcel], None]
"""Sends the answer. Called once, in any thread. An answer to a caller that has ended is dropped."""

Wait = Callable[[], None]
"""Waits for the answer of a call. Returns when `done` was called, the connection broke, or the patience has expired."""

Handler = Callable[[Parcel, Reply], None]
"""Takes a request. Called in a thread of the transport: it must return soon and must not raise."""


class Inbox(Protocol):
    """The queue of a serving thread. A `queue.SimpleQueue` is one."""

    def put(self, item: Any, /) -> None:
        """Add an item, from any thread."""

    def get(self) -> Any:
        """Wait for the next item and return it. Called by one thread, which may read requests for the transport while
        it waits: then no other thread has to wake it."""


class Connection(Protocol):
    """A connection to one worker."""

    def call(
        self, parcel: Parcel, done: Callable[[Parcel], None], patience: float | None = None
    ) -> Wait | None:
        """Send a request. `done` is called with the answer, in a thread of the transport, unless the connection breaks,
        as it does when a `done` raises.

        Requests of one thread arrive in the order in which they were sent. With `patience`, the calling thread will
        only wait for the answer, for at most that many seconds. A transport in which this is faster then returns a
        function that waits and calls `done` in the waiting thread.
        """

    def keep(self) -> None:
        """Copy what has not been sent yet: nobody waits for a call any more, and its buffers may be changed."""

    def close(self) -> None:
        """Close the connection; no callback is called any more. Safe to call twice."""


class Transport(Protocol):
    """A way to reach workers; one per process."""

    name: str

    def serve(self, me: WorkerId, handler: Handler) -> str:
        """Take requests for the worker `me`. Returns the endpoint with which others `connect`."""

    def inbox(self) -> Inbox:
        """A queue for the thread that runs the requests. That thread raises a `ChannelError` that it finds there."""

    def connect(self, peer: WorkerId, endpoint: str, broken: Callable[[str], None]) -> Connection:
        """Open a connection to `peer`. When it breaks, `broken` is called once, in some thread, with the reason.

        Raises `ChannelError` if it is known at once that nobody answers there.
        """

    def close(self) -> None:
        """Close every connection and stop serving."""


CALLS: Final = "calls"
"""The name of the handler of calls."""


class LendingTransport(Transport, Protocol):
    """A transport for parcels with memory that is `Lent`. It listens once, for handlers with names; a connection is to
    one of them."""

    def serve(self, me: WorkerId, handler: Handler, name: str = CALLS) -> str:
        """As `Transport.serve`. The endpoint of all handlers is the same."""

    def connect(
        self, peer: WorkerId, endpoint: str, broken: Callable[[str], None], name: str = CALLS
    ) -> Connection:
        """As `Transport.connect`, to the handler `name`. The connection breaks when `peer` has none."""

    def is_here(self, endpoint: str) -> bool:
        """Return True if the listener there is on this host, so that memory can be lent to it."""


def own(parcel: Parcel) -> Parcel:
    """A parcel with copies of the buffers, so that the tensors may be changed before it is sent."""
    if not parcel.buffers:
        return parcel
    return Parcel(parcel.head, tuple(_copy(buffer) for buffer in parcel.buffers))


def _copy(buffer: memoryview) -> memoryview:
    if buffer.nbytes == 0:
        return buffer
    import torch

    # It copies with vector instructions and without the GIL.
    source = torch.frombuffer(writable(buffer), dtype=torch.uint8)
    copy: Any = source.clone().numpy()
    return memoryview(copy)


def writable(buffer: memoryview) -> Any:
    """`buffer`, or a copy if it is read-only: torch makes no tensors over read-only memory."""
    return bytearray(buffer) if buffer.readonly else buffer


# `Scheduler`: a thread that runs actions at given times, such as deadlines and reconnects, or one after the other.

JOIN_TIMEOUT = 1.0
"""Seconds for which a thread that was told to end is waited for."""


def await_end(thread: threading.Thread | None) -> None:
    """Join a thread that was told to end, for at most `JOIN_TIMEOUT`; the current thread is not joined.

    A daemon thread that still runs when the interpreter exits, and frees a tensor then, aborts the process
    ("terminate called without an active exception").
    """
    if thread is not None and thread is not threading.current_thread():
        thread.join(JOIN_TIMEOUT)


class Scheduler:
    """Runs actions at their times, one at a time, in a thread that starts with the first action."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._news = threading.Condition()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def now(self) -> float:
        """The time in seconds, on the clock of `at`."""
        return time.monotonic()

    def soon(self, action: Callable[[], None]) -> None:
        """Run `action` after those that are due already, in the scheduler's thread."""
        self.at(0.0, action)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Run `action` at the time `when`, in seconds on the clock of `now`, in the scheduler's thread."""
        with self._news:
            if self._closed:
                return
            heapq.heappush(self._heap, (when, next(self._number), action))
            if self._heap[0][2] is action:
                self._news.notify()
            if self._thread is None:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                thread.start()
                # Only now: if no thread can be started, the next action tries again.
                self._thread = thread

    def close(self) -> None:
        """End the thread after the actions that are due. Later ones do not run."""
        with self._news:
            self._closed = True
            self._news.notify()
        await_end(self._thread)

    def _work(self) -> None:
        while (action := self._next()) is not None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - an action's bug is shown
                # A bug in one action must not stop the deadlines of other calls.
                report_error(error)

    def _next(self) -> Callable[[], None] | None:
        with self._news:
            while True:
                left = self._heap[0][0] - time.monotonic() if self._heap else math.inf
                if left <= 0:
                    return heapq.heappop(self._heap)[2]
                if self._closed:
                    return None
                self._news.wait(min(left, threading.TIMEOUT_MAX))
