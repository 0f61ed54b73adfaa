"""One pair of hosts: the time of a round trip, and the bandwidth of one TCP connection each way."""

from __future__ import annotations

import hmac
import socket
import threading
import time
from statistics import median

from unirun.errors import AuthError, RendezvousError

WITHIN = 10.0
"""Seconds for each step."""

CONNECT = 3.0
"""Seconds to connect: two lost packets."""

SENDING = 0.3
"""Seconds of sending for the bandwidth."""

_ROUND_TRIPS, _ROUND_TRIPS_FOR = 100, 0.2
_CHUNK = bytes(1 << 18)
_ECHO, _SINK, _SOURCE, _END = b"e", b"s", b"f", b"x"


def listen(address: str, nonce: bytes) -> int:
    """Serve one peer that proves `nonce`, in a thread. Returns the port. Raises `RendezvousError`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError as error:
        raise RendezvousError(f"{address} cannot be listened on: {error.strerror}".lower()) from error
    server.settimeout(WITHIN)
    threading.Thread(target=_serve, args=(server, nonce), daemon=True).start()
    return int(server.getsockname()[1])


def _serve(server: socket.socket, nonce: bytes) -> None:
    """Serve connections until one says that it is the last. Errors are the peer's to tell."""
    deadline = time.monotonic() + WITHIN
    with server:
        while time.monotonic() < deadline:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                try:
                    if _serve_one(connection, nonce):
                        return
                except (OSError, AuthError, RendezvousError):
                    continue


def _serve_one(connection: socket.socket, nonce: bytes) -> bool:
    """Serve one connection; whether it is the last."""
    connection.settimeout(WITHIN)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not hmac.compare_digest(_exactly(connection, len(nonce)), nonce):
        raise AuthError("a peer without the nonce")
    kind = _exactly(connection, 1)
    if kind == _ECHO:
        while data := connection.recv(1):
            connection.sendall(data)
    elif kind == _SINK:
        count, seconds = _drain(connection)
        connection.sendall(f"{count} {seconds}".encode())
    elif kind == _SOURCE:
        _fill(connection)
    return kind == _END


def measure(address: str, port: int, nonce: bytes, *, bandwidth: bool) -> tuple[float, float, float]:
    """Seconds of a round trip, and bytes per second sent and received, which are 0 without `bandwidth`. Raises OSError,
    `RendezvousError`."""
    with _open(address, port, nonce, _ECHO) as connection:
        rtt = _round_trip(connection)
    sent = received = 0.0
    if bandwidth:
        with _open(address, port, nonce, _SINK) as connection:
            _fill(connection)
            count, _, seconds = _all(connection).partition(b" ")
            sent = int(count) / float(seconds)
        with _open(address, port, nonce, _SOURCE) as connection:
            taken, took = _drain(connection)
            received = taken / took
    _open(address, port, nonce, _END).close()
    return rtt, sent, received


def _open(address: str, port: int, nonce: bytes, kind: bytes) -> socket.socket:
    connection = socket.create_connection((address, port), CONNECT)
    connection.settimeout(WITHIN)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(nonce + kind)
    return connection


def _round_trip(connection: socket.socket) -> float:
    """The median time, after the first ones, which wait for the other's thread to start."""
    times: list[float] = []
    until = time.perf_counter() + _ROUND_TRIPS_FOR
    while len(times) < _ROUND_TRIPS and (len(times) < 5 or time.perf_counter() < until):
        began = time.perf_counter()
        connection.sendall(b".")
        _exactly(connection, 1)
        times.append(time.perf_counter() - began)
    return median(times[2:])


def _fill(connection: socket.socket) -> None:
    """Send for `SENDING` seconds, and say that this was all."""
    until = time.monotonic() + SENDING
    while time.monotonic() < until:
        connection.sendall(_CHUNK)
    connection.shutdown(socket.SHUT_WR)


def _drain(connection: socket.socket) -> tuple[int, float]:
    """Bytes until the peer has sent all, and the seconds that they took."""
    buffer = bytearray(1 << 20)
    count, began = 0, time.perf_counter()
    while got := connection.recv_into(buffer):
        count += got
    return count, time.perf_counter() - began


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise RendezvousError("the peer closed the connection")
        data += more
    return data


def _all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(64), b""))
