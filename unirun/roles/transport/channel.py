"""`SocketConnection`: the calling end of a connection of the socket transport."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import cast

from unirun.errors import AuthError, FrameError
from unirun.roles.transport.connection import FrameSocket
from unirun.roles.transport.frames import REPLY, REQUEST
from unirun.roles.transport.loop import Loop, SpinningPoll
from unirun.roles.transport.protocol import Parcel, Wait
from unirun.wire.address import TcpAddress
from unirun.wire.credentials import Credentials, server_name
from unirun.wire.handshake import HELLO_SIZE, PROOF_SIZE, ClientHandshake, Token
from unirun.wire.sockets import keep_alive, not_the_node

BUSY = 4
"""Open calls on a connection from which on its frames are not urgent."""


class SocketConnection:
    """The calling end of a connection. Requests wait until both ends have proved the token."""

    def __init__(
        self,
        sock: socket.socket,
        token: Token,
        loop: Loop,
        broken: Callable[[str], None],
        kind: type[FrameSocket] = FrameSocket,
    ) -> None:
        self.number, self._loop, self._broken = sock.fileno(), loop, broken
        self._heard = b""
        self._handshake: ClientHandshake | None = ClientHandshake(token)
        self._socket = kind(sock, self._wants_to_write, opened=False)
        self._tags = itertools.count()
        self._pending: dict[int, Callable[[Parcel], None]] = {}
        self._reading, self._turning = threading.Lock(), threading.Lock()
        poll = select.poll()
        poll.register(self.number, select.POLLIN)
        self._poll = SpinningPoll(lambda seconds: poll.poll(None if seconds is None else seconds * 1000))
        self._open = self._polled = True
        loop.add(self)

    def call(
        self, parcel: Parcel, done: Callable[[Parcel], None], patience: float | None = None
    ) -> Wait | None:
        """Send a request, as `Connection` says; the calling thread reads the answer itself while it waits."""
        tag = next(self._tags)
        # A worker that is busy does not need this request at once, unless the caller waits for it.
        urgent = patience is not None or len(self._pending) < BUSY
        self._pending[tag] = done
        self._socket.send(REQUEST, tag, parcel, urgent=urgent)
        if patience is not None:
            return partial(self._wait, tag, patience)
        self._poll_in_loop(True)
        return None

    def _wants_to_write(self, wanted: bool) -> None:
        self._loop.writable(self, wanted)

    def keep(self) -> None:
        """Copy what is not written yet."""
        self._socket.keep()

    def _greet(self, handshake: ClientHandshake) -> None:
        """Go on with the handshake. Raises AuthError, OSError or EOFError."""
        # The peer sends its proof after our answer, so no frame can be behind these bytes.
        wanted = HELLO_SIZE + PROOF_SIZE
        data = self._socket.begin(wanted - len(self._heard))
        if not data:
            raise EOFError("the peer closed the connection")
        before, self._heard = len(self._heard), self._heard + data
        if before < HELLO_SIZE <= len(self._heard):
            self._socket.put(handshake.answer(self._heard[:HELLO_SIZE]))
        if len(self._heard) == wanted:
            handshake.check(self._heard[HELLO_SIZE:])
            self._handshake = None
            self._socket.open()

    def _wait(self, tag: int, patience: float) -> None:
        """Read in this thread until the answer is there, which saves waking another thread.

        One thread at a time reads. It also takes the answers of others, who wait for it, or for the loop after it.
        """
        if not self._reading.acquire(blocking=False):
            return
        deadline = time.monotonic() + patience
        try:
            self._poll_in_loop(False)
            while self._open and tag in self._pending and (left := deadline - time.monotonic()) > 0:
                if self._poll(left):
                    self._take()
        finally:
            self._reading.release()
            if self._pending:
                self._poll_in_loop(True)

    def _poll_in_loop(self, wanted: bool) -> None:
        """Let the loop's thread read what no thread waits for. A connection that has no open calls is not read."""
        with self._turning:
            if self._polled is not wanted:
                self._polled = wanted
                self._loop.readable(self, wanted)

    def ready(self, events: int) -> None:
        """Called in the loop's thread: write what waits, and read, unless another thread does."""
        if events & select.EPOLLOUT:
            self._socket.flush()
        # A thread in `_wait` reads everything that comes; epoll reports what is left after it.
        if events & ~select.EPOLLOUT and self._reading.acquire(blocking=False):
            try:
                self._take()
            finally:
                self._reading.release()
                if self._pending:
                    # The event may be one of before `_wait`, and a caller that came meanwhile has left reading to us.
                    self._poll_in_loop(True)

    def _take(self) -> None:
        try:
            if self._handshake is not None:
                self._greet(self._handshake)
                return
            for frame, parcel in self._socket.receive():
                done = self._pending.pop(frame.tag, None)
                if frame.kind != REPLY or done is None:
                    raise FrameError("a worker sent an answer that nobody has asked for")
                done(parcel)
        except BlockingIOError:
            return
        except (OSError, EOFError, FrameError, AuthError) as error:
            was_open = self._open
            self.close()
            if was_open:
                self._broken(str(error))

    def close(self) -> None:
        """Close the connection; no callback is called any more."""
        self._open = False
        self._loop.remove(self)
        self._socket.close()
        self._pending.clear()


# Connections of the socket transport to other hosts, over TLS. Imported in jobs of several hosts only.

SYN_RETRIES = 3
"""Attempts of the kernel to open a connection before it fails, after 15 s."""

RECORD = 1 << 14
"""Bytes of the largest record of TLS. After a smaller one there is hardly another."""

RECORDS = 64
"""Records that are read before other connections have their turn."""


class TlsFrameSocket(FrameSocket):
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


class RemoteConnection(SocketConnection):
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
        kind = FrameSocket if self._tls is None else TlsFrameSocket
        super().__init__(sock, credentials.token, loop, broken, kind)
        self._wants_to_write(False)

    def _wants_to_write(self, wanted: bool) -> None:
        # A socket that connects becomes writable then.
        super()._wants_to_write(wanted or not self._established)

    def ready(self, events: int) -> None:
        """As for a connection on this host; whatever has happened, the handshakes go on."""
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
        sock = self._socket.socket
        if number := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(number, os.strerror(number))
        try:
            sock.getpeername()
        except OSError as error:
            raise BlockingIOError from error
        if not self._established:
            self._established = True
            self._wants_to_write(False)
        if isinstance(self._socket, TlsFrameSocket) and self._tls is not None:
            self._socket.shake_hands(self._tls, server_name(self._address.node))
        self._connected = True


def connect(
    address: TcpAddress, credentials: Credentials, loop: Loop, broken: Callable[[str], None]
) -> RemoteConnection:
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
        return RemoteConnection(sock, address, credentials, loop, broken)
    except BaseException:
        sock.close()
        raise
