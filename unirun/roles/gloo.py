"""`GlooGroup`: one gloo group of this process, its sockets, and how to end it.

gloo has no call that ends a group (`ProcessGroup.abort` does nothing for it, torch 2.13). A rank that waits for a dead
peer, or for a survivor that has left, waits until the group's timeout of half an hour. `GlooGroup.end` ends the wait:

- for an address in the rendezvous store: the store of the group checks `ended`;
- in a collective, or for an answer of a peer: the group's sockets are shut down, once nothing is under way on them;
- for a peer that never connects: `end` connects in its place, and closes the connection.

The group's sockets are known: each rank publishes the address on which it listens, and each connection of the group has
such an address at one end. So `ProcessGroupGloo` is constructed with a store that records these addresses.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import math
import operator
import os
import resource
import socket
import struct
import sys
import sysconfig
import termios
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._C import _distributed_c10d

from unirun.errors import GroupError

SETTLE_TIMEOUT = 0.5
"""Seconds that the end of a group waits for what is under way in it."""
STALLED_BYTES_TIMEOUT = 0.05
"""Seconds after which bytes that have not moved do not count."""
SOCKETS_POLL_INTERVAL = 0.001
"""Seconds between two looks whether something is."""
FOR_EVER = 1 << 63
"""After every time in nanoseconds."""
KNOCK_TIMEOUT = 1.0
"""Seconds for a connection to this process's own listening socket."""

_ESTABLISHED = 1
_SIZE = struct.Struct("=Q")
_NUMBER = struct.Struct("=q")
_WAITING = struct.Struct("=i")
_STORAGE = 128
"""Bytes of a ``sockaddr_storage``; a sequence number follows it in gloo's form of an address."""

Address = tuple[str, int]
"""IP address and port."""


Published = tuple[Address, tuple[int, ...]]
"""The value that a rank writes into the store: the address on which it listens, and the number that each peer, in rank
order, sends first when it connects."""


def parse_published(value: bytes) -> Published:
    """The inverse of ``Rank::bytes()`` in gloo/transport/tcp/context.cc. Raises ValueError.

    ::

        size(8) hostname | size(8) sockaddr_storage(128) sequence(8) | a number for each peer, 8 bytes each
    """
    try:
        (length,) = _SIZE.unpack_from(value)
        at = _SIZE.size + min(length, len(value))
        (length,) = _SIZE.unpack_from(value, at)
        at += _SIZE.size
        storage, rest = value[at : at + _STORAGE], value[at + length :]
        if length != _STORAGE + _NUMBER.size or len(storage) < _STORAGE or len(rest) % _NUMBER.size:
            raise ValueError(f"an address of {length} bytes and {len(rest)} bytes of numbers")
        (family,) = struct.unpack_from("=H", storage)
        (port,) = struct.unpack_from(">H", storage, 2)
        ip = {socket.AF_INET: storage[4:8], socket.AF_INET6: storage[8:24]}.get(family)
        if ip is None:
            raise ValueError(f"an address of family {family}")
    except struct.error as error:
        raise ValueError(f"{len(value)} bytes are no rank of a gloo group: {error}") from error
    return (socket.inet_ntop(family, ip), port), tuple(number for (number,) in _NUMBER.iter_unpack(rest))


class GlooGroup:
    """One gloo group of this process. `name` is the one that it has in torch, where a later group may have it too; the
    group is there from `since` to `until`, in nanoseconds. `over` tells whether its generation is over."""

    def __init__(self, name: str, size: int, over: Callable[[], bool]) -> None:
        self.name, self.over = name, over
        self.since, self.until = time.time_ns(), FOR_EVER
        self.ended = self.formed = False
        self._size = size
        self._ending = threading.Lock()
        self._own: Published | None = None
        self._peers: set[Address] = set()
        self._sockets: dict[int, int] = {}
        self.store: Any = None
        """Held as long as the group, as gloo uses it for lazy connections and does not keep a reference."""

    def published(self, value: bytes) -> None:
        """Record the value that this rank writes into the store."""
        with contextlib.suppress(ValueError):
            self._own = parse_published(value)

    def found(self, value: bytes) -> None:
        """Record a value that is read from the store, perhaps this rank's own."""
        with contextlib.suppress(ValueError):
            address, _ = parse_published(value)
            self._peers.add(address)

    def complete(self) -> None:
        """The group is formed. Raises `GroupError` when it was ended meanwhile."""
        if self.ended:
            raise GroupError("the process group was ended while it was formed", "a rank was started again")
        self._sockets = self._find()
        self.formed = True

    def intact(self) -> bool:
        """Return True if as many connections as it has peers are still established, of those with which it was formed.

        There may be more: any process can connect to the address on which the group listens. While such a connection is
        open, the loss of a peer is not seen here.
        """
        kept = (_inode(number) == inode and _established(number) for number, inode in self._sockets.items())
        return not self.ended and sum(kept) >= min(len(self._sockets), self._size - 1)

    @property
    def open(self) -> bool:
        """True if this process still has a socket of it."""
        return any(_inode(number) == inode for number, inode in self._sockets.items())

    def end(self) -> None:
        """Let all waits in this group fail, in this process and in its peers. Safe to call twice."""
        with self._ending:
            first, self.ended = not self.ended, True
            if first:
                self.until = time.time_ns()
            sockets = self._find()
            if first:
                _settle(sockets)
            for number, inode in sockets.items():
                if _inode(number) == inode:
                    with contextlib.suppress(OSError), _borrowed(number) as sock:
                        # gloo closes it, then, so that the peer learns it, too. It may still answer what has arrived.
                        sock.shutdown(socket.SHUT_RD)
        if not self.formed and self._own is not None:
            address, numbers = self._own
            for number in numbers or range(self._size):
                _knock(address, number)

    def _find(self) -> dict[int, int]:
        """The open connections of the group: descriptors with their inodes, as the number of a closed one may be used
        again."""
        found = {}
        own = self._own[0] if self._own else None
        peers = self._peers - {own}
        with _borrowing:
            for number, inode in _sockets():
                local, remote = _ends(number)
                if remote is not None and (local == own or remote in peers):
                    found[number] = inode
        return found


def _settle(sockets: dict[int, int]) -> None:
    """Wait until nothing is under way on these sockets, or nothing moves, for at most `SETTLE_TIMEOUT` seconds.

    gloo (``Pair::signalException`` in gloo/transport/tcp/pair.cc) does not tell who waits for an operation that it has
    begun to write or to read when its connection ends: that wait goes on until the group's timeout.
    """
    began = since = time.monotonic()
    before: list[tuple[int, ...]] = []
    while (now := time.monotonic()) < began + SETTLE_TIMEOUT:
        found = [_under_way(n) for n, inode in sockets.items() if _inode(n) == inode]
        if found != before:
            before, since = found, now
        # What a rank has sent to one that reads no more stays where it is.
        if now >= since + (STALLED_BYTES_TIMEOUT if any(map(any, found)) else SOCKETS_POLL_INTERVAL):
            return
        time.sleep(SOCKETS_POLL_INTERVAL)


def _under_way(number: int) -> tuple[int, ...]:
    """The bytes that wait to be read, and to be acknowledged by the peer."""
    try:
        requests = (termios.FIONREAD, termios.TIOCOUTQ)
        return tuple(_WAITING.unpack(fcntl.ioctl(number, each, _WAITING.pack(0)))[0] for each in requests)
    except OSError:
        return ()


def _knock(address: Address, number: int) -> None:
    """Connect as the peer that sends `number` first, and close the connection."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(KNOCK_TIMEOUT)
        sock.connect(address)
        sock.send(_NUMBER.pack(number))


def _sockets() -> Iterator[tuple[int, int]]:
    """The descriptors of this process that are sockets, with their inodes."""
    for name in os.listdir("/proc/self/fd"):
        inode = _inode(int(name))
        if inode is not None:
            yield int(name), inode


def _inode(number: int) -> int | None:
    try:
        link = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return None
    return int(link[8:-1]) if link.startswith("socket:[") else None


_borrowing = threading.RLock()
"""Held while this process has a duplicate descriptor of a socket, and while it lists its descriptors."""


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """A duplicate of a socket that is owned by other code, which may close it meanwhile."""
    with _borrowing, socket.socket(fileno=os.dup(number)) as sock:
        yield sock


def _ends(number: int) -> tuple[Address | None, Address | None]:
    """The local and the remote address of a TCP connection; None for other descriptors."""
    try:
        with _borrowed(number) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                return None, None
            return sock.getsockname()[:2], sock.getpeername()[:2]
    except OSError:
        return None, None


def _established(number: int) -> bool:
    try:
        with _borrowed(number) as sock:
            return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
    except OSError:
        return False


# The detection of a main thread that waits for something that will not come.
#
# A wait in native code cannot be interrupted. gloo forgets an operation that has begun when the connection to a dead
# peer ends (`gloo`): a thread that waits for it waits until the timeout of the group.

STACK_SAMPLE_INTERVAL = 0.1
"""Seconds between two looks at the main thread."""
STUCK_TIMEOUT = 1.0
"""Seconds after which a wait is stuck."""
RELEVANCE_CHECK_INTERVAL = 5.0
"""Seconds after which it is asked again whether a wait still matters."""

WORKER_IDLE_TIMEOUT = 30.0
"""Seconds without work after which a worker in a call that was given up is killed."""
BUSY = 0.02
"""Least processor time of a working worker, as a fraction of `WORKER_IDLE_TIMEOUT`."""

_OWN = f"{Path(__file__).parent}/process_groups.py"
_TORCH = tuple(
    f"{Path(torch.__file__).parent}/distributed/{n}.py" for n in ("distributed_c10d", "rendezvous")
)
_PYTHON = f"{sysconfig.get_path('stdlib')}/"
_native: Any = _distributed_c10d


def in_group(frame: FrameType) -> object:
    """The call in which the main thread waits for a process group or its store; None if it is in none."""
    if frame.f_code.co_filename not in (_OWN, *_TORCH):
        return None
    return _call(frame)


def blocked(frame: FrameType) -> object:
    """The call in which the main thread may be blocked, with the processor time that it has used so far: that stays the
    same while it is. None in the waits of Python's own library, as these can be interrupted."""
    file = frame.f_code.co_filename
    if file.startswith(_PYTHON) and "site-packages" not in file:
        return None
    clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
    return _call(frame), time.clock_gettime(clock)


def _call(frame: FrameType) -> tuple[int, int]:
    while frame.f_back is not None and frame.f_code.co_filename == _OWN:
        # Each slice of a wait in a store has a frame of its own.
        frame = frame.f_back
    return id(frame), frame.f_lasti


def forgotten(groups: Collection[GlooGroup]) -> bool:
    """Return True if a collective in one of these groups is not over. They have ended, so it should have failed.

    torch's flight recorder knows the collectives of each group, those of DDP and of functional collectives included,
    but no `send` and no `recv`. With ``TORCH_FR_BUFFER_SIZE=0`` it knows none.
    """
    found = json.loads(_native._dump_fr_trace_json()).get("entries", ())
    return any(
        entry["process_group"][0] == group.name and group.since <= entry["time_created_ns"] <= group.until
        for entry in found
        if not entry["retired"]
        for group in groups
    )


class Unchanged:
    """Tells when what is sampled has stayed the same for more than `seconds`. `same` compares two samples; None is not
    the same as anything."""

    def __init__(self, seconds: float, same: Callable[[Any, Any], bool] = operator.eq) -> None:
        self._seconds, self._same = seconds, same
        self._first: Any = None
        self._since = 0.0

    def lasts(self, sample: Any, now: float) -> bool:
        """Take a sample, at the time `now` in seconds."""
        if sample is None or self._first is None or not self._same(self._first, sample):
            self._first, self._since = sample, now
            return False
        return now - self._since > self._seconds


def stillness() -> Unchanged:
    """Tells when a thread has been in one call for `STUCK_TIMEOUT` seconds. A sample is that call; None if it is in
    none that counts."""
    return Unchanged(STUCK_TIMEOUT)


def idleness() -> Unchanged:
    """Tells when a process has used almost no processor time for `WORKER_IDLE_TIMEOUT` seconds. A sample is the time
    that it has used so far."""
    return Unchanged(WORKER_IDLE_TIMEOUT, lambda before, now: now - before <= BUSY * WORKER_IDLE_TIMEOUT)


def processor_time() -> float:
    """Seconds of processor time that this process and its descendants have used, without the calling thread and
    those of TensorPipe, of which one may poll."""
    import psutil  # slow, and it reads variables when it is imported

    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = time.process_time() - time.thread_time() - _of_tensorpipe() + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            used += times.user + times.system
    return used


def _of_tensorpipe() -> float:
    """Seconds of processor time that the threads of torch.distributed.rpc's transport have used."""
    ticks = 0
    for thread in Path("/proc/self/task").iterdir():
        # It may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            _, _, rest = (thread / "stat").read_text().partition(" (TP_")
            if rest:
                fields = rest.rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def wait_until_idle(relevant: Callable[[], bool], counts: Callable[[], bool]) -> str | None:
    """Watch this process as long as `relevant` returns True. Returns the stack of the main thread when it has been idle
    for `WORKER_IDLE_TIMEOUT` seconds, of which only those are counted in which `counts` returns True."""
    idle = idleness()
    while relevant():
        if not counts():
            idle = idleness()
        elif idle.lasts(processor_time(), time.monotonic()):
            frame = _main_frame()
            return "".join(traceback.format_stack(frame)) if relevant() else None
        time.sleep(WORKER_IDLE_TIMEOUT / 30)
    return None


def wait_until_stuck(relevant: Callable[[], bool], call_of: Callable[[FrameType], object]) -> str | None:
    """Watch the main thread as long as `relevant` returns True, which is asked now and then. Returns the stack of the
    thread when it is stuck in what `call_of` returns for its innermost Python frame."""
    still, asked = stillness(), -math.inf
    while True:
        now = time.monotonic()
        stack = _stack_if_still(still, call_of, now)
        if stack is not None or now >= asked + RELEVANCE_CHECK_INTERVAL:
            if not relevant():
                return None
            if stack is not None:
                return stack
            asked = now
        time.sleep(STACK_SAMPLE_INTERVAL)


def _stack_if_still(still: Unchanged, call_of: Callable[[FrameType], object], now: float) -> str | None:
    # The frame is not kept: with it, what the main thread has dropped meanwhile would stay.
    frame = _main_frame()
    stuck = still.lasts(call_of(frame) if frame is not None else None, now)
    return "".join(traceback.format_stack(frame)) if stuck else None


def _main_frame() -> FrameType | None:
    """The innermost Python frame of the main thread.

    CPython 3.11 holds the lock of its list of threads while it makes the frames. A garbage collection that this starts
    may free a tensor, which gives up the GIL. A thread that starts or ends then waits for the lock with the GIL, and
    the process stands still (python/cpython#106883). So none may start.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(threading.main_thread().ident or 0)
    finally:
        if collects:
            gc.enable()
