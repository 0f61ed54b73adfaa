"""The wire for processes without an event loop: workers with the link to their agent, short subcommands."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from unirun.errors import ConnectionLost, RendezvousError
from unirun.values import WorkerId
from unirun.wire.address import Address, TcpAddress, UnixAddress, unix_address
from unirun.wire.credentials import Credentials, load_credentials, server_name
from unirun.wire.frames import FrameReader, decode, encode, encode_frame
from unirun.wire.handshake import HANDSHAKE_TIMEOUT, HELLO_SIZE, PROOF_SIZE, Handshake
from unirun.wire.messages import Hello
from unirun.wire.reports import Message
from unirun.wire.sockets import (
    CONNECT_RETRY_INTERVAL,
    exactly,
    handshake_error,
    keep_alive,
    nobody_answers,
    not_the_node,
)


class BlockingStream:
    """One authenticated stream over a connected socket. Any thread sends, one receives; over TLS one thread does both,
    and a frame that has begun must be whole within `HANDSHAKE_TIMEOUT`."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._sending = threading.Lock()
        self._reader = FrameReader()
        self._frames: deque[dict[str, Any]] = deque()
        # Bytes that TLS has read already, which no poll reports.
        self._pending: Callable[[], int] = getattr(sock, "pending", lambda: 0)

    @classmethod
    def connect(
        cls, address: Address, credentials: Credentials, *, timeout: float = HANDSHAKE_TIMEOUT
    ) -> BlockingStream:
        """Connect to the listener at `address` and prove the token, within `timeout` seconds.

        Raises `RendezvousError` when nobody listens, `AuthError` when a token or a certificate is wrong.
        """
        deadline = time.monotonic() + timeout
        if isinstance(address, UnixAddress):
            sock = _open_unix(address, deadline)
        else:
            sock = _open_tcp(address, credentials, deadline)
        try:
            handshake = Handshake(credentials.token)
            answer = handshake.answer(exactly(sock, HELLO_SIZE, deadline))
            try:
                sock.sendall(answer)
            except OSError as error:
                raise handshake_error(error) from error
            handshake.check(exactly(sock, PROOF_SIZE, deadline))
            # With TLS a read may have to wait for the rest of a record.
            sock.settimeout(None if isinstance(address, UnixAddress) else HANDSHAKE_TIMEOUT)
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    def send(self, message: Message) -> None:
        """Send one message. Raises `ConnectionLost`."""
        frame = encode_frame(encode(message))
        try:
            with self._sending:
                self.socket.sendall(frame)
        except OSError as error:
            raise ConnectionLost(f"the peer is gone: {error}") from error

    def receive(self, timeout: float | None = None) -> Message:
        """The next message. Raises `ConnectionLost` at the end, `RendezvousError` after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        while not self._frames:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0) * 1000
            if not self._pending() and not poll.poll(left):
                raise RendezvousError(f"the peer sent nothing for {timeout:g} s")
            try:
                data = self.socket.recv(65536)
            except OSError as error:
                raise ConnectionLost(f"the peer is gone: {error}") from error
            if not data:
                raise ConnectionLost("the peer closed the stream")
            self._frames.extend(self._reader.feed(data))
        return decode(self._frames.popleft())

    def buffered(self) -> Iterator[Message]:
        """Yield the messages that `receive` has read together with the one it returned; never waits."""
        while self._frames:
            yield decode(self._frames.popleft())

    def drain(self) -> Iterator[Message]:
        """Every message of one read; waits for at least some bytes. Raises `ConnectionLost` at the end."""
        try:
            data = self.socket.recv(1 << 20)
        except OSError as error:
            raise ConnectionLost(f"the peer is gone: {error}") from error
        if not data:
            raise ConnectionLost("the peer closed the stream")
        for payload in self._reader.feed(data):
            yield decode(payload)

    def close(self) -> None:
        """Close the socket; safe to call twice."""
        self.socket.close()

    def __enter__(self) -> BlockingStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_unix(address: UnixAddress, deadline: float) -> socket.socket:
    """Connect; a listener whose queue is full is asked again until the deadline."""
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    try:
        with unix_address(address.local_path()) as path:
            while True:
                try:
                    sock.connect(path)
                    return sock
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(CONNECT_RETRY_INTERVAL)
    except OSError as error:
        sock.close()
        raise nobody_answers(address, error) from error
    except BaseException:
        sock.close()
        raise


def _open_tcp(address: TcpAddress, credentials: Credentials, deadline: float) -> socket.socket:
    """Connect; with TLS, unless the job is `insecure`."""
    import ssl

    tls = credentials.client_context(any_node=not address.node)
    try:
        sock = socket.create_connection((address.addr, address.port), max(deadline - time.monotonic(), 0.001))
        try:
            keep_alive(sock)
            if tls is None:
                return sock
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            return tls.wrap_socket(sock, server_hostname=server_name(address.node))
        except BaseException:
            sock.close()
            raise
    except ssl.SSLError as error:
        raise not_the_node(address, error) from error
    except OSError as error:
        raise nobody_answers(address, error) from error


# The connection of a worker to its agent, one per process: the bootstrap opens it, `unirun.init` uses it.

_HIGHEST = 1024
"""Upper limit of the descriptor numbers used: the kernel's table of descriptors grows with the highest one."""

_ROOM = 64
"""Descriptors reserved below the limit, so that the link survives a script that closes descriptors from 3 on."""

_moved: set[int] = set()
"""Descriptors to close in forks of this process."""

_link: BlockingStream | None = None


def open_link(environ: Mapping[str, str]) -> BlockingStream:
    """Return the link of this process; the first call opens it. A fork closes it and opens its own.

    Raises `WireError`, `RendezvousError` or `JobError` when the agent does not answer.
    """
    global _link
    if _link is None:
        path = Path(environ["UNIRUN_SOCKET"])
        link = BlockingStream.connect(UnixAddress.here(path), load_credentials(path.parent))
        link.socket = socket.socket(fileno=out_of_the_way(link.socket.detach()))
        who = WorkerId(
            environ["UNIRUN_ROLE"], int(environ["UNIRUN_RANK"]), int(environ["UNIRUN_INCARNATION"])
        )
        link.send(Hello(who))
        _link = link
    return _link


def out_of_the_way(number: int) -> int:
    """Move a descriptor to a high number, closed on exec and in forks.

    Returns the new number, or `number` when none is free.
    """
    lowest = max(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _HIGHEST) - _ROOM, 3)
    try:
        moved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, lowest)
    except OSError:
        return number
    os.close(number)
    _moved.add(moved)
    return moved


def _close_in_fork() -> None:
    global _link
    if _link is not None:
        _link.close()
    for number in _moved:
        with contextlib.suppress(OSError):
            os.close(number)
    _moved.clear()
    _link = None


os.register_at_fork(after_in_child=_close_in_fork)
