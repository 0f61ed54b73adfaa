"""`SocketChannel`: the calling end of a connection of the socket transport."""

from __future__ import annotations

import itertools
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from unirun.errors import AuthError, FrameError
from unirun.roles.transport.connection import Connection
from unirun.roles.transport.frames import REPLY, REQUEST
from unirun.roles.transport.loop import Loop, SpinningPoll
from unirun.roles.transport.protocol import Parcel, Wait
from unirun.wire.handshake import HELLO_SIZE, PROOF_SIZE, ClientHandshake, Token

BUSY = 4
"""Open calls on a connection from which on its frames are not urgent."""


class SocketChannel:
    """The calling end of a connection. Requests wait until both ends have proved the token."""

    def __init__(
        self,
        sock: socket.socket,
        token: Token,
        loop: Loop,
        broken: Callable[[str], None],
        kind: type[Connection] = Connection,
    ) -> None:
        self.number, self._loop, self._broken = sock.fileno(), loop, broken
        self._heard = b""
        self._handshake: ClientHandshake | None = ClientHandshake(token)
        self._connection = kind(sock, self._wants_to_write, opened=False)
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
        """Send a request, as `Channel` says; the calling thread reads the answer itself while it waits."""
        tag = next(self._tags)
        # A worker that is busy does not need this request at once, unless the caller waits for it.
        urgent = patience is not None or len(self._pending) < BUSY
        self._pending[tag] = done
        self._connection.send(REQUEST, tag, parcel, urgent=urgent)
        if patience is not None:
            return partial(self._wait, tag, patience)
        self._poll_in_loop(True)
        return None

    def _wants_to_write(self, wanted: bool) -> None:
        self._loop.writable(self, wanted)

    def keep(self) -> None:
        """Copy what is not written yet."""
        self._connection.keep()

    def _greet(self, handshake: ClientHandshake) -> None:
        """Go on with the handshake. Raises AuthError, OSError or EOFError."""
        # The peer sends its proof after our answer, so no frame can be behind these bytes.
        wanted = HELLO_SIZE + PROOF_SIZE
        data = self._connection.begin(wanted - len(self._heard))
        if not data:
            raise EOFError("the peer closed the connection")
        before, self._heard = len(self._heard), self._heard + data
        if before < HELLO_SIZE <= len(self._heard):
            self._connection.put(handshake.answer(self._heard[:HELLO_SIZE]))
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
            self._poll_in_loop(False)
            while self._open and tag in self._pending and (left := deadline - time.monotonic()) > 0:
                if self._poll(left):
                    self._take()
        finally:
            self._reading.release()
            if self._pending:
                self._poll_in_loop(True)

    def _poll_in_loop(self, wanted: bool) -> None:
        """Let the loop's thread read what no thread waits for. A channel that has no open calls is not read."""
        with self._turning:
            if self._polled is not wanted:
                self._polled = wanted
                self._loop.readable(self, wanted)

    def ready(self, events: int) -> None:
        """Called in the loop's thread: write what waits, and read, unless another thread does."""
        if events & select.EPOLLOUT:
            self._connection.flush()
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
        """Close the connection; no callback is called any more."""
        self._open = False
        self._loop.remove(self)
        self._connection.close()
        self._pending.clear()
