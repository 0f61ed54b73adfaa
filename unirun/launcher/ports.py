"""The ports of ranks: an agent chooses them, and no other agent of this host chooses the same ones.

A port cannot be held for a program, which binds it itself. So it is taken from a range in which no client gets ports,
and each agent shows which it has given away: it holds a socket with the name ``unirun-port-N`` in Linux's abstract
namespace of unix sockets. There is one such namespace for each network namespace, as for ports, and a name is free
again as soon as its process has ended.
"""

from __future__ import annotations

import errno
import random
import socket

from unirun.errors import RendezvousError
from unirun.values import Place


class PortBook:
    """The ports that one agent has given to ranks on this host."""

    def __init__(self, host: str, low: int, high: int) -> None:
        """Give away ports from `low` to `high`, of programs that listen at `host`."""
        self._host, self._low, self._high = host, low, high
        self._held: dict[int, socket.socket] = {}
        self._places: dict[tuple[str, int], Place] = {}
        # Jobs that begin at the same moment look at different ports first.
        self._next = random.randint(low, high)

    def place(self, role: str, rank: int, count: int) -> Place:
        """The place of a rank with `count` ports, the same each time. Raises `RendezvousError` when none is free."""
        found = self._places.get((role, rank))
        if found is None or len(found.ports) != count:
            found = self._places[role, rank] = Place(self._host, tuple(self._choose() for _ in range(count)))
        return found

    def release_taken(self, role: str, rank: int) -> bool:
        """Forget the ports of a rank that has ended if a process listens on one of them. Returns whether it does.

        That port stays out of use here.
        """
        place = self._places.get((role, rank))
        if place is None or all(map(is_free, place.ports)):
            return False
        del self._places[role, rank]
        for port in filter(is_free, place.ports):
            self._held.pop(port).close()
        return True

    def _choose(self) -> int:
        size = self._high - self._low + 1
        for _ in range(size):
            port, self._next = self._next, self._low + (self._next + 1 - self._low) % size
            if port not in self._held and (name := _claimed(port)) is not None:
                if is_free(port):
                    self._held[port] = name
                    return port
                name.close()
        raise RendezvousError(
            f"no port from {self._low} to {self._high} is free on this host", "widen port_range: 20000-29999"
        )

    def close(self) -> None:
        """Give all ports back."""
        for name in self._held.values():
            name.close()
        self._held.clear()


def _claimed(port: int) -> socket.socket | None:
    """A socket with the name of `port`; None when another process has it."""
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0unirun-port-{port}")
    except OSError:
        name.close()
        return None
    return name


def is_free(port: int) -> bool:
    """Return True if no process of this host listens on `port`, at whatever address."""
    for family, anywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family) as probe:
                # Connections that have ended do not count.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((anywhere, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
    return True
