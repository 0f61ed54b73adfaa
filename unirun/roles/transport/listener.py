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
from unirun.wire.handshake import ANSWER_SIZE, DEADLINE, LOOK, Refusals, ServerHandshake, Strangers
from unirun.wire.sockets import handshake_error, keep_alive

AGAIN = 0.1
"""Seconds until a listener that is out of descriptors accepts again."""


class Listener:
    """Accepts connections on `sock` in a thread. Those that prove the token within `DEADLINE` are served; `Strangers`
    says which of them may begin to, each in a thread of its own. `known` says whether an address is one of the job's
    hosts."""

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials,
        handler: Handler,
        inbox: RequestInbox,
        refused: Callable[[str, int], None],
        known: Callable[[str], bool] = lambda origin: False,
    ) -> None:
        self._socket, self._token = sock, credentials.token
        self._handler, self._inbox = handler, inbox
        self._kind: type[Connection] = Connection
        self._tls = credentials.server_context() if sock.family != socket.AF_UNIX else None
        if self._tls is not None:
            from unirun.roles.transport.channel import TlsConnection

            self._kind = TlsConnection
        self._refusals = Refusals(refused)
        self._strangers: Strangers[_Stranger] = Strangers(known, time.monotonic())
        self._looked = time.monotonic()
        self._changing = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept_all, name="unirun-accept", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and end the connections that have not proved the token."""
        with self._changing:
            self._closed = True
            strangers = list(self._strangers)
        for each in strangers:
            _shut(each.sock)
        _shut(self._socket)
        self._socket.close()

    def _accept_all(self) -> None:
        while not self._closed:
            try:
                self._socket.settimeout(LOOK if self._strangers.waiting else None)
                sock, place = self._socket.accept()
            except TimeoutError:
                self._go_on()
                continue
            except ConnectionError:
                # The peer has gone already.
                continue
            except OSError as error:
                if not self._closed:
                    # Out of descriptors or memory: connections wait in the listener's queue.
                    self._refusals.add(error)
                    time.sleep(AGAIN)
                continue
            came = _Stranger(sock, place[0] if place else "")
            with self._changing:
                out = self._strangers.arrives(came, came.origin, time.monotonic())
            if out is not None:
                self._refuse(out, WireError("too many connections of its kind wait"))
            self._go_on()
        for each in list(self._strangers):
            if not each.entering:
                each.sock.close()

    def _go_on(self) -> None:
        """Begin the handshakes of connections whose turn it is, and end those that have to make room."""
        with self._changing:
            now, out, begin = time.monotonic(), [], []
            if now >= self._looked + LOOK:
                self._looked, out = now, self._strangers.overdue(now)
            while not self._closed and (begins := self._strangers.next(now)) is not None:
                begins.entering = True
                begin.append(begins)
        for each in out:
            if each.entering:
                # Its thread sees that the socket has ended, and counts the refusal.
                _shut(each.sock)
            else:
                self._refuse(each, WireError("it has waited for its turn too long"))
        for each in begin:
            try:
                threading.Thread(
                    target=partial(self._admit, each), name="unirun-handshake", daemon=True
                ).start()
            except RuntimeError as error:
                # No more threads can be started.
                self._refuse(each, error)

    def _admit(self, stranger: _Stranger) -> None:
        """Let a peer prove the token, and take its requests then."""
        handshake, answer, end = ServerHandshake(self._token), b"", time.monotonic() + DEADLINE
        try:
            sock = stranger.sock
            sock.settimeout(DEADLINE)
            if sock.family != socket.AF_UNIX:
                keep_alive(sock)
            if self._tls is not None:
                tls = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                stranger.sock = sock = tls
                tls.do_handshake()
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
            self._refuse(stranger, handshake_error(error))
        except (WireError, ChannelError) as error:
            # A wrong proof, or this process serves no longer.
            self._refuse(stranger, error)
        except BaseException:
            self._refuse(stranger, WireError("it could not be let in"))
            raise
        else:
            self._forget(stranger, proved=True)
        finally:
            self._go_on()

    def _forget(self, stranger: _Stranger, *, proved: bool = False) -> None:
        with self._changing:
            self._strangers.ends(stranger, proved=proved)

    def _refuse(self, stranger: _Stranger, error: Exception) -> None:
        stranger.sock.close()
        if not self._closed:
            self._refusals.add(error, stranger.origin)
        self._forget(stranger)


class _Stranger:
    """A connection that has not proved the token; `entering`: a thread is in the handshake with it."""

    def __init__(self, sock: socket.socket, origin: str) -> None:
        self.sock, self.origin, self.entering = sock, origin, False


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
