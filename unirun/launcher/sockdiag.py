"""The sockets that listen on a port, as the kernel tells them over netlink (sock_diag(7)).

``/proc/net/tcp`` has all connections, also those that ended in the last minute; a busy host has tens of thousands. The
kernel is asked for those that listen only.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, _DONE, _ERROR = 20, 0x301, 3, 2
_LISTEN = 10
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48s")
_ANSWER = struct.Struct("=BBxx2s46x4x4x4x4xI")
"""Of ``inet_diag_msg``: family, state, the port (big-endian) and the inode."""

ROOM = 1 << 16
"""Bytes that are read at a time."""


def listeners_on(port: int) -> set[str]:
    """The inodes of the sockets of this network namespace that listen on `port`, at whatever address."""
    try:
        return {
            inode
            for family in (socket.AF_INET, socket.AF_INET6)
            for at, inode in _asked(family)
            if at == port
        }
    except OSError:
        # In some sandboxes there is no netlink.
        return _read(port)


def _asked(family: int) -> Iterator[tuple[int, str]]:
    """Port and inode of each listening socket. Raises OSError."""
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 1 << _LISTEN, bytes(48))
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as link:
        link.settimeout(1.0)
        head = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0)
        link.send(head + body)
        while True:
            data = link.recv(ROOM)
            at = 0
            while at < len(data):
                length, kind, *_ = _HEADER.unpack_from(data, at)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    raise OSError("the kernel does not answer sock_diag")
                _, state, port, inode = _ANSWER.unpack_from(data, at + _HEADER.size)
                if state == _LISTEN:
                    yield int.from_bytes(port, "big"), str(inode)
                at += (length + 3) & ~3


def _read(port: int) -> set[str]:
    """The same from ``/proc``."""
    wanted, found = f":{port:04X}", set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/net", name).read_text().splitlines():
                if wanted in line:
                    fields = line.split()
                    if fields[1].endswith(wanted) and int(fields[3], 16) == _LISTEN:
                        found.add(fields[9])
    return found
