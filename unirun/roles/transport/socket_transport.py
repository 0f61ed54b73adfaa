"""`SocketTransport`: requests over unix sockets in the job's directory, and between hosts over TCP with TLS.

A process listens once. A connection begins with the name of the handler that its requests are for: calls, which need no
name, or weights and queues.

Both ends prove the token before a byte of a request is parsed. The sockets are polled as `sockets` describes; the
thread that calls or answers writes by itself.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec import to_builtins

from unirun.errors import CallError, ChannelError, FrameError, UnirunError, WireError
from unirun.roles.transport.frames import OPEN, REPLY, REQUEST, Frame, encode_header
from unirun.roles.transport.protocol import CALLS, Connection, Handler, Inbox, Parcel, Wait
from unirun.roles.transport.sockets import (
    FrameSocket,
    Loop,
    RequestInbox,
    SpinningPoll,
    TlsFrameSocket,
    frames_over,
)
from unirun.roles.transport.stripes import Stripes, start
from unirun.values import Value, WorkerId
from unirun.wire.address import Address, TcpAddress, UnixAddress
from unirun.wire.blocking import BlockingStream
from unirun.wire.credentials import Credentials
from unirun.wire.frames import from_json
from unirun.wire.handshake import (
    ACCEPT_RETRY_INTERVAL,
    ANSWER_SIZE,
    HANDSHAKE_TIMEOUT,
    OVERDUE_POLL_INTERVAL,
    Handshake,
    Strangers,
)
from unirun.wire.sockets import exactly, handshake_error, keep_alive, listen, listen_tcp, shut, tcp_address

BUSY = 4
"""Open calls on a connection from which on its frames are not urgent."""


class SocketConnection:
    """The calling end of a connection. A thread connects and proves the token; requests wait for that."""

    def __init__(
        self,
        address: Address,
        credentials: Credentials,
        loop: Loop,
        broken: Callable[[str], None],
        name: str = CALLS,
    ) -> None:
        self.number = -1
        self._address, self._credentials, self._loop, self._broken = address, credentials, loop, broken
        wants_to_write = partial(loop.writable, self)
        if isinstance(address, UnixAddress):
            self._socket = FrameSocket(wants_to_write)
        elif credentials.insecure:
            self._socket = FrameSocket(wants_to_write, shares=False)
        else:
            self._socket = frames = TlsFrameSocket(wants_to_write)
            key = secrets.token_hex(8)
            frames.stripes.open = partial(self._open_stripes, frames.stripes, key)
            name = f"{name} {key}"
        if name != CALLS:
            self._socket.send(OPEN, 0, Parcel(name.encode()))
        self._tags = itertools.count()
        self._pending: dict[int, Callable[[Parcel], None]] = {}
        self._reading, self._turning = threading.Lock(), threading.RLock()
        self._poll: SpinningPoll | None = None
        self._open = self._polled = True
        threading.Thread(target=self._connect, name="unirun-connect", daemon=True).start()

    def _connect(self) -> None:
        try:
            sock = BlockingStream.connect(self._address, self._credentials).socket
        except (OSError, UnirunError) as error:
            self._end(str(error))
            return
        with self._turning:
            if not self._open:
                sock.close()
                return
            self.number = sock.fileno()
            poll = select.poll()
            poll.register(self.number, select.POLLIN)
            self._poll = SpinningPoll(lambda seconds: poll.poll(None if seconds is None else seconds * 1000))
            self._socket.open(sock)
            try:
                self._loop.add(self)
            except ChannelError:
                self.close()
            except RuntimeError as error:
                # No more threads can be started.
                self._end(str(error))
        self._socket.flush()

    def call(
        self, parcel: Parcel, done: Callable[[Parcel], None], patience: float | None = None
    ) -> Wait | None:
        """Send a request, as `Connection` says; the calling thread reads the answer itself while it waits."""
        tag = next(self._tags)
        # A worker that is busy does not need this request at once, unless the caller waits for it.
        urgent = patience is not None or len(self._pending) < BUSY
        self._pending[tag] = done
        try:
            self._socket.send(REQUEST, tag, parcel, urgent=urgent)
        except CallError:
            self._pending.pop(tag, None)
            raise
        if patience is not None and self._poll is not None:
            return partial(self._wait, self._poll, tag, patience)
        self._poll_in_loop(True)
        return None

    def keep(self) -> None:
        """Copy what is not written yet."""
        self._socket.keep()

    def _wait(self, poll: SpinningPoll, tag: int, patience: float) -> None:
        """Read in this thread until the answer is there, which saves waking another thread.

        One thread at a time reads. It also takes the answers of others, who wait for it, or for the loop after it.
        """
        if not self._reading.acquire(blocking=False):
            return
        deadline = time.monotonic() + patience
        try:
            self._poll_in_loop(False)
            while self._open and tag in self._pending and (left := deadline - time.monotonic()) > 0:
                if poll(left):
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
            for frame, parcel in self._socket.receive():
                done = self._pending.pop(frame.tag, None)
                if frame.kind != REPLY or done is None:
                    raise FrameError("a worker sent an answer that nobody has asked for")
                done(parcel)
        except (OSError, EOFError, FrameError) as error:
            self._end(str(error))
        except BaseException as error:
            # What came may be lost: open calls are sent again.
            self._end(repr(error))
            raise

    def _open_stripes(self, stripes: Stripes, key: str, sends: bool) -> None:
        """Open a connection for stripes and use it, in this thread. Without it large buffers go on as before."""
        try:
            sock = BlockingStream.connect(self._address, self._credentials).socket
            head = f"{_STRIPES[sends]} {key}".encode()
            sock.sendall(encode_header(OPEN, 0, len(head), []) + head)
            if not sock.recv(1):
                raise EOFError
        except (OSError, EOFError, UnirunError):
            return
        stripes.run(sock, sends=sends)

    def _end(self, reason: str) -> None:
        was_open = self._open
        self.close()
        if was_open:
            self._broken(reason)

    def close(self) -> None:
        """Close the connection; no callback is called any more."""
        with self._turning:
            self._open = False
            self._loop.remove(self)
            self._socket.close()
        self._pending.clear()


class Listener:
    """Accepts connections on `sock` in a thread. Those that prove the token within `HANDSHAKE_TIMEOUT` are served;
    `Strangers` says which of them may begin to, each in a thread of its own. `known` says whether an address is one of
    the job's hosts."""

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials,
        inbox: RequestInbox,
        refused: Callable[[str, int], None],
        known: Callable[[str], bool] = lambda origin: False,
    ) -> None:
        self._socket, self._token = sock, credentials.token
        self._inbox = inbox
        self._tls = credentials.server_context() if sock.family != socket.AF_UNIX else None
        self._strangers: Strangers[_Stranger] = Strangers(known, refused)
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
            shut(each.sock)
        shut(self._socket)
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
                    with self._changing:
                        self._strangers.refused(error)
                    time.sleep(ACCEPT_RETRY_INTERVAL)
                continue
            with self._changing:
                out = self._strangers.arrives(_Stranger(sock), place[0] if place else "")
            if out is not None:
                out.sock.close()
            self._go_on()
        for each in list(self._strangers):
            if not each.entering:
                each.sock.close()

    def _go_on(self) -> None:
        """Begin the handshakes of connections whose turn it is, and end those that have to make room."""
        with self._changing:
            now, out, begin = time.monotonic(), [], []
            if now >= self._looked + OVERDUE_POLL_INTERVAL:
                self._looked, out = now, self._strangers.overdue()
            while not self._closed and (begins := self._strangers.next()) is not None:
                begins.entering = True
                begin.append(begins)
        for each in out:
            if each.entering:
                # Its thread sees that the socket has ended.
                shut(each.sock)
            else:
                each.sock.close()
        for each in begin:
            try:
                threading.Thread(
                    target=partial(self._admit, each), name="unirun-handshake", daemon=True
                ).start()
            except RuntimeError as error:
                # No more threads can be started.
                self._end(each, error)

    def _admit(self, stranger: _Stranger) -> None:
        """Let a peer prove the token, and take its requests then."""
        handshake, deadline = Handshake(self._token), time.monotonic() + HANDSHAKE_TIMEOUT
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
            sock.send(handshake.proof(exactly(sock, ANSWER_SIZE, deadline)))
            self._inbox.add(_Served(sock, self._inbox))
        except OSError as error:
            self._end(stranger, handshake_error(error))
        except (WireError, ChannelError) as error:
            # A wrong proof, or this process serves no longer.
            self._end(stranger, error)
        except BaseException:
            self._end(stranger, WireError("it could not be let in"))
            raise
        else:
            self._end(stranger, None)
        finally:
            self._go_on()

    def _end(self, stranger: _Stranger, error: Exception | None) -> None:
        """End a handshake, with an error if the token was not proved."""
        if error is not None:
            stranger.sock.close()
        with self._changing:
            if not self._closed:
                self._strangers.ends(stranger, error)


class _Stranger:
    """A connection that has not proved the token; `entering`: a thread is in the handshake with it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.entering = sock, False


class _Served:
    """The serving end of a connection."""

    def __init__(self, sock: socket.socket, inbox: RequestInbox) -> None:
        self.number, self._inbox = sock.fileno(), inbox
        self._handler: Handler | None = None
        self._socket = frames_over(sock, partial(inbox.writable, self))
        self._received = self._replied = 0

    def ready(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._socket.flush()
        try:
            for frame, parcel in self._socket.receive():
                if frame.kind == OPEN and self._carries_stripes(frame.head):
                    return
                if frame.kind != REQUEST:
                    self._begin(frame)
                    continue
                self._received += 1
                handler = self._handler or self._begin(frame)
                handler(parcel, partial(self._reply, frame.tag))
        except (OSError, EOFError, FrameError):
            self.close()

    def _begin(self, first: Frame) -> Handler:
        """Choose the handler, which the first frame names; a request is a call. Raises `FrameError`."""
        text = CALLS if first.kind == REQUEST else first.head.decode(errors="replace")
        name, _, key = text.partition(" ")
        handler = self._inbox.handlers.get(name)
        if first.kind not in (OPEN, REQUEST) or self._handler is not None or handler is None:
            raise FrameError(f"a frame of kind {first.kind} that begins nothing here")
        if key and isinstance(self._socket, TlsFrameSocket):
            self._inbox.stripes[key] = self._socket.stripes
        self._handler = handler
        return handler

    def _carries_stripes(self, head: bytes) -> bool:
        """Return True if this connection carries stripes of another one; then a thread does that from now on. Raises
        `FrameError`."""
        name, _, key = head.decode(errors="replace").partition(" ")
        if name not in _STRIPES:
            return False
        stripes = self._inbox.stripes.get(key)
        if stripes is None or self._handler is not None:
            raise FrameError("stripes of no connection that is there")
        self._inbox.remove(self)
        if not start(partial(_carry, stripes, self._socket.socket, sends=name == _STRIPES[False])):
            self._socket.close()
        return True

    def _reply(self, tag: int, parcel: Parcel) -> None:
        self._replied += 1
        # Answers are gathered while more requests wait here. If the next one takes long, the reading thread sends them.
        self._socket.send(REPLY, tag, parcel, urgent=self._received - self._replied < BUSY)

    def close(self) -> None:
        self._inbox.remove(self)
        self._socket.close()


_STRIPES = ("stripes-back", "stripes")
"""The names of connections for stripes of answers and of requests."""


def _carry(stripes: Stripes, sock: socket.socket, *, sends: bool) -> None:
    """Carry stripes at the end that was connected to; a byte says that it has begun."""
    with contextlib.suppress(OSError):
        sock.settimeout(HANDSHAKE_TIMEOUT)
        sock.sendall(b"\0")
    stripes.run(sock, sends=sends)


class CallAddress(Value):
    """The address of a worker: a unix socket for processes on its node, and `tcp` for those on others."""

    path: str
    tcp: TcpAddress | None = None

    def __str__(self) -> str:
        return self.path if self.tcp is None else json.dumps(to_builtins(self))

    @classmethod
    def parse(cls, text: str) -> CallAddress:
        """Parse the text of an address: a path, or JSON. Raises `FrameError`."""
        return from_json(cls, text) if text.startswith("{") else cls(text)


class SocketTransport:
    """The socket transport of this process.

    `folder`, of mode 0700, has the unix sockets of the job's workers on this node. With `addr`, an address of this
    host, workers on other hosts can connect. `refused` gets a text for connections that were refused, and their number;
    `known` says whether an address is one of the job's hosts.
    """

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
        self._endpoint = ""
        self._serving = threading.Lock()

    def inbox(self) -> Inbox:
        """A queue whose `get` reads requests while it waits."""
        return self._inbox

    def serve(self, me: WorkerId, handler: Handler, name: str = CALLS) -> str:
        """Let `handler` take the requests for `name`. The endpoint is the text of a `CallAddress`."""
        with self._serving:
            self._inbox.handlers[name] = handler
            if not self._endpoint:
                self._endpoint = self._listen(me)
        return self._endpoint

    def _listen(self, me: WorkerId) -> str:
        path = self._folder / f"{me.role}.{me.rank}.{me.incarnation}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._loop.add(self._inbox)
        sockets, tcp = [listen(path)], None
        if self._addr:
            sockets.append(listen_tcp(self._addr))
            tcp = tcp_address(sockets[-1], self._credentials.node)
        for sock in sockets:
            listener = Listener(sock, self._credentials, self._inbox, self._refused, self._known)
            self._listeners.append(listener)
        return str(CallAddress(str(path), tcp))

    def connect(
        self, peer: WorkerId, endpoint: str, broken: Callable[[str], None], name: str = CALLS
    ) -> Connection:
        """Connect, in the background; requests wait for it."""
        try:
            there = CallAddress.parse(endpoint)
            address: Address = UnixAddress.here(there.path)
            if there.tcp is not None and not self.is_here(endpoint):
                address = there.tcp
            return SocketConnection(address, self._credentials, self._loop, broken, name)
        except (FrameError, RuntimeError) as error:
            # A wrong endpoint, or no more threads can be started.
            raise ChannelError(f"{peer} cannot be reached: {error}") from error

    def is_here(self, endpoint: str) -> bool:
        """Return True if `endpoint` is on this host, so that memory can be shared with it. Raises `FrameError`."""
        tcp = CallAddress.parse(endpoint).tcp
        return tcp is None or tcp.node == self._credentials.node

    def close(self) -> None:
        """End the threads and every connection."""
        for listener in self._listeners:
            listener.close()
        self._loop.close()
        self._inbox.close()
