"""The serving end of the socket transport: a listener lets peers in that prove the token, and takes their requests."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from unirun.errors import ChannelError, FrameError, WireError
from unirun.roles.transport.channel import BUSY
from unirun.roles.transport.connection import Connection
from unirun.roles.transport.frames import REPLY, REQUEST
from unirun.roles.transport.loop import RequestInbox
from unirun.roles.transport.protocol import Handler, Parcel
from unirun.wire.credentials import Credentials
from unirun.wire.handshake import ANSWER_SIZE, DEADLINE, ServerHandshake
from unirun.wire.refusals import Refusals
from unirun.wire.sockets import handshake_error, keep_alive

STRANGERS = 64
"""Connections that may be without proof of the token. Each has a thread."""

GRACE = 1.0
"""Seconds that each of these has at least, before it makes room for another."""

AGAIN = 0.1
"""Seconds until a listener that is out of descriptors accepts again."""


class Listener:
    """Accepts connections on `sock` in a thread. Those that prove the token within `DEADLINE` are served."""

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials,
        handler: Handler,
        inbox: RequestInbox,
        refused: Callable[[str, int], None],
    ) -> None:
        self._socket, self._token = sock, credentials.token
        self._handler, self._inbox = handler, inbox
        self._kind: type[Connection] = Connection
        self._tls = credentials.server_context() if sock.family != socket.AF_UNIX else None
        if self._tls is not None:
            from unirun.roles.transport.tls import TlsConnection

            self._kind = TlsConnection
        self._refusals = Refusals(refused)
        self._strangers: dict[socket.socket, float] = {}
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._accept_all, name="unirun-accept", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and end the connections that have not proved the token."""
        self._closed = True
        with self._changed:
            strangers = list(self._strangers)
            self._changed.notify_all()
        for sock in (self._socket, *strangers):
            _shut(sock)
        self._socket.close()

    def _accept_all(self) -> None:
        while self._make_room():
            try:
                sock, origin = self._socket.accept()
            except ConnectionError:
                # The peer has gone already.
                continue
            except OSError as error:
                if self._closed:
                    return
                # Out of descriptors or memory: connections wait in the listener's queue.
                self._refusals.add(error)
                time.sleep(AGAIN)
                continue
            whence = origin[0] if origin else ""
            try:
                sock.settimeout(DEADLINE)
                if sock.family != socket.AF_UNIX:
                    keep_alive(sock)
                if self._tls is not None:
                    sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                with self._changed:
                    self._strangers[sock] = time.monotonic()
                admit = partial(self._admit, sock, whence)
                threading.Thread(target=admit, name="unirun-handshake", daemon=True).start()
            except (OSError, RuntimeError) as error:
                # The peer has gone, or there can be no more threads.
                self._refuse(sock, error, whence)

    def _make_room(self) -> bool:
        """Wait until another connection can be accepted. False when the listener is closed."""
        with self._changed:
            while len(self._strangers) >= STRANGERS and not self._closed:
                oldest, since = next(iter(self._strangers.items()))
                if (left := since + GRACE - time.monotonic()) > 0:
                    self._changed.wait(left)
                    continue
                del self._strangers[oldest]
                # Its thread sees the end of it, and tells of that.
                _shut(oldest)
        return not self._closed

    def _admit(self, sock: socket.socket, origin: str) -> None:
        """Let a peer prove the token, and take its requests then."""
        handshake, answer, end = ServerHandshake(self._token), b"", time.monotonic() + DEADLINE
        try:
            if self._tls is not None:
                sock.do_handshake()  # type: ignore[attr-defined]
            sock.send(handshake.hello())
            while len(answer) < ANSWER_SIZE:
                sock.settimeout(max(end - time.monotonic(), 0.001))
                data = sock.recv(ANSWER_SIZE - len(answer))
                if not data:
                    raise EOFError
                answer += data
            sock.send(handshake.proof(answer))
            self._inbox.add(_Served(self._kind, sock, self._handler, self._inbox))
        except (OSError, EOFError) as error:
            self._refuse(sock, handshake_error(error), origin)
        except (WireError, ChannelError) as error:
            # A wrong proof, or this process serves no longer.
            self._refuse(sock, error, origin)
        else:
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        with self._changed:
            self._strangers.pop(sock, None)
            self._changed.notify_all()

    def _refuse(self, sock: socket.socket, error: Exception, origin: str) -> None:
        self._forget(sock)
        sock.close()
        if not self._closed:
            self._refusals.add(error, origin)


def _shut(sock: socket.socket) -> None:
    """End a socket that another thread uses, which wakes that."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _Served:
    """The serving end of a connection."""

    def __init__(
        self, kind: type[Connection], sock: socket.socket, handler: Handler, inbox: RequestInbox
    ) -> None:
        self.number, self._handler, self._inbox = sock.fileno(), handler, inbox
        self._connection = kind(sock, partial(inbox.writable, self))
        self._received = self._replied = 0

    def ready(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._connection.flush()
        try:
            for frame, parcel in self._connection.receive():
                if frame.kind != REQUEST:
                    raise FrameError("a caller sent an answer")
                self._received += 1
                self._handler(parcel, partial(self._reply, frame.tag))
        except (OSError, EOFError, FrameError):
            self.close()

    def _reply(self, tag: int, parcel: Parcel) -> None:
        self._replied += 1
        # Answers are gathered while more requests wait here. If the next one takes long, the reading thread sends them.
        self._connection.send(REPLY, tag, parcel, urgent=self._received - self._replied < BUSY)

    def close(self) -> None:
        self._inbox.remove(self)
        self._connection.close()
