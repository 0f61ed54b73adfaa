"""The wire for processes without an event loop: workers, and the short subcommands of the CLI."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from unirun.errors import ConnectionLost, RendezvousError, WireError
from unirun.wire.address import UnixAddress, unix_address
from unirun.wire.codec import decode, encode
from unirun.wire.frames import FrameReader, encode_frame
from unirun.wire.handshake import DEADLINE, HELLO_SIZE, PROOF_SIZE, ClientHandshake, Token
from unirun.wire.messages import Message


class BlockingStream:
    """One authenticated stream over a connected socket. Any thread sends, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._sending = threading.Lock()
        self._reader = FrameReader()
        self._frames: deque[dict[str, Any]] = deque()

    @classmethod
    def connect(cls, address: UnixAddress, token: Token, *, timeout: float = DEADLINE) -> BlockingStream:
        """Connect to who listens at `address` and prove `token`, within `timeout` seconds.

        Raises `RendezvousError` when nobody listens, `AuthError` when a token is wrong.
        """
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout)
            try:
                _connect(sock, address.local_path(), timeout)
            except OSError as error:
                raise RendezvousError(
                    f"nobody answers at {address}: {error}", "has the job ended?"
                ) from error
            handshake = ClientHandshake(token)
            deadline = time.monotonic() + timeout
            answer = handshake.answer(_exactly(sock, HELLO_SIZE, deadline))
            try:
                sock.sendall(answer)
            except OSError as error:
                raise ConnectionLost(f"the peer is gone: {error}") from error
            handshake.check(_exactly(sock, PROOF_SIZE, deadline))
            sock.settimeout(None)
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
            if not poll.poll(left):
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
        """What `receive` has read together with what it returned; never waits."""
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


def _connect(sock: socket.socket, path: str, timeout: float) -> None:
    """Connect; a listener whose queue is full is asked again until `timeout` is over."""
    deadline = time.monotonic() + timeout
    with unix_address(path) as address:
        while True:
            try:
                sock.connect(address)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.005)


def _exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            part = sock.recv(size - len(data))
        except TimeoutError as error:
            raise WireError("the peer did not finish the handshake in time") from error
        except OSError as error:
            raise ConnectionLost(f"the peer is gone: {error}") from error
        if not part:
            raise ConnectionLost("the peer closed the stream during the handshake", "is the token right?")
        data += part
    return data
