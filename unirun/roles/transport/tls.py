"""Connections of the socket transport to other hosts, over TLS. Imported in jobs of several hosts only."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
from collections.abc import Callable
from typing import cast

from unirun.roles.transport.channel import SocketChannel
from unirun.roles.transport.connection import Connection
from unirun.roles.transport.loop import Loop
from unirun.wire.address import TcpAddress
from unirun.wire.credentials import Credentials, server_name
from unirun.wire.handshake import ClientHandshake
from unirun.wire.sockets import keep_alive, not_the_node

SYN_RETRIES = 3
"""Attempts of the kernel to open a connection before it fails, after 15 s."""

RECORD = 1 << 14
"""Bytes of the largest record of TLS. After a smaller one there is hardly another."""

RECORDS = 64
"""Records that are read before other connections have their turn."""


class TlsConnection(Connection):
    """Over a TLS socket, which takes and gives a record at a time. Only one thread at a time may use that."""

    def shake_hands(self, context: ssl.SSLContext, peer: str) -> None:
        """Go on with the handshake of a client. Raises OSError, as a socket that does not wait."""
        with self._using:
            if not isinstance(self.socket, ssl.SSLSocket):
                self.socket = context.wrap_socket(
                    self.socket, server_hostname=peer, do_handshake_on_connect=False
                )
            self.socket.do_handshake()

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


class RemoteChannel(SocketChannel):
    """The calling end of a connection to another host. The loop's thread connects and does the handshakes; requests
    wait for them."""

    def __init__(
        self,
        sock: socket.socket,
        address: TcpAddress,
        credentials: Credentials,
        loop: Loop,
        broken: Callable[[str], None],
    ) -> None:
        self._address, self._tls = address, credentials.client_context()
        self._established = self._connected = False
        kind = Connection if self._tls is None else TlsConnection
        super().__init__(sock, credentials.token, loop, broken, kind)
        self._wants_to_write(False)

    def _wants_to_write(self, wanted: bool) -> None:
        # A socket that connects becomes writable then.
        super()._wants_to_write(wanted or not self._established)

    def ready(self, events: int) -> None:
        """As for a channel on this host; whatever has happened, the handshakes go on."""
        super().ready(events | select.EPOLLIN if self._handshake is not None else events)

    def _wait(self, tag: int, patience: float) -> None:
        if self._handshake is None:
            super()._wait(tag, patience)

    def _greet(self, handshake: ClientHandshake) -> None:
        try:
            if not self._connected:
                self._connect()
            super()._greet(handshake)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLEOFError as error:
            raise EOFError("the peer closed the connection") from error
        except ssl.SSLError as error:
            raise not_the_node(self._address, error) from error

    def _connect(self) -> None:
        """Go on with connecting and the handshake of TLS. Raises OSError: BlockingIOError when it takes longer."""
        sock = self._connection.socket
        if number := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(number, os.strerror(number))
        try:
            sock.getpeername()
        except OSError as error:
            raise BlockingIOError from error
        if not self._established:
            self._established = True
            self._wants_to_write(False)
        if isinstance(self._connection, TlsConnection) and self._tls is not None:
            self._connection.shake_hands(self._tls, server_name(self._address.node))
        self._connected = True


def connect(
    address: TcpAddress, credentials: Credentials, loop: Loop, broken: Callable[[str], None]
) -> RemoteChannel:
    """Begin to connect to a worker on another host. Raises OSError, `JobError`."""
    family, _, _, _, place = socket.getaddrinfo(
        address.addr, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        keep_alive(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, SYN_RETRIES)
        with contextlib.suppress(BlockingIOError):
            sock.connect(place)
        return RemoteChannel(sock, address, credentials, loop, broken)
    except BaseException:
        sock.close()
        raise
