"""The wire for processes with an event loop: master, agent and the CLI."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from unirun.errors import ConnectionLost, WireError
from unirun.wire.address import Address, UnixAddress, unix_address
from unirun.wire.codec import decode, encode
from unirun.wire.credentials import Credentials, node_of, server_name
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
from unirun.wire.refusals import Refusals
from unirun.wire.sockets import handshake_error, keep_alive, nobody_answers, not_the_node


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

    @property
    def remote(self) -> bool:
        """Whether the peer may be on another host."""
        return bool(self._writer.get_extra_info("socket").family != socket.AF_UNIX)

    @property
    def origin(self) -> str:
        """The peer's address; empty for a unix socket."""
        name = self._writer.get_extra_info("peername")
        return str(name[0]) if self.remote and name else ""

    @property
    def peer(self) -> str:
        """The name of the peer's node, which its certificate proves; empty without TLS."""
        return node_of(self._writer.get_extra_info("ssl_object"))

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

    def abort(self) -> None:
        """Close at once; nobody waits for what is queued."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Send what is queued, then close. It is no error when the peer is gone."""
        self._writer.close()
        closing = asyncio.ensure_future(self._writer.wait_closed())
        closing.add_done_callback(lambda task: task.cancelled() or task.exception())
        # Not `wait_for`: when this is cancelled, it would end the wait of others that close the same stream.
        closed, _ = await asyncio.wait({closing}, timeout=DEADLINE)
        if not closed:
            self._writer.transport.abort()


def frame_of(message: Message) -> bytes:
    """The bytes of a message on a stream."""
    return encode_frame(encode(message))


async def connect(address: Address, credentials: Credentials, *, timeout: float = DEADLINE) -> Stream:
    """Connect to who listens at `address` and prove the token, within `timeout` seconds.

    Raises `RendezvousError` when nobody listens, `AuthError` when a token or a certificate is wrong.
    """
    reader = None
    try:
        async with asyncio.timeout(timeout):
            try:
                reader, writer = await _open(address, credentials)
            except ssl.SSLError as error:
                raise not_the_node(address, error) from error
            except OSError as error:
                raise nobody_answers(address, error) from error
            try:
                handshake = ClientHandshake(credentials.token)
                writer.write(handshake.answer(await reader.readexactly(HELLO_SIZE)))
                handshake.check(await reader.readexactly(PROOF_SIZE))
            except BaseException:
                writer.transport.abort()
                raise
    except (TimeoutError, OSError, EOFError) as error:
        if reader is None:
            raise nobody_answers(address, f"no answer within {timeout:g} s") from error
        raise handshake_error(error) from error
    return Stream(reader, writer)


async def _open(
    address: Address, credentials: Credentials
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(address, UnixAddress):
        with unix_address(address.local_path()) as path:
            return await asyncio.open_unix_connection(path)
    tls = credentials.client_context(any_node=not address.node)
    name = server_name(address.node) if tls is not None else None
    reader, writer = await asyncio.open_connection(address.addr, address.port, ssl=tls, server_hostname=name)
    keep_alive(writer.get_extra_info("socket"))
    return reader, writer


async def _accept(sock: socket.socket, token: Token, tls: ssl.SSLContext | None, timeout: float) -> Stream:
    """The server's end of a connection that was just made. Raises `WireError`, and the socket is closed."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    try:
        async with asyncio.timeout(timeout):
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=tls)
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            try:
                handshake = ServerHandshake(token)
                writer.write(handshake.hello())
                writer.write(handshake.proof(await reader.readexactly(ANSWER_SIZE)))
            except BaseException:
                transport.abort()
                raise
    except (TimeoutError, OSError, EOFError) as error:
        raise handshake_error(error) from error
    return Stream(reader, writer)


STRANGERS = 512
"""Connections to one listener that may be without proof of the token."""

GRACE = 1.0
"""Seconds that each of these has at least."""

AGAIN = 0.1
"""Seconds until a listener that is out of descriptors accepts again."""


class Server:
    """Accepts connections on `listener`, a unix or a TCP socket, and calls `handler` with each that has proved the
    token. `refused` gets a text for those that have not, and their number so far (`Refusals`).

    A connection has `timeout` seconds to prove the token. At most `STRANGERS` may be about to; beyond these the oldest
    makes room. So whoever connects and remains silent cannot keep others out. `knocked` gets the address of each host
    that connects over TCP, at once.
    """

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials,
        handler: Callable[[Stream], Awaitable[None]],
        refused: Callable[[str, int], None],
        *,
        timeout: float = DEADLINE,
        knocked: Callable[[str], None] = lambda origin: None,
    ) -> None:
        self._listener, self._token = listener, credentials.token
        self._handler, self._timeout, self._knocked = handler, timeout, knocked
        self._tls = credentials.server_context() if listener.family != socket.AF_UNIX else None
        self._refusals = Refusals(refused)
        self._strangers: dict[asyncio.Task[None], float] = {}
        self._fewer = asyncio.Event()
        self._known: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._accepting = asyncio.ensure_future(self._accept_all())

    def close(self) -> None:
        """Stop listening, and end the connections that have not proved the token."""
        for task in (self._accepting, *self._strangers):
            task.cancel()

    async def _accept_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._make_room()
                try:
                    sock, origin = await loop.sock_accept(self._listener)
                except ConnectionError:
                    # The peer has gone already.
                    continue
                except OSError as error:
                    # Out of descriptors or memory: connections wait in the listener's queue.
                    self._refusals.add(error)
                    await asyncio.sleep(AGAIN)
                    continue
                if origin:
                    self._knocked(origin[0])
                task = asyncio.ensure_future(self._admit(sock, origin[0] if origin else ""))
                self._strangers[task] = loop.time()
        finally:
            self._listener.close()

    async def _make_room(self) -> None:
        """Wait until another connection can be accepted."""
        clock = asyncio.get_running_loop().time
        while len(self._strangers) >= STRANGERS:
            oldest, since = next(iter(self._strangers.items()))
            if (left := since + GRACE - clock()) <= 0:
                del self._strangers[oldest]
                oldest.cancel()
                self._refusals.add("it has not proved the token yet, and others wait")
                continue
            self._fewer.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._fewer.wait()

    async def _admit(self, sock: socket.socket, origin: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if sock.family != socket.AF_UNIX:
                keep_alive(sock)
            stream = await _accept(sock, self._token, self._tls, self._timeout)
        except WireError as error:
            self._refusals.add(error, origin)
            return
        finally:
            self._strangers.pop(task, None)
            self._fewer.set()
        self._known.add(task)
        task.add_done_callback(self._known.discard)
        await self._handler(stream)
