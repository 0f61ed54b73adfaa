"""The wire for processes with an event loop: master, agent and the CLI."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from pathlib import Path
from typing import Any

from unirun.errors import ConnectionLost, RendezvousError, WireError
from unirun.wire.address import UnixAddress, unix_address
from unirun.wire.codec import decode, encode
from unirun.wire.frames import FrameReader, encode_frame
from unirun.wire.handshake import (
    ANSWER_SIZE,
    DEADLINE,
    HELLO_SIZE,
    PROOF_SIZE,
    ClientHandshake,
    ServerHandshake,
    Token,
)
from unirun.wire.messages import Message


class Stream:
    """One authenticated stream of messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._bytes = reader
        self._writer = writer
        self._frames = FrameReader()
        self._ready: deque[dict[str, Any]] = deque()

    def send(self, message: Message) -> None:
        """Queue one message for sending. That the peer is gone is seen in `receive`."""
        self.send_frame(frame_of(message))

    def send_frame(self, frame: bytes) -> None:
        """Queue a message that is encoded already (`frame_of`), as several streams get it."""
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def receive(self) -> Message:
        """The next message. Raises `ConnectionLost` at the end of the stream, `FrameError` on garbage."""
        while not self._ready:
            try:
                data = await self._bytes.read(65536)
            except OSError as error:
                raise ConnectionLost(f"the peer is gone: {error}") from error
            if not data:
                raise ConnectionLost("the peer closed the stream")
            self._ready.extend(self._frames.feed(data))
        return decode(self._ready.popleft())

    async def close(self) -> None:
        """Send what is queued, then close. It is no error when the peer is gone."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), DEADLINE)
        except (OSError, TimeoutError):
            self._writer.transport.abort()


def frame_of(message: Message) -> bytes:
    """The bytes of a message on a stream."""
    return encode_frame(encode(message))


async def connect(address: UnixAddress, token: Token, *, timeout: float = DEADLINE) -> Stream:
    """Connect to who listens at `address` and prove `token`, within `timeout` seconds.

    Raises `RendezvousError` when nobody listens, `AuthError` when a token is wrong.
    """
    try:
        with unix_address(address.local_path()) as path:
            reader, writer = await asyncio.open_unix_connection(path)
    except OSError as error:
        raise RendezvousError(f"nobody answers at {address}: {error}", "has the job ended?") from error
    try:
        async with asyncio.timeout(timeout):
            handshake = ClientHandshake(token)
            writer.write(handshake.answer(await reader.readexactly(HELLO_SIZE)))
            handshake.check(await reader.readexactly(PROOF_SIZE))
    except BaseException as error:
        writer.transport.abort()
        _raise_named(error)
        raise
    return Stream(reader, writer)


async def accept(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: Token, *, timeout: float = DEADLINE
) -> Stream:
    """The server's end of a connection that was just made. Raises `WireError`, and the socket is closed."""
    try:
        async with asyncio.timeout(timeout):
            handshake = ServerHandshake(token)
            writer.write(handshake.hello())
            writer.write(handshake.proof(await reader.readexactly(ANSWER_SIZE)))
    except BaseException as error:
        writer.transport.abort()
        _raise_named(error)
        raise
    return Stream(reader, writer)


def _raise_named(error: BaseException) -> None:
    """Raise the `WireError` that `error` stands for, if it stands for one."""
    if isinstance(error, TimeoutError):
        raise WireError("the peer did not finish the handshake in time") from error
    if isinstance(error, OSError | asyncio.IncompleteReadError):
        raise ConnectionLost(
            "the peer closed the stream during the handshake", "is the token right?"
        ) from error


BACKLOG = 4096
"""Connections that may wait to be accepted; asyncio must be told too, or it sets its own 100."""


def listen(path: str | Path, *, backlog: int = BACKLOG) -> socket.socket:
    """A listening unix socket at `path`, mode 0600 (its directory is 0700 before it exists)."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        with unix_address(path) as address:
            sock.bind(address)
        Path(path).chmod(0o600)
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock
