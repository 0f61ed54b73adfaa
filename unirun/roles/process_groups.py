"""The process groups of this process: how the default one was made, the sockets of gloo groups, and how to end them.

gloo has no call that ends a group (`ProcessGroup.abort` does nothing for it, torch 2.13). A rank that waits for a dead
peer, or for a survivor that has left, waits until the group's timeout of half an hour. `GlooGroup.end` ends the wait:

- for an address in the rendezvous store: the store of the group checks `ended`;
- in a collective, or for an answer of a peer: the group's sockets are shut down, once nothing is under way on them;
- for a peer that never connects: `end` connects in its place, and closes the connection.

The group's sockets are known exactly: each rank publishes the address on which it listens, and every connection of the
group has such an address at one end. So `ProcessGroupGloo` is constructed with a store that records these addresses.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

from unirun.errors import GroupError

dist: Any = torch.distributed
c10d: Any = distributed_c10d
"""torch's modules of process groups; much that is used of them has no types."""

SHORTEST, LONGEST = 0.001, 0.1
"""Seconds between two looks whether another rank's address is in the store: they grow from one to the other."""
SETTLE = 0.5
"""Seconds that the end of a group waits for what is under way in it."""
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


@dataclass(frozen=True, slots=True)
class Published:
    """The value that a rank writes into the store: the address on which it listens, and the number that each peer, in
    rank order, sends first when it connects."""

    address: Address
    numbers: tuple[int, ...]


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
    return Published(
        (socket.inet_ntop(family, ip), port), tuple(number for (number,) in _NUMBER.iter_unpack(rest))
    )


class GlooGroup:
    """One gloo group of this process. `over` tells whether its generation is over."""

    def __init__(self, size: int, over: Callable[[], bool]) -> None:
        self.over = over
        self.ended = self.formed = False
        self._size = size
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
            self._peers.add(parse_published(value).address)

    def complete(self) -> None:
        """The group is formed. Raises `GroupError` when it was ended meanwhile."""
        if self.ended:
            raise GroupError("the process group was ended while it was formed", "a rank was started again")
        self._sockets = self._find()
        self.formed = True

    def intact(self) -> bool:
        """Whether all connections with which it was formed are still established."""
        return not self.ended and all(
            _inode(number) == inode and _established(number) for number, inode in self._sockets.items()
        )

    @property
    def open(self) -> bool:
        """Whether this process still has a socket of it."""
        return any(_inode(number) == inode for number, inode in self._sockets.items())

    def end(self) -> None:
        """Let all waits in this group fail, in this process and in its peers. Safe to call twice."""
        self.ended = True
        sockets = self._find()
        _settle(sockets)
        for number, inode in sockets.items():
            if _inode(number) == inode:
                with contextlib.suppress(OSError), _borrowed(number) as sock:
                    # gloo closes it, then, so that the peer learns it, too. It may still answer what has arrived.
                    sock.shutdown(socket.SHUT_RD)
        if not self.formed and self._own is not None:
            for number in self._own.numbers or range(self._size):
                _knock(self._own.address, number)

    def _find(self) -> dict[int, int]:
        """The open connections of the group: descriptors with their inodes, as the number of a closed one may be used
        again."""
        found = {}
        own = self._own.address if self._own else None
        peers = self._peers - {own}
        with _borrowing:
            for number, inode in _sockets():
                local, remote = _ends(number)
                if remote is not None and (local == own or remote in peers):
                    found[number] = inode
        return found


@dataclass(frozen=True, slots=True)
class DefaultGroup:
    """The arguments with which the user's code made the default process group."""

    backend: str
    timeout: timedelta
    device_id: Any


class ProcessGroups:
    """Watches the process groups that this process makes; holds the gloo groups that are being formed or are open."""

    def __init__(self) -> None:
        self.begin: Callable[[Any], Callable[[], bool]] = lambda store: lambda: False
        """Called with the store of a new group of any backend. Returns a function that tells whether the group's
        generation is over."""
        self.default: DefaultGroup | None = None
        """The arguments of the latest default group; None if there was none."""
        self._groups: list[GlooGroup] = []
        self._lock = threading.Lock()
        self._mine = threading.local()

    @contextlib.contextmanager
    def forming(self, over: Callable[[], bool]) -> Iterator[list[GlooGroup]]:
        """Groups that this thread makes in the block end when `over` returns True. Yields the list of those that were
        formed."""
        made: list[GlooGroup] = []
        before, self._mine.block = self._block, (over, made)
        try:
            yield made
        finally:
            self._mine.block = before

    @property
    def _block(self) -> tuple[Callable[[], bool], list[GlooGroup]] | None:
        return getattr(self._mine, "block", None)

    def end_outdated(self) -> None:
        """End the groups whose generation is over. May be called from any thread."""
        with self._lock:
            groups = list(self._groups)
        for group in groups:
            if not group.ended and group.over():
                group.end()

    def end_all(self) -> None:
        """End and forget every group."""
        with self._lock:
            groups, self._groups = self._groups, []
        for group in groups:
            group.end()

    def meeting(self, store: Any) -> contextlib.AbstractContextManager[Any]:
        """A context in which torch makes a group with `store`."""
        return contextlib.nullcontext() if self._block else self.forming(self.begin(store))

    @contextlib.contextmanager
    def building(self, store: Any, size: int) -> Iterator[Any]:
        """A context for the constructor of a gloo group; yields the store to be given to it. Raises `GroupError` if
        the group was ended meanwhile."""
        block = self._block
        if block is None:
            # Not made by torch.distributed; its owner manages it.
            yield store
            return
        over, made = block
        group = GlooGroup(size, over)
        with self._lock:
            self._groups = [each for each in self._groups if each.open or not each.formed]
            self._groups.append(group)
        try:
            # A view may have come before the group was in the list.
            self.end_outdated()
            group.store = _watched_store(store, group)
            yield group.store
            group.complete()
        except BaseException:
            with self._lock:
                self._groups = [each for each in self._groups if each is not group]
            raise
        made.append(group)


_known: ProcessGroups | None = None


def process_groups() -> ProcessGroups:
    """The groups that this process makes after the first call of this function.

    torch has no hook for this, so two functions are wrapped: the one with which `torch.distributed` makes any group,
    and the constructor of gloo groups.
    """
    global _known
    if _known is None:
        _known = ProcessGroups()
        c10d._new_process_group_helper = _wrapped_helper(_known, c10d._new_process_group_helper)
        kind = c10d.ProcessGroupGloo
        kind.__init__ = _wrapped_constructor(_known, kind.__init__)
    return _known


def end_outdated() -> None:
    """End the known groups whose generation is over."""
    if _known is not None:
        _known.end_outdated()


def _wrapped_helper(groups: ProcessGroups, helper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(helper)
    def make(size: int, rank: int, ranks: Any, backend: Any, store: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group_desc") == "default_pg":
            groups.default = DefaultGroup(str(backend), kwargs["timeout"], kwargs.get("device_id"))
        with groups.meeting(store):
            return helper(size, rank, ranks, backend, store, *args, **kwargs)

    return make


def _wrapped_constructor(groups: ProcessGroups, construct: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(construct)
    def __init__(self: Any, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
        with groups.building(store, size) as watched:
            construct(self, watched, rank, size, *args, **kwargs)

    return __init__


def _watched_store(store: Any, group: GlooGroup) -> Any:
    """A store over `store` that records the addresses of the ranks, and whose waits fail when the group is ended."""

    class Watched(dist.Store):  # type: ignore[misc]
        def set(self, key: str, value: Any) -> None:
            group.published(value.encode() if isinstance(value, str) else value)
            store.set(key, value)

        def get(self, key: str) -> bytes:
            self.wait([key])
            return self._found(store.get(key))

        def multi_get(self, keys: list[str]) -> list[bytes]:
            self.wait(keys)
            return [self._found(value) for value in store.multi_get(keys)]

        def _found(self, value: bytes) -> bytes:
            group.found(value)
            return value

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            # `store.wait` cannot be ended, and with a short timeout it warns of each.
            patience = timeout or store.timeout
            deadline = time.monotonic() + patience.total_seconds()
            pause = SHORTEST
            while True:
                if group.ended:
                    raise GroupError(
                        "the process group was ended while it was formed", "a rank was started again"
                    )
                if store.check(keys):
                    return
                if time.monotonic() >= deadline:
                    raise dist.DistStoreError(f"{', '.join(keys)} not there after {patience}")
                time.sleep(pause)
                pause = min(pause * 1.25, LONGEST)

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def multi_set(self, keys: list[str], values: list[bytes]) -> None:
            for value in values:
                group.published(value)
            store.multi_set(keys, values)

        check, add, append, has_extended_api = store.check, store.add, store.append, store.has_extended_api
        compare_set, delete_key, num_keys = store.compare_set, store.delete_key, store.num_keys

    return Watched()


def _settle(sockets: dict[int, int]) -> None:
    """Wait until nothing is under way on these sockets, for at most `SETTLE` seconds.

    gloo (``Pair::signalException`` in gloo/transport/tcp/pair.cc) does not tell who waits for an operation that it has
    begun to write or to read when its connection ends: that wait goes on until the group's timeout.
    """
    deadline, still = time.monotonic() + SETTLE, 0
    while still < 2 and time.monotonic() < deadline:
        still = 0 if any(_inode(n) == inode and _under_way(n) for n, inode in sockets.items()) else still + 1
        time.sleep(SHORTEST)


def _under_way(number: int) -> bool:
    """Whether bytes wait to be read, or to be acknowledged by the peer."""
    try:
        return any(
            _WAITING.unpack(fcntl.ioctl(number, request, _WAITING.pack(0))) != (0,)
            for request in (termios.FIONREAD, termios.TIOCOUTQ)
        )
    except OSError:
        return False


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
