"""Ending the connections of a group whose members have changed.

A gloo collective notices that a neighbour has died, but not that a peer further away has: it waits for data of a
survivor that has given up already, until the group's timeout of half an hour. ``ProcessGroup.abort`` does not
wake it (torch 2.13). So the sockets that a group opens are noted when it is formed, and shut down when a role in
it is restarted: what waits in the group then fails at once, in every member.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

_ESTABLISHED = 1


@dataclass
class Connections:
    """The connections of one group: descriptors with their inodes, as a number alone may be used again."""

    sockets: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)

    @classmethod
    def from_now(cls) -> Connections:
        """None yet; `note` finds those that are opened from now on."""
        return cls(before=_sockets())

    def note(self) -> None:
        """Note the TCP connections that are open now and were not when this was made."""
        for number, inode in _sockets().items():
            if self.before.get(number) != inode and _established(number):
                self.sockets[number] = inode

    def intact(self) -> bool:
        """Whether all of them still stand."""
        return all(_inode(n) == inode and _established(n) for n, inode in self.sockets.items())

    def sever(self) -> None:
        """Shut all of them down; both ends see it at once."""
        for number, inode in self.sockets.items():
            if _inode(number) == inode:
                with contextlib.suppress(OSError), _borrowed(number) as sock:
                    sock.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, int]:
    pairs = ((int(name), _inode(int(name))) for name in os.listdir("/proc/self/fd"))
    return {number: inode for number, inode in pairs if inode is not None}


def _inode(number: int) -> int | None:
    try:
        link = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return None
    return int(link[8:-1]) if link.startswith("socket:[") else None


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    sock = socket.socket(fileno=os.dup(number))
    try:
        yield sock
    finally:
        sock.close()


def _established(number: int) -> bool:
    try:
        with _borrowed(number) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                return False
            return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
    except OSError:
        return False
