"""The connections that a role's callers make while a block runs, so that a test can cut them."""

from __future__ import annotations

import contextlib
import os
import socket

from tests.contract.cluster import Role


def open_sockets() -> dict[int, str]:
    """The sockets of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                found[int(name)] = link
    return found


class CuttableConnections:
    """The connections to a role that are made while the block runs. They can be cut then; both ends live on."""

    def __init__(self, role: Role) -> None:
        self._cast = role
        self._links: dict[int, str] = {}

    def __enter__(self) -> CuttableConnections:
        self._before = open_sockets()
        return self

    def __exit__(self, *_: object) -> None:
        self._links = {n: link for n, link in open_sockets().items() if self._before.get(n) != link}

    def cut(self) -> None:
        """Break them."""
        for worker in self._cast:
            worker.break_connections()
        for number, link in self._links.items():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as sock:
                # The number may belong to a new connection by now.
                if os.readlink(f"/proc/self/fd/{sock.fileno()}") == link:
                    sock.shutdown(socket.SHUT_RDWR)
