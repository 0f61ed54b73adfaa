"""Large buffers over TLS in stripes, each through a connection of its own with a thread at both ends.

A thread encrypts 1 to 2 GB in a second, less than a network or another copy carries, and one thread at a time may use a
connection of OpenSSL. The buffers of a frame are one segment, as in shared memory. The stripes of it go into the
receiver's memory at once; when they are there, the frame follows in its order.
"""

from __future__ import annotations

import itertools
import os
import queue
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from unirun.errors import FrameError
from unirun.roles.transport.frames import SpareMemory, offsets, stream_of
from unirun.wire.sockets import shut

STRIPED = 4 << 20
"""Bytes of buffers from which they are sent in stripes."""

MAX_STRIPES = 4
"""Connections for one direction at most: more threads than that hardly speed up one transfer."""

MAX_THREADS = 64
"""Connections for stripes of one process at most, as each has a thread. Further peers send and receive without."""

CHUNK = 1 << 18
"""Bytes that are taken at once from the buffers, which may be replaced by a copy meanwhile."""

_STRIPE = struct.Struct("<QQQQ")
"""The number and the size of the segment, and the place and the length of the stripe in it."""

_ARRIVED = b"\0"

_places = threading.BoundedSemaphore(MAX_THREADS)


def stripe_count() -> int:
    """The number of connections for one direction; 0 where there is one processor."""
    processors = len(os.sched_getaffinity(0))
    return min(processors, MAX_STRIPES) if processors > 1 else 0


class Stripe:
    """A part of a segment on its way out. `arrived` is called with it when the peer has it."""

    def __init__(
        self, header: bytes, pieces: Sequence[memoryview], arrived: Callable[[Stripe], None]
    ) -> None:
        self.arrived = arrived
        self._pieces = deque([memoryview(header), *pieces])
        self._lock = threading.Lock()

    def take(self, into: memoryview) -> int:
        """Copy the next bytes. Returns how many; 0 at the end."""
        count = 0
        with self._lock:
            while self._pieces and count < len(into):
                piece = self._pieces.popleft()
                size = min(len(piece), len(into) - count)
                into[count : count + size] = piece[:size]
                count += size
                if size < len(piece):
                    self._pieces.appendleft(piece[size:])
        return count

    def keep(self) -> None:
        """Copy what is left."""
        with self._lock:
            self._pieces = deque(memoryview(bytes(piece)) for piece in self._pieces)


class Stripes:
    """The connections for stripes beside one connection. Each is used in one direction."""

    def __init__(self, lost: Callable[[], None]) -> None:
        """`lost` is called when one of them ends."""
        self._lost = lost
        self.open: Callable[[bool], None] | None = None
        """Opens a connection, to send or to receive, and calls `run`; None at the end that others connect to."""
        self.wanted: list[bool] = []
        """The directions in which large buffers have gone without."""
        self._asked: set[bool] = set()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._queues: list[queue.SimpleQueue[Stripe | None]] = []
        self._leaving: set[Stripe] = set()
        # By the number of a segment: its memory, and how many bytes of it are not there yet.
        self._segments: dict[int, memoryview] = {}
        self._missing: dict[int, int] = {}
        self._spare, self._numbers = SpareMemory(), itertools.count(1)
        self._closed = False

    def want(self, *, sends: bool) -> None:
        """Large buffers go this way: have connections opened by `begin`."""
        if self.open is not None and sends not in self._asked:
            self._asked.add(sends)
            self.wanted.append(sends)

    def begin(self) -> None:
        """Open the connections that are wanted: the peer has sent a frame, so it knows whose stripes they have."""
        while self.wanted and self.open is not None:
            sends = self.wanted.pop()
            for _ in range(stripe_count()):
                start(partial(self.open, sends))

    def send(
        self, buffers: Sequence[memoryview], sizes: Sequence[int], arrived: Callable[[], None]
    ) -> int | None:
        """Send buffers of these sizes. Returns the number of their segment; `arrived` is called when the peer has it.
        None, with nothing sent, without connections."""
        with self._lock:
            queues = list(self._queues)
            if not queues or self._closed:
                return None
            number, total = next(self._numbers), offsets(list(sizes))[1]
            parts = [*cut(buffers, -(-total // len(queues)))]
            left = itertools.count(1 - len(parts))

            def one_arrived(stripe: Stripe) -> None:
                self._leaving.discard(stripe)
                if next(left) == 0:
                    arrived()

            place = 0
            for waiting, pieces in zip(queues, parts, strict=False):
                length = sum(map(len, pieces))
                stripe = Stripe(_STRIPE.pack(number, total, place, length), pieces, one_arrived)
                self._leaving.add(stripe)
                waiting.put(stripe)
                place += length
        return number

    def keep(self) -> None:
        """Copy what is not sent yet."""
        for stripe in list(self._leaving):
            stripe.keep()

    def take(self, number: int, sizes: Sequence[int]) -> tuple[memoryview, ...]:
        """The buffers of a segment that has come. Raises `FrameError`."""
        places, total = offsets(list(sizes))
        with self._lock:
            segment, missing = self._segments.pop(number, None), self._missing.pop(number, None)
        if segment is None or missing or len(segment) != total:
            raise FrameError(f"a frame without the {total} bytes of its segment {number}")
        return tuple(segment[place : place + size] for place, size in zip(places, sizes, strict=True))

    def run(self, sock: socket.socket, *, sends: bool) -> None:
        """Send or receive stripes in this thread, as long as the connection lives. Closes it."""
        waiting: queue.SimpleQueue[Stripe | None] = queue.SimpleQueue()
        sock.settimeout(None)
        with self._lock:
            if self._closed:
                sock.close()
                return
            self._sockets.add(sock)
            if sends:
                self._queues.append(waiting)
        try:
            if sends:
                self._send_all(sock, waiting)
            else:
                self._receive_all(sock)
        except (OSError, EOFError, FrameError):
            self._lost()
        finally:
            with self._lock:
                self._sockets.discard(sock)
                if sends:
                    self._queues.remove(waiting)
                sock.close()

    def _send_all(self, sock: socket.socket, waiting: queue.SimpleQueue[Stripe | None]) -> None:
        chunk = memoryview(bytearray(CHUNK))
        while (stripe := waiting.get()) is not None:
            while count := stripe.take(chunk):
                sock.sendall(chunk[:count])
            if not sock.recv(1):
                raise EOFError
            stripe.arrived(stripe)

    def _receive_all(self, sock: socket.socket) -> None:
        header = memoryview(bytearray(_STRIPE.size))
        while True:
            _fill(sock, header)
            number, total, place, length = _STRIPE.unpack(header)
            segment = self._segment(number, total)
            if place + length > total or length > self._missing.get(number, 0):
                raise FrameError(f"{length} bytes at {place} of a segment with {total} bytes")
            _fill(sock, segment[place : place + length])
            with self._lock:
                self._missing[number] -= length
            # It belongs to the frame from now on.
            del segment
            sock.sendall(_ARRIVED)

    def _segment(self, number: int, total: int) -> memoryview:
        with self._lock:
            segment = self._segments.get(number)
            if segment is None:
                try:
                    segment = self._segments[number] = memoryview(self._spare.take(total))
                except (MemoryError, RuntimeError) as error:
                    raise FrameError(f"there is no memory for a frame of {total} bytes") from error
                self._missing[number] = total
        if len(segment) != total:
            raise FrameError(f"segment {number} has {len(segment)} bytes and not {total}")
        return segment

    def close(self) -> None:
        """End all of them; their threads close them."""
        with self._lock:
            self._closed = True
            self._segments.clear()
            for waiting in self._queues:
                waiting.put(None)
            for sock in self._sockets:
                shut(sock)


def start(work: Callable[[], None]) -> bool:
    """Run `work` for a connection in a thread. False if this process has as many of these as it may have, or can start
    no more threads."""

    def run() -> None:
        try:
            work()
        finally:
            _places.release()

    if not _places.acquire(blocking=False):
        return False
    try:
        threading.Thread(target=run, name="unirun-stripe", daemon=True).start()
    except RuntimeError:
        _places.release()
        return False
    return True


def cut(buffers: Sequence[memoryview], size: int) -> Iterator[list[memoryview]]:
    """The bytes of a segment in parts of `size`, the last of which may be shorter."""
    part: list[memoryview] = []
    room = size
    for piece in stream_of(b"", buffers):
        rest = memoryview(piece).cast("B")
        while len(rest):
            part.append(rest[:room])
            rest, room = rest[room:], room - len(part[-1])
            if not room:
                yield part
                part, room = [], size
    if part:
        yield part


def _fill(sock: socket.socket, space: memoryview) -> None:
    while len(space):
        count = sock.recv_into(space)
        if not count:
            raise EOFError
        space = space[count:]
