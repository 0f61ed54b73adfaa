"""Calls over authenticated sockets: unix sockets in the job's directory, which reach every worker of this host.

`unirun.roles.transport.loop` reads; the thread that calls or answers writes by itself. Both ends prove the token before
a byte of a request is parsed.
"""

from __future__ import annotations

import itertools
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from unirun.errors import AuthError, ChannelError, FrameError
from unirun.roles.transport.connection import Connection
from unirun.roles.transport.frames import REPLY, REQUEST
from unirun.roles.transport.loop import Loop, RequestInbox, SpinningPoll
from unirun.roles.transport.protocol import Channel, Handler, Inbox, Parcel, Wait
from unirun.values import WorkerId
from unirun.wire.address import unix_address
from unirun.wire.handshake import (
    ANSWER_SIZE,
    DEADLINE,
    HELLO_SIZE,
    PROOF_SIZE,
    ClientHandshake,
    ServerHandshake,
    Token,
)
from unirun.wire.sockets import listen

BUSY = 4
"""Open calls on a connection from which on its frames are not urgent."""


class SocketTransport:
    """One per process. `folder`, of mode 0700, has the unix sockets of the job's workers."""

    name = "socket"

    def __init__(self, folder: Path, token: Token) -> None:
        self._folder, self._token = folder, token
        self._loop = Loop()
        self._inbox = RequestInbox(self._loop)

    def inbox(self) -> Inbox:
        """A queue whose `get` reads requests while it waits."""
        return self._inbox

    def serve(self, me: WorkerId, handler: Handler) -> str:
        """Listen. The endpoint is the path of the socket."""
        path = self._folder / f"{me.role}.{me.rank}.{me.incarnation}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._loop.add(self._inbox)
        self._loop.add(_Listener(listen(path), self._token, handler, self._loop, self._inbox))
        return str(path)

    def connect(self, peer: WorkerId, endpoint: str, broken: Callable[[str], None]) -> Channel:
        """Connect. The handshake goes on in the background; requests wait for it."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            with unix_address(endpoint) as address:
                sock.connect(address)
            return _Channel(sock, self._token, self._loop, broken)
        except OSError as error:
            sock.close()
            raise ChannelError(f"{peer} cannot be reached: {error}") from error

    def close(self) -> None:
        """End the thread and every connection."""
        self._loop.close()
        self._inbox.close()


class _Listener:
    def __init__(
        self, sock: socket.socket, token: Token, handler: Handler, loop: Loop, inbox: RequestInbox
    ) -> None:
        sock.setblocking(False)
        self.number, self._socket = sock.fileno(), sock
        self._token, self._handler, self._loop, self._inbox = token, handler, loop, inbox

    def ready(self, events: int) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError:
            # The peer has gone, or no descriptor is left. The next one is accepted when epoll reports it.
            return
        threading.Thread(target=self._admit, args=(sock,), name="unirun-handshake", daemon=True).start()

    def _admit(self, sock: socket.socket) -> None:
        """Let a peer prove the token, for at most `DEADLINE` seconds, and take its requests then."""
        handshake, answer, end = ServerHandshake(self._token), b"", time.monotonic() + DEADLINE
        try:
            sock.settimeout(DEADLINE)
            sock.send(handshake.hello())
            while len(answer) < ANSWER_SIZE:
                sock.settimeout(max(end - time.monotonic(), 0.001))
                data = sock.recv(ANSWER_SIZE - len(answer))
                if not data:
                    raise EOFError("the peer closed the connection")
                answer += data
            sock.send(handshake.proof(answer))
            self._inbox.add(_Served(sock, self._handler, self._inbox))
        except (OSError, EOFError, AuthError, ChannelError):
            # It did not prove the token in time, or this process serves no longer.
            sock.close()

    def close(self) -> None:
        self._loop.remove(self)
        self._socket.close()


class _Served:
    """The serving end of a connection."""

    def __init__(self, sock: socket.socket, handler: Handler, inbox: RequestInbox) -> None:
        self.number, self._handler, self._inbox = sock.fileno(), handler, inbox
        self._connection = Connection(sock, partial(inbox.writable, self))
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


class _Channel:
    """The calling end of a connection. Requests wait until both ends have proved the token."""

    def __init__(self, sock: socket.socket, token: Token, loop: Loop, broken: Callable[[str], None]) -> None:
        self.number, self._loop, self._broken = sock.fileno(), loop, broken
        self._socket, self._heard = sock, b""
        self._handshake: ClientHandshake | None = ClientHandshake(token)
        self._connection = Connection(sock, partial(loop.writable, self), opened=False)
        self._tags = itertools.count()
        self._pending: dict[int, Callable[[Parcel], None]] = {}
        self._reading = threading.Lock()
        poll = select.poll()
        poll.register(self.number, select.POLLIN)
        self._poll = SpinningPoll(lambda seconds: poll.poll(None if seconds is None else seconds * 1000))
        self._open = self._polled = True
        loop.add(self)

    def call(
        self, parcel: Parcel, done: Callable[[Parcel], None], patience: float | None = None
    ) -> Wait | None:
        tag = next(self._tags)
        # A worker that is busy does not need this request at once, unless the caller waits for it.
        urgent = patience is not None or len(self._pending) < BUSY
        self._pending[tag] = done
        self._connection.send(REQUEST, tag, parcel, urgent=urgent)
        if patience is not None:
            return partial(self._wait, tag, patience)
        self._poll_in_loop()
        return None

    def _greet(self, handshake: ClientHandshake) -> None:
        """Go on with the handshake. Raises AuthError, OSError or EOFError."""
        # The peer sends its proof after our answer, so no frame can be behind these bytes.
        wanted = HELLO_SIZE + PROOF_SIZE
        data = self._socket.recv(wanted - len(self._heard))
        if not data:
            raise EOFError("the peer closed the connection")
        before, self._heard = len(self._heard), self._heard + data
        if before < HELLO_SIZE <= len(self._heard):
            self._socket.send(handshake.answer(self._heard[:HELLO_SIZE]), socket.MSG_NOSIGNAL)
        if len(self._heard) == wanted:
            handshake.check(self._heard[HELLO_SIZE:])
            self._handshake = None
            self._connection.open()

    def _wait(self, tag: int, patience: float) -> None:
        """Read in this thread until the answer is there, which saves waking another thread.

        One thread at a time reads. It also takes the answers of others, who wait for it, or for the loop after it.
        """
        if not self._reading.acquire(blocking=False):
            return
        deadline = time.monotonic() + patience
        try:
            if self._polled:
                self._polled = False
                self._loop.readable(self, False)
            while self._open and tag in self._pending and (left := deadline - time.monotonic()) > 0:
                if self._poll(left):
                    self._take()
        finally:
            self._reading.release()
            if self._pending:
                self._poll_in_loop()

    def _poll_in_loop(self) -> None:
        """Let the loop's thread read what no thread waits for. A channel that has no open calls is not read."""
        if not self._polled:
            self._polled = True
            self._loop.readable(self, True)

    def ready(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._connection.flush()
        # A thread in `_wait` reads everything that comes; epoll reports what is left after it.
        if events & ~select.EPOLLOUT and self._reading.acquire(blocking=False):
            try:
                self._take()
            finally:
                self._reading.release()

    def _take(self) -> None:
        try:
            if self._handshake is not None:
                self._greet(self._handshake)
                return
            for frame, parcel in self._connection.receive():
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
        self._open = False
        self._loop.remove(self)
        self._connection.close()
        self._pending.clear()
