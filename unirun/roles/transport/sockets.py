"""Sockets that read and write frames and never block, and the threads that poll them."""

from __future__ import annotations

import array
import fcntl
import math
import os
import select
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from unirun.errors import CallError, ChannelError, FrameError
from unirun.roles.transport.frames import (
    INLINE,
    MAX_INLINE,
    RELEASE,
    Frame,
    FrameParser,
    SpareMemory,
    encode_header,
    offsets,
    stream_of,
)
from unirun.roles.transport.protocol import Handler, Lent, Parcel, await_end
from unirun.roles.transport.stripes import STRIPED, Stripes
from unirun.wire.reporting import report_error
from unirun.wire.sockets import shut

# Reading from the sockets of this process: by a reading thread, or by a thread that would only wait.
#
# Waking a thread takes some 30 us, as long as the rest of a call. So a thread that waits for an answer reads the socket
# itself, and the serving thread reads the requests while it has none to run (`RequestInbox.get`). Otherwise the reading
# thread does. Waking a processor that sleeps takes longer still, so both of them poll for a short time before they
# sleep (`SpinningPoll`).

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
                thread = threading.Thread(target=self._work, name="unirun-socket", daemon=True)
                thread.start()
                # Only now: if no thread can be started, the next file tries again.
                self._thread = thread

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
    """The connections of callers, and the queue of the requests for the serving thread. `handlers` take the requests;
    `stripes` has those of connections from other hosts, by the keys that callers have given to them.

    The whole is one file of the loop, whose thread reads the connections unless the serving thread waits in `get`.
    """

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.number = self._epoll.fileno()
        self.handlers: dict[str, Handler] = {}
        self.stripes: weakref.WeakValueDictionary[str, Stripes] = weakref.WeakValueDictionary()
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


# Large buffers through shared memory: one copy by the sender, none by the receiver.
#
# A sender writes into a memfd and passes its descriptor. The receiver maps it copy-on-write, so the sender does not see
# its changes. When the last tensor over the mapping is freed, the receiver releases the segment with its next frame,
# and the sender uses the memory again: existing pages are written four times as fast as new ones.
#
# The size of a memfd is sealed before it is sent, and a receiver maps only sealed ones: reading a mapping beyond the
# end of a file that was shrunk raises SIGBUS.

KEEP = 1 << 28
"""Bytes of free segments that one connection keeps for reuse."""

MANY = 64
"""Free segments, and segments in use, that are kept at most, as each takes a descriptor."""


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""The content is not sealed, as the memory is used again."""


@dataclass(eq=False)
class Segment:
    """A memfd of `size` bytes; 0 until it was written for the first time."""

    number: int
    handle: int
    size: int


class SegmentPool:
    """The segments of one sender. Not thread-safe."""

    def __init__(self) -> None:
        self._free: list[Segment] = []
        self._lent: dict[int, Segment] = {}
        self._given: set[int] = set()
        self._loans: dict[int, Callable[[], None]] = {}
        self._number = 0

    def write(self, buffers: Sequence[memoryview]) -> Segment:
        """Write `buffers` into a segment and return it. Raises OSError if there is no memory."""
        places, total = offsets([buffer.nbytes for buffer in buffers])
        segment = self._take(total)
        try:
            for place, buffer in zip(places, buffers, strict=True):
                _write(segment.handle, buffer.cast("B"), place)
            if segment.size == 0:
                os.ftruncate(segment.handle, total)
                fcntl.fcntl(segment.handle, fcntl.F_ADD_SEALS, SEALS)
                segment.size = total
        except OSError:
            os.close(segment.handle)
            raise
        self._lent[segment.number] = segment
        if len(self._lent) > MANY:
            # The receiver has the oldest one for long: give it up, so that its memory is freed with the mapping.
            longest = next(iter(self._lent))
            os.close(self._lent.pop(longest).handle)
            self._given.add(longest)
        return segment

    def _take(self, size: int) -> Segment:
        fitting = [s for s in self._free if size <= s.size]
        self._number += 1
        if fitting:
            best = min(fitting, key=lambda s: s.size)
            self._free.remove(best)
            return Segment(self._number, best.handle, best.size)
        return Segment(self._number, os.memfd_create("unirun", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), 0)

    def lend(self, handle: int, size: int, released: Callable[[], None]) -> Segment:
        """Somebody else's memory as a segment; `released` is called at its release, or by `close`."""
        self._number += 1
        self._loans[self._number] = released
        return Segment(self._number, handle, size)

    def release(self, number: int) -> None:
        """The receiver does not need it any more. Raises `FrameError` for a segment that is not in use."""
        if (released := self._loans.pop(number, None)) is not None:
            released()
            return
        if number in self._given:
            self._given.remove(number)
            return
        segment = self._lent.pop(number, None)
        if segment is None:
            raise FrameError(f"segment {number} was given back and never lent")
        if segment.size + sum(s.size for s in self._free) > KEEP or len(self._free) >= MANY:
            os.close(segment.handle)
        else:
            self._free.append(segment)

    def close(self) -> None:
        """Close all segments. Mappings of receivers stay."""
        while self._loans:
            self._loans.popitem()[1]()
        for segment in (*self._free, *self._lent.values()):
            os.close(segment.handle)
        self._free.clear()
        self._lent.clear()


def _write(handle: int, buffer: memoryview, place: int) -> None:
    while buffer.nbytes:
        count = os.pwrite(handle, buffer, place)
        buffer, place = buffer[count:], place + count


def _is_sealed(handle: int) -> bool:
    """Return True if the file behind `handle` is sealed against shrinking. Only a memfd can be."""
    try:
        return bool(fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def map_segment(handle: int, sizes: Sequence[int], released: Callable[[], None]) -> tuple[memoryview, ...]:
    """Map the segment behind `handle`, and close that. Returns the buffers; `released` is called when the last is
    freed.

    Raises `FrameError` if the segment is not sealed or is smaller than the buffers.
    """
    import torch

    places, total = offsets(list(sizes))
    try:
        if not _is_sealed(handle):
            raise FrameError("a segment could be shrunk while it is mapped")
        if os.fstat(handle).st_size < total or not total:
            raise FrameError(f"a segment holds less than {total} bytes")
        # Copy-on-write. Python's own mmap would keep a descriptor for each mapping.
        path = f"/proc/self/fd/{handle}"
        memory: Any = torch.from_file(path, shared=False, size=total, dtype=torch.uint8).numpy()
    except RuntimeError as error:
        raise FrameError(f"a segment of {total} bytes cannot be mapped: {error}") from error
    finally:
        os.close(handle)
    weakref.finalize(memory, released).atexit = False
    view = memoryview(memory)
    return tuple(view[place : place + size] for place, size in zip(places, sizes, strict=True))


BATCH = 64
"""Frames that are written with one system call at most."""

_ANCILLARY = socket.CMSG_SPACE(32 * array.array("i").itemsize)


class FrameSocket:
    """A connected, authenticated socket. Any thread may send; one thread receives.

    `wants_to_write` is called, under the connection's lock, when frames are left to be written: then `flush` is to be
    called when the socket is writable.

    Frames that are not urgent are gathered, and up to `BATCH` of them are written with one system call. They are also
    written as soon as the receiving thread is idle. Before `open` every frame waits.

    The socket is closed while no thread reads it: a thread would read on from the file that gets its number next.

    Large buffers go through shared memory on a unix socket, which `shares`. On others they are written as they are, so
    they must not be changed before they are sent, or `keep` was called.
    """

    def __init__(self, wants_to_write: Callable[[bool], None], *, shares: bool = True) -> None:
        self.socket: socket.socket
        self._wants_to_write = wants_to_write
        self._lock = threading.Lock()
        self._using = threading.Lock()
        self._waiting: deque[tuple[memoryview, int | None]] = deque()
        self._shares = shares
        self._pool = SegmentPool()
        self._parser = FrameParser(INLINE if shares else MAX_INLINE)
        self._handles: deque[int] = deque()
        self._released: deque[int] = deque()
        self._held: list[bytes] = []
        self._opened = self._closed = False
        # Frames whose stripes are on their way: what waits is not written before they have come.
        self._striped = 0

    def open(self, sock: socket.socket) -> None:
        """Use this socket from now on; `flush` sends what waits."""
        sock.setblocking(False)
        with self._lock:
            self.socket, self._opened = sock, True

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
                self._stream(kind, tag, parcel, sizes)
                return True
            else:
                self._write_segment(kind, tag, head, sizes, self._share(buffers, sum(sizes)))
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
        self._write_segment(kind, tag, head, [lent.size], segment)

    def _write_segment(self, kind: int, tag: int, head: bytes, sizes: list[int], segment: Segment) -> None:
        try:
            self._write((encode_header(kind, tag, len(head), sizes, segment.number), head), segment.handle)
        except OSError as error:
            # Nothing of it was sent, so the peer does not release it.
            self._pool.release(segment.number)
            problem = f"shared memory of {sum(sizes)} bytes cannot be sent: {error.strerror}"
            raise CallError(problem, "close files, or raise ulimit -n") from error

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

    def _stream(self, kind: int, tag: int, parcel: Parcel, sizes: list[int]) -> None:
        """Write a frame with large buffers behind what waits."""
        begin = encode_header(kind, tag, len(parcel.head), sizes) + parcel.head
        pieces = stream_of(b"".join((*self._held, begin)), parcel.buffers)
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
            shut(self.socket)
            return len(data)

    def put(self, data: bytes | memoryview, handle: int | None = None) -> int:
        """Write to the socket, with a descriptor. Returns how many bytes it took. Raises OSError."""
        if handle is not None:
            return socket.send_fds(self.socket, [data], [handle], socket.MSG_NOSIGNAL)
        return self.socket.send(data, socket.MSG_NOSIGNAL)

    def flush(self) -> None:
        """Write the frames that wait, as many as the socket takes."""
        with self._lock:
            self._write_waiting()

    def _write_waiting(self) -> None:
        while self._opened and not self._closed and not self._striped:
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
            if self._opened:
                # `close` alone does not wake a thread that polls the socket.
                shut(self.socket)
                with self._using:
                    self.socket.close()


RECORD = 1 << 14
"""Bytes of the largest record of TLS. After a smaller one there is hardly another."""

RECORDS = 64
"""Records that are read before other connections have their turn."""


class TlsFrameSocket(FrameSocket):
    """A `FrameSocket` over TLS, which takes and gives a record at a time. Only one thread at a time may use its socket.

    Large buffers go in stripes, once there are connections for them.
    """

    def __init__(self, wants_to_write: Callable[[bool], None]) -> None:
        super().__init__(wants_to_write, shares=False)
        self.stripes = Stripes(lambda: shut(self.socket))

    def _stream(self, kind: int, tag: int, parcel: Parcel, sizes: list[int]) -> None:
        """As for a connection without TLS, or in stripes."""
        number = None
        if sum(sizes) >= STRIPED:
            number = self.stripes.send(parcel.buffers, sizes, self._have_come)
            self.stripes.want(sends=True)
        if number is None:
            super()._stream(kind, tag, parcel, sizes)
        else:
            self._striped += 1
            begin = encode_header(kind, tag, len(parcel.head), sizes, number) + parcel.head
            self._waiting.append((memoryview(b"".join((*self._held, begin))), None))
            self._held.clear()

    def _have_come(self) -> None:
        """The peer has all stripes of a frame."""
        with self._lock:
            self._striped -= 1
            self._write_waiting()

    def keep(self) -> None:
        """Copy also what is left of stripes."""
        super().keep()
        self.stripes.keep()

    def _buffers(self, frame: Frame) -> tuple[memoryview, ...]:
        if frame.segment is not None:
            # Large buffers do not come in the stream any more, and need no memory there.
            self._parser.spare = SpareMemory()
            return self.stripes.take(frame.segment, frame.sizes)
        if frame.sizes and sum(frame.sizes) >= STRIPED:
            self.stripes.want(sends=False)
        if self.stripes.wanted:
            self.stripes.begin()
        return frame.inline

    def close(self) -> None:
        """Close the connections for stripes, too."""
        self.stripes.close()
        super().close()

    def put(self, data: bytes | memoryview, handle: int | None = None) -> int:
        """As for a connection without TLS; no descriptor can be sent."""
        view, sent = memoryview(data), 0
        try:
            with self._using:
                while sent < len(view):
                    sent += self.socket.send(view[sent:])
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            # What is left must be offered again as it is, which `_waiting` does.
            pass
        return sent

    def get(self, space: memoryview) -> tuple[int, bool]:
        """As for a connection without TLS: it reads several records at once."""
        count, left = 0, 0
        sock = cast(ssl.SSLSocket, self.socket)
        try:
            for _ in range(RECORDS):
                got = sock.recv_into(space[count:])
                count += got
                # A poll does not tell of what TLS has read already.
                left = sock.pending()
                if count == len(space) or (got < RECORD and not left):
                    break
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not count:
                raise BlockingIOError from None
        return count, left > 0


def frames_over(sock: socket.socket, wants_to_write: Callable[[bool], None]) -> FrameSocket:
    """The frames of a connected socket."""
    if isinstance(sock, ssl.SSLSocket):
        made: FrameSocket = TlsFrameSocket(wants_to_write)
    else:
        made = FrameSocket(wants_to_write, shares=sock.family == socket.AF_UNIX)
    made.open(sock)
    return made
