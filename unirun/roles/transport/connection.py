"""One stream socket of the socket transport: reads and writes frames and never blocks."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from unirun.errors import CallError, FrameError
from unirun.roles.transport.frames import (
    INLINE,
    MAX_INLINE,
    RELEASE,
    Frame,
    FrameParser,
    encode_header,
    stream_of,
)
from unirun.roles.transport.protocol import Lent, Parcel
from unirun.roles.transport.segments import Segment, SegmentPool, map_segment

BATCH = 64
"""Frames that are written with one system call at most."""

_ANCILLARY = socket.CMSG_SPACE(32 * array.array("i").itemsize)


class Connection:
    """A connected, authenticated socket. Any thread may send; one thread receives.

    `wants_to_write` is called, under the connection's lock, when frames are left to be written: then `flush` is to be
    called when the socket is writable.

    Frames that are not urgent are gathered, and up to `BATCH` of them are written with one system call. They are also
    written as soon as the receiving thread is idle. Before `open` every frame waits.

    The socket is closed while no thread reads it: a thread would read on from the file that gets its number next.

    Large buffers go through shared memory on a unix socket. On others they are written as they are, so they must not be
    changed before they are sent, or `keep` was called.
    """

    def __init__(
        self, sock: socket.socket, wants_to_write: Callable[[bool], None], *, opened: bool = True
    ) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._wants_to_write = wants_to_write
        self._lock = threading.Lock()
        self._using = threading.Lock()
        self._waiting: deque[tuple[memoryview, int | None]] = deque()
        self._shares = sock.family == socket.AF_UNIX
        self._pool = SegmentPool()
        self._parser = FrameParser(INLINE if self._shares else MAX_INLINE)
        self._handles: deque[int] = deque()
        self._released: deque[int] = deque()
        self._held: list[bytes] = []
        self._opened, self._closed = opened, False

    def open(self) -> None:
        """Send frames from now on."""
        with self._lock:
            self._opened = True
        self.flush()

    def send(self, kind: int, tag: int, parcel: Parcel, *, urgent: bool = True) -> bool:
        """Send a frame, now or as soon as the socket is writable. False if the connection is closed.

        A frame that is not `urgent` may wait for others, as the peer has other requests to run first.
        """
        head, buffers = parcel.head, parcel.buffers
        with self._lock:
            if self._closed:
                if parcel.lent is not None:
                    parcel.lent.released()
                return False
            idle = not self._held and not self._waiting
            while self._released:
                self._held.append(encode_header(RELEASE, self._released.popleft(), 0, []))
            if parcel.lent is not None:
                self._lend(kind, tag, head, parcel.lent)
                return True
            if not buffers:
                frame = encode_header(kind, tag, len(head), []) + head
            elif sum(sizes := [buffer.nbytes for buffer in buffers]) <= INLINE:
                frame = b"".join((encode_header(kind, tag, len(head), sizes), head, *buffers))
            elif not self._shares:
                self._stream(encode_header(kind, tag, len(head), sizes) + head, buffers)
                return True
            else:
                segment = self._share(buffers, sum(sizes))
                self._write(
                    (encode_header(kind, tag, len(head), sizes, segment.number), head), segment.handle
                )
                return True
            if urgent or len(self._held) >= BATCH:
                self._write((frame,))
            else:
                self._held.append(frame)
                if idle:
                    self._wants_to_write(True)
        return True

    def _lend(self, kind: int, tag: int, head: bytes, lent: Lent) -> None:
        if not self._shares:
            raise CallError("shared memory goes over unix sockets only", "send buffers")
        segment = self._pool.lend(lent.handle, lent.size, lent.released)
        self._write((encode_header(kind, tag, len(head), [lent.size], segment.number), head), lent.handle)

    def _share(self, buffers: Sequence[memoryview], size: int) -> Segment:
        try:
            return self._pool.write(buffers)
        except OSError as error:
            problem = f"there is no shared memory for {size} bytes: {error.strerror}"
            raise CallError(problem, "send less at once") from error

    def _write(self, pieces: Sequence[bytes], handle: int | None = None) -> None:
        if handle is not None and self._held:
            # A descriptor must be sent with its own frame.
            self._write(())
        data = b"".join((*self._held, *pieces))
        self._held.clear()
        sent = 0 if self._waiting or not self._opened else self._try(data, handle)
        if sent < len(data):
            # A descriptor is sent with the first byte. Keep a copy until then, as the segment may be released
            # meanwhile.
            left = None if sent or handle is None else os.dup(handle)
            self._waiting.append((memoryview(data)[sent:], left))
            self._wants_to_write(True)

    def _stream(self, begin: bytes, buffers: Sequence[memoryview]) -> None:
        """Write a frame with large buffers behind what waits."""
        pieces = stream_of(b"".join((*self._held, begin)), buffers)
        self._held.clear()
        self._waiting.extend((memoryview(piece), None) for piece in pieces if len(piece))
        self._write_waiting()

    def _try(self, data: bytes | memoryview, handle: int | None) -> int:
        try:
            return self.put(data, handle)
        except BlockingIOError:
            return 0
        except OSError:
            # Mostly the peer has ended. Whatever it is, the reading thread sees the end and reports it.
            self._shut()
            return len(data)

    def put(self, data: bytes | memoryview, handle: int | None = None) -> int:
        """Write to the socket, with a descriptor. Returns how many bytes it took. Raises OSError."""
        if handle is not None:
            return socket.send_fds(self.socket, [data], [handle], socket.MSG_NOSIGNAL)
        return self.socket.send(data, socket.MSG_NOSIGNAL)

    def _shut(self) -> None:
        """End the stream in both directions, which wakes a thread that polls the socket."""
        with contextlib.suppress(OSError):
            # Not the method of a TLS socket: after that it would write and read without TLS.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def flush(self) -> None:
        """Write the frames that wait, as many as the socket takes."""
        with self._lock:
            self._write_waiting()

    def _write_waiting(self) -> None:
        while self._opened and not self._closed:
            if not self._waiting:
                if not self._held:
                    break
                self._write(())
                continue
            data, handle = self._waiting.popleft()
            sent = self._try(data, handle)
            if sent and handle is not None:
                os.close(handle)
                handle = None
            if sent < len(data):
                self._waiting.appendleft((data[sent:], handle))
                self._wants_to_write(True)
                return
        self._wants_to_write(False)

    def keep(self) -> None:
        """Copy what waits to be written: whose it is may change it from now on."""
        with self._lock:
            if not self._shares:
                self._waiting = deque((memoryview(bytes(data)), handle) for data, handle in self._waiting)

    def receive(self) -> Iterator[tuple[Frame, Parcel]]:
        """The frames of one read. Raises `FrameError` for malformed ones, OSError or EOFError at the end of the
        stream."""
        more = True
        while more:
            try:
                with self._using:
                    count, more = self.get(self._parser.space())
            except BlockingIOError:
                return
            if count == 0:
                raise EOFError("the peer closed the connection")
            for frame in self._parser.received(count):
                if frame.kind == RELEASE:
                    with self._lock:
                        self._pool.release(frame.tag)
                    continue
                yield frame, Parcel(frame.head, self._buffers(frame))

    def begin(self, most: int) -> bytes:
        """The next bytes of what comes before the first frame, at most `most`. Raises OSError."""
        with self._using:
            return self.socket.recv(most)

    def get(self, space: memoryview) -> tuple[int, bool]:
        """Read from the socket. Returns how many bytes came, and whether to read again before it is polled. Raises
        OSError."""
        count, ancillary, _, _ = self.socket.recvmsg_into([space], _ANCILLARY)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found = array.array("i")
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
                self._handles.extend(found)
        return count, False

    def _buffers(self, frame: Frame) -> tuple[memoryview, ...]:
        if frame.segment is None:
            return frame.inline
        if not self._handles:
            raise FrameError("a frame without the descriptor that belongs to it")
        return map_segment(
            self._handles.popleft(), frame.sizes, partial(self._released.append, frame.segment)
        )

    def close(self) -> None:
        """Close the socket and its descriptors. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for handle in [*self._handles, *(h for _, h in self._waiting if h is not None)]:
                os.close(handle)
            self._waiting.clear()
            self._handles.clear()
            self._pool.close()
            # `close` alone does not wake a thread that polls the socket.
            self._shut()
            with self._using:
                self.socket.close()
