"""Listening sockets that are bound once and held.

A port that is probed, freed and bound again can be lost to another process in between. An agent binds one socket per
role when it starts and keeps it for the life of the job: the rendezvous store of each generation listens on that
socket, so the role's address never changes.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from types import MappingProxyType

from unirun.errors import RendezvousError
from unirun.spec.job import JobSpec
from unirun.values import Value
from unirun.wire.sockets import BACKLOG

BIND_TIMEOUT = 30.0
"""Seconds in which the agents must have bound their endpoints; looking up an address may take that long."""

SELF_CONNECT_TIMEOUT = 5.0
"""Seconds in which a host must reach itself."""

GENERATION_KEY = "unirun/generation"
"""Key of the generation that a rendezvous store serves: all generations of a role have the same address."""


class Endpoint(Value, gc=True):
    """A held listening socket and the address by which workers reach it."""

    socket: socket.socket
    addr: str
    port: int

    def __str__(self) -> str:
        return f"{self.addr}:{self.port}"

    def close(self) -> None:
        """Close the socket and free its port."""
        self.socket.close()


def hold_endpoint(addr: str, port: int = 0, given: socket.socket | None = None) -> Endpoint:
    """Bind `addr`:`port` (0: any free port) and listen, on the socket `given` if its family fits. Raises
    `RendezvousError`."""
    try:
        family = socket.getaddrinfo(addr, None)[0][0]
    except OSError as error:
        raise RendezvousError(f"{addr!r} is no address of this host: {error}", "see --master-addr") from error
    try:
        sock = given if given is not None and given.family == family else socket.socket(family)
    except OSError as error:
        problem = f"no socket can be opened for a store: {error.strerror}".lower()
        remedy = "each role has one on each node; raise the limit: ulimit -n NUMBER"
        raise RendezvousError(problem, remedy if error.errno == errno.EMFILE else "") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((addr, port))
        sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        # A number above 65535 is an OverflowError.
        problem = getattr(error, "strerror", None) or "there is no such port"
        raise RendezvousError(
            f"{addr}:{port} cannot be listened on: {problem.lower()}",
            "leave out --master-port to get a free one" if port else "see --master-addr",
        ) from error
    return Endpoint(sock, addr, sock.getsockname()[1])


def _check_reachable(addr: str) -> None:
    """Connect to `addr` of this host, which goes through the loopback interface. Where that is down, torch would try
    for half an hour. Raises `RendezvousError`."""
    endpoint = hold_endpoint(addr)
    try:
        socket.create_connection((endpoint.addr, endpoint.port), SELF_CONNECT_TIMEOUT).close()
    except OSError as error:
        raise RendezvousError(
            f"{addr} cannot be reached from this host, which has it: {error.strerror or error}".lower(),
            "is the loopback interface down? ip link set lo up",
        ) from error
    finally:
        endpoint.close()


def hold_endpoints(
    spec: JobSpec, addr: str, port: int, given: Mapping[str, socket.socket] = MappingProxyType({})
) -> dict[str, Endpoint]:
    """Bind one listening socket per role with a rendezvous store at `addr`, where it is `given` that one; that of the
    first role gets `port`, unless it is 0. Raises `RendezvousError` when the port is taken, or this host cannot connect
    to its own address."""
    held: dict[str, Endpoint] = {}
    try:
        roles = [role for role in spec.roles if not role.is_program]
        if roles:
            _check_reachable(addr)
        for role in roles:
            held[role.name] = hold_endpoint(addr, 0 if held else port, given.get(role.name))
    except RendezvousError:
        for endpoint in held.values():
            endpoint.close()
        raise
    return held
