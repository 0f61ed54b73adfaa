"""Unix and TCP sockets: to listen, to end, to read the bytes of a handshake; and the meaning of their errors."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from unirun.errors import AuthError, ConnectionLost, RendezvousError, UsageError, WireError
from unirun.wire.address import Address, TcpAddress, unix_address

if TYPE_CHECKING:
    import ssl

BACKLOG = 4096
"""Connections that may wait to be accepted."""

IDLE, INTERVAL, PROBES = 10, 3, 4
"""The kernel asks a peer that has been silent for `IDLE` seconds, each `INTERVAL` seconds, and gives it up when it has
not answered `PROBES` times."""


CONNECT_RETRY_INTERVAL = 0.005
"""Seconds until a unix listener whose queue is full is asked again."""


def listen(path: str | Path) -> socket.socket:
    """A listening unix socket at `path`, mode 0600 (its directory is 0700 before it exists)."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        with unix_address(path) as address:
            sock.bind(address)
        Path(path).chmod(0o600)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def listen_tcp(addr: str, port: int = 0) -> socket.socket:
    """A listening socket at the numeric address `addr` of this host, and no other address; port 0: any that is free.

    Raises `UsageError` for a name and for an address that stands for all, `RendezvousError` when it cannot be bound.
    """
    import ipaddress

    try:
        parsed = ipaddress.ip_address(addr)
    except ValueError as error:
        raise UsageError(f"{addr!r} is no numeric address", "name one of this host's") from error
    if parsed.is_unspecified or (parsed.version == 6 and parsed.ipv4_mapped is not None):
        raise UsageError(f"{addr} is not one address of a host", "name one of this host's")
    sock = socket.socket(family_of(addr))
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((addr, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        raise RendezvousError(
            f"this host cannot listen at {addr}, port {port}: {error.strerror}",
            "choose another port" if taken else "is it an address of this host?",
        ) from error
    return sock


def family_of(addr: str) -> socket.AddressFamily:
    """The family of a numeric address."""
    return socket.AF_INET6 if ":" in addr else socket.AF_INET


def tcp_address(listener: socket.socket, node: str) -> TcpAddress:
    """The address at which others find `listener`, which listens on `node`."""
    addr, port = listener.getsockname()[:2]
    return TcpAddress(addr, port, node)


def keep_alive(sock: socket.socket) -> None:
    """Send small frames at once, and notice a peer that is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)


def shut(sock: socket.socket) -> None:
    """End a stream in both directions, which wakes a thread that uses it."""
    with contextlib.suppress(OSError):
        # Not the method of a TLS socket: after that it would write and read without TLS.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    """The next `size` bytes of a handshake, until `deadline` on the monotonic clock. Raises `WireError`."""
    data = b""
    while len(data) < size:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            part = sock.recv(size - len(data))
        except OSError as error:
            raise handshake_error(error) from error
        if not part:
            raise handshake_error(EOFError())
        data += part
    return data


def nobody_answers(address: Address, error: OSError | str) -> RendezvousError:
    """The error that nobody listens at `address`."""
    return RendezvousError(f"nobody answers at {address}: {error}", "has the job ended?")


def not_the_node(address: Address, error: ssl.SSLError) -> WireError:
    """The error for a listener at `address` that is not the expected node of this job; another `WireError` when it has
    only closed the connection, which does not tell its node."""
    import ssl

    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return handshake_error(error)
    return AuthError(
        f"what listens at {address} is not node {address.host} of this job: {_in_words(error)}",
        "does something else use the port?",
    )


def handshake_error(error: Exception) -> WireError:
    """The error that a handshake has ended with `error`: a timeout, one of TLS, or the end of the stream."""
    import ssl

    if isinstance(error, TimeoutError):
        return WireError("the peer did not finish the handshake in time")
    closed = isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
    if isinstance(error, ssl.SSLError) and not closed:
        return AuthError(f"TLS failed: {_in_words(error)}", "the peer may belong to another job")
    return ConnectionLost("the peer closed the stream during the handshake", "is the token right?")


def _in_words(error: ssl.SSLError) -> str:
    reason = getattr(error, "verify_message", None) or (error.reason or str(error)).lower().replace("_", " ")
    return str(reason)
