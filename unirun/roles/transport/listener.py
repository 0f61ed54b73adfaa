"""The serving end of the socket transport: a listener lets peers in that prove the token, and takes their requests."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec import to_builtins

from unirun.errors import ChannelError, FrameError, UnirunError, WireError
from unirun.roles.transport.channel import BUSY, SocketConnection
from unirun.roles.transport.connection import FrameSocket
from unirun.roles.transport.frames import REPLY, REQUEST
from unirun.roles.transport.loop import Loop, RequestInbox
from unirun.roles.transport.protocol import Connection, Handler, Inbox, Parcel
from unirun.values import Value, WorkerId
from unirun.wire.address import TcpAddress, unix_address
from unirun.wire.credentials import Credentials
from unirun.wire.frames import from_json
from unirun.wire.handshake import (
    ACCEPT_RETRY_INTERVAL,
    ANSWER_SIZE,
    HANDSHAKE_TIMEOUT,
    OVERDUE_POLL_INTERVAL,
    Refusals,
    ServerHandshake,
    Strangers,
)
from unirun.wire.sockets import handshake_error, keep_alive, listen, listen_tcp, tcp_address


class Listener:
    """Accepts connections on `sock` in a thread. Those that prove the token within `HANDSHAKE_TIMEOUT` are served;
    `Strangers` says which of them may begin to, each in a thread of its own. `known` says whether an address is one of
    the job's hosts."""

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
        self._kind: type[FrameSocket] = FrameSocket
        self._tls = credentials.server_context() if sock.family != socket.AF_UNIX else None
        if self._tls is not None:
            from unirun.roles.transport.channel import TlsFrameSocket

            self._kind = TlsFrameSocket
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
                self._socket.settimeout(OVERDUE_POLL_INTERVAL if self._strangers.waiting else None)
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
                    time.sleep(ACCEPT_RETRY_INTERVAL)
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
            if now >= self._looked + OVERDUE_POLL_INTERVAL:
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
        handshake, answer, end = ServerHandshake(self._token), b"", time.monotonic() + HANDSHAKE_TIMEOUT
        try:
            sock = stranger.sock
            sock.settimeout(HANDSHAKE_TIMEOUT)
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
        self, kind: type[FrameSocket], sock: socket.socket, handler: Handler, inbox: RequestInbox
    ) -> None:
        self.number, self._handler, self._inbox = sock.fileno(), handler, inbox
        self._socket = kind(sock, partial(inbox.writable, self))
        self._received = self._replied = 0

    def ready(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._socket.flush()
        try:
            for frame, parcel in self._socket.receive():
                if frame.kind != REQUEST:
                    raise FrameError("a caller sent an answer")
                self._received += 1
                self._handler(parcel, partial(self._reply, frame.tag))
        except (OSError, EOFError, FrameError):
            self.close()

    def _reply(self, tag: int, parcel: Parcel) -> None:
        self._replied += 1
        # Answers are gathered while more requests wait here. If the next one takes long, the reading thread sends them.
        self._socket.send(REPLY, tag, parcel, urgent=self._received - self._replied < BUSY)

    def close(self) -> None:
        self._inbox.remove(self)
        self._socket.close()


# Calls over authenticated sockets: unix sockets in the job's directory, and between hosts TCP with TLS.
#
# `unirun.roles.transport.loop` reads; the thread that calls or answers writes by itself. Both ends prove the token
# before a byte of a request is parsed.


class CallAddress(Value):
    """The address of a worker for calls: a unix socket for processes on its node, and `tcp` for those on others."""

    path: str
    tcp: TcpAddress | None = None

    def __str__(self) -> str:
        return self.path if self.tcp is None else json.dumps(to_builtins(self))

    @classmethod
    def parse(cls, text: str) -> CallAddress:
        """From its text: a path, or JSON. Raises `FrameError`."""
        return from_json(cls, text) if text.startswith("{") else cls(text)


class SocketTransport:
    """One per process. `folder`, of mode 0700, has the unix sockets of the job's workers on this node. With `addr`, an
    address of this host, workers on other hosts can call. `refused` gets a text for connections that were refused, and
    their number; `known` says whether an address is one of the job's hosts."""

    name = "socket"

    def __init__(
        self,
        folder: Path,
        credentials: Credentials,
        addr: str = "",
        refused: Callable[[str, int], None] = lambda text, count: None,
        known: Callable[[str], bool] = lambda origin: False,
    ) -> None:
        self._folder, self._credentials, self._addr = folder, credentials, addr
        self._refused, self._known = refused, known
        self._loop = Loop()
        self._inbox = RequestInbox(self._loop)
        self._listeners: list[Listener] = []

    def inbox(self) -> Inbox:
        """A queue whose `get` reads requests while it waits."""
        return self._inbox

    def serve(self, me: WorkerId, handler: Handler) -> str:
        """Listen. The endpoint is the text of an `CallAddress`."""
        path = self._folder / f"{me.role}.{me.rank}.{me.incarnation}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._loop.add(self._inbox)
        sockets, tcp = [listen(path)], None
        if self._addr:
            sockets.append(listen_tcp(self._addr))
            tcp = tcp_address(sockets[-1], self._credentials.node)
        for sock in sockets:
            listener = Listener(sock, self._credentials, handler, self._inbox, self._refused, self._known)
            self._listeners.append(listener)
        return str(CallAddress(str(path), tcp))

    def connect(self, peer: WorkerId, endpoint: str, broken: Callable[[str], None]) -> Connection:
        """Connect. The handshake goes on in the background; requests wait for it."""
        try:
            there = CallAddress.parse(endpoint)
            if there.tcp is None or self.is_here(endpoint):
                return self._connect_here(there.path, broken)
            from unirun.roles.transport.channel import connect

            return connect(there.tcp, self._credentials, self._loop, broken)
        except (OSError, UnirunError) as error:
            raise ChannelError(f"{peer} cannot be reached: {error}") from error

    def is_here(self, endpoint: str) -> bool:
        """Return True if `endpoint` is on this host, so that memory can be shared with it. Raises `FrameError`."""
        tcp = CallAddress.parse(endpoint).tcp
        return tcp is None or tcp.node == self._credentials.node

    def _connect_here(self, path: str, broken: Callable[[str], None]) -> Connection:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            with unix_address(path) as address:
                sock.connect(address)
            return SocketConnection(sock, self._credentials.token, self._loop, broken)
        except OSError:
            sock.close()
            raise

    def close(self) -> None:
        """End the threads and every connection."""
        for listener in self._listeners:
            listener.close()
        self._loop.close()
        self._inbox.close()
