"""What the layer of calls needs of a transport: a way to reach one worker's process, and nothing else.

A transport moves parcels and keeps no promises beyond that. Ids, at most once, deadlines, retries and errors
are the business of `unirun.roles.calls`, which is the same above every transport.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch


class Address(NamedTuple):
    """The worker that holds a rank now. One that was started again has another address; printed ``actor:2``."""

    role: str
    rank: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.role}:{self.rank}"


@dataclass(slots=True)
class Parcel:
    """A message: `head`, small, and `buffers`, the memory of its tensors, which is moved without being pickled.

    A receiver may write to the buffers: they are its own. Nobody changes the parcel itself; it is not frozen because
    a frozen one takes four times as long to make, and each call makes several.
    """

    head: bytes
    buffers: tuple[memoryview, ...] = ()

    @property
    def size(self) -> int:
        """Bytes in all."""
        return len(self.head) + (sum(buffer.nbytes for buffer in self.buffers) if self.buffers else 0)


Reply = Callable[[Parcel], None]
"""Sends the answer; may be called in any thread, once. An answer to a caller that is gone is dropped."""

Wait = Callable[[], None]
"""Waits for the answer of a call; returns when `done` was called, the channel is broken or patience is at its end."""

Handler = Callable[[Parcel, Reply], None]
"""Takes a request; called in a thread of the transport, so it must return soon and must not raise."""


class Inbox(Protocol):
    """What a serving thread has still to do; a `queue.SimpleQueue` is one."""

    def put(self, item: Any, /) -> None:
        """Put something, from any thread."""

    def get(self) -> Any:
        """The next item. The one thread that asks waits until there is one, and may do the transport's work meanwhile:
        what is read in the thread that runs it need not wake it."""


class Channel(Protocol):
    """A connection to one worker."""

    def call(
        self, parcel: Parcel, done: Callable[[Parcel], None], patience: float | None = None
    ) -> Wait | None:
        """Send a request. `done` is called with the answer, in a thread of the transport, unless the channel breaks.

        Requests of one thread arrive in the order in which they were sent. With `patience` the caller will do nothing
        but wait, so many seconds at most; a transport on which that is quicker returns a function to be called then,
        which calls `done` in the waiting thread.
        """

    def close(self) -> None:
        """End it; nothing is called any more. Safe to call twice."""


class Transport(Protocol):
    """A way to call workers; one per process."""

    name: str

    def serve(self, me: Address, handler: Handler) -> str:
        """Take requests for the worker `me`. Returns the endpoint that others give to `connect`."""

    def inbox(self) -> Inbox:
        """For the thread that does what the handler is given."""

    def connect(self, peer: Address, endpoint: str, broken: Callable[[str], None]) -> Channel:
        """A new channel to `peer`. When it breaks, `broken` is called once, with the reason, in some thread.

        Raises `ChannelError` when nobody answers there.
        """

    def close(self) -> None:
        """End every channel and stop serving."""


def own(parcel: Parcel) -> Parcel:
    """The same with memory of its own: whoever made the tensors may change them while it is on its way."""
    if not parcel.buffers:
        return parcel
    return Parcel(parcel.head, tuple(_copy(buffer) for buffer in parcel.buffers))


def _copy(buffer: memoryview) -> memoryview:
    if buffer.nbytes == 0:
        return buffer
    # torch copies with vector instructions and without holding the lock of the interpreter.
    source = torch.frombuffer(writable(buffer), dtype=torch.uint8)
    copy: Any = source.clone().numpy()
    return memoryview(copy)


def writable(buffer: memoryview) -> Any:
    """`buffer`, or a copy when it must not be written: torch makes no tensors over such memory."""
    return bytearray(buffer) if buffer.readonly else buffer
