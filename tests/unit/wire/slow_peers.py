"""Clients that trickle, stall, never read, and half-close."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections import deque

from tests.unit.wire.endpoints import NODE, Endpoint, encoded
from unirun.errors import WireError
from unirun.wire.address import TcpAddress, unix_address
from unirun.wire.credentials import server_name
from unirun.wire.handshake import HELLO_SIZE, PROOF_SIZE, Handshake
from unirun.wire.reports import Message


class SlowClient:
    """A connection to `endpoint`, which proves the token and sends messages as slowly as the test says. One that is not
    `honest` does not know the token."""

    def __init__(self, endpoint: Endpoint, *, honest: bool = True) -> None:
        self.socket = socket.socket(
            socket.AF_INET if isinstance(endpoint.address, TcpAddress) else socket.AF_UNIX
        )
        if isinstance(endpoint.address, TcpAddress):
            self.socket.connect((endpoint.address.addr, endpoint.address.port))
        else:
            with unix_address(endpoint.path) as path:
                self.socket.connect(path)
        self.socket.setblocking(False)
        context = endpoint.credentials.client_context() if endpoint.tcp else None
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None
        if context is not None:
            self._tls = context.wrap_bio(self._in, self._out, server_hostname=server_name(NODE))
        self._handshake = Handshake(endpoint.token)
        self.honest = honest
        self._encrypted = self._tls is None
        self._read = bytearray()
        self._unsent = bytearray()
        self._sent = 0
        self._marks: deque[tuple[int, Message]] = deque()
        self._answered_at: int | None = None
        self.closed = self.half_closed = self.ended = self.let_in = False

    @property
    def proved(self) -> bool:
        """True if all of its answer, and a right one, was sent."""
        return self.honest and self._answered_at is not None and self._sent >= self._answered_at

    def whole(self) -> list[Message]:
        """The messages that were sent to their ends."""
        return [message for at, message in self._marks if self._sent >= at]

    def write(self, message: Message) -> None:
        """One more message is to be sent, once the token is proved."""
        if self._answered_at is not None:
            self._put(encoded(message))
            self._marks.append((self._sent + len(self._unsent), message))

    def trickle(self, size: int) -> None:
        """Send so many bytes of what is to be sent."""
        if self.closed or self.half_closed:
            return
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sent = self.socket.send(self._unsent[:size])
            del self._unsent[:sent]
            self._sent += sent

    def listen(self) -> None:
        """Read all that has come, and prepare the answer to it."""
        if self.closed:
            return
        data = b""
        with contextlib.suppress(BlockingIOError):
            try:
                while part := self.socket.recv(1 << 20):
                    data += part
                self.ended = True
            except ConnectionError:
                self.ended = True
        self._in.write(data)
        if self._tls is not None:
            with contextlib.suppress(ssl.SSLError):
                if not self._encrypted:
                    try:
                        self._tls.do_handshake()
                        self._encrypted = True
                    except ssl.SSLWantReadError:
                        pass
                while self._encrypted and (part := self._tls.read(1 << 16)):
                    self._read += part
            self._unsent += self._out.read()
        else:
            self._read += self._in.read()
        if self._answered_at is None and len(self._read) >= HELLO_SIZE:
            answer = self._handshake.answer(bytes(self._read[:HELLO_SIZE]))
            self._put(answer if self.honest else bytes(len(answer)))
            self._answered_at = self._sent + len(self._unsent)
        if not self.let_in and len(self._read) >= HELLO_SIZE + PROOF_SIZE:
            with contextlib.suppress(WireError):
                self._handshake.check(bytes(self._read[HELLO_SIZE : HELLO_SIZE + PROOF_SIZE]))
                self.let_in = True

    def _put(self, data: bytes) -> None:
        if self._tls is not None:
            self._tls.write(data)
            data = self._out.read()
        self._unsent += data

    def half_close(self) -> None:
        """Say that nothing more comes; go on reading."""
        if not self.closed:
            self.half_closed = True
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Be gone."""
        self.closed = True
        self.socket.close()
