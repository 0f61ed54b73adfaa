"""The wire for processes with an event loop: master, agent and the CLI."""

from __future__ import annotations

import asyncio
import socket
import ssl
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from unirun.errors import ConnectionLost, WireError
from unirun.wire.address import Address, UnixAddress, unix_address
from unirun.wire.credentials import Credentials, node_of, server_name
from unirun.wire.frames import FrameReader, decode, encode, encode_frame
from unirun.wire.handshake import (
    ACCEPT_RETRY_INTERVAL,
    ANSWER_SIZE,
    HANDSHAKE_TIMEOUT,
    HELLO_SIZE,
    OVERDUE_POLL_INTERVAL,
    PROOF_SIZE,
    Handshake,
    Strangers,
    Token,
)
from unirun.wire.reports import Message
from unirun.wire.sockets import (
    CONNECT_RETRY_INTERVAL,
    family_of,
    handshake_error,
    keep_alive,
    nobody_answers,
    not_the_node,
)


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
        """True if the peer may be on another host."""
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

    @property
    def ended(self) -> bool:
        """True if the peer is gone, and nothing that it has said is left to be received."""
        return not self._ready and (self._bytes.at_eof() or self._bytes.exception() is not None)

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
        closed, _ = await asyncio.wait({closing}, timeout=HANDSHAKE_TIMEOUT)
        if not closed:
            self._writer.transport.abort()


def frame_of(message: Message) -> bytes:
    """The bytes of a message on a stream."""
    return encode_frame(encode(message))


async def connect(
    address: Address, credentials: Credentials, *, timeout: float = HANDSHAKE_TIMEOUT
) -> Stream:
    """Connect to the listener at `address` and prove the token, within `timeout` seconds.

    Raises `RendezvousError` when the connection is refused or times out, `AuthError` when a token or a certificate is
    wrong, another `WireError` when the handshake on a connection fails.
    """
    connected = False
    try:
        async with asyncio.timeout(timeout):
            try:
                sock = await _reach(address)
            except OSError as error:
                raise nobody_answers(address, error) from error
            connected = True
            try:
                reader, writer = await _streams(sock, address, credentials)
            except ssl.SSLError as error:
                raise not_the_node(address, error) from error
            try:
                handshake = Handshake(credentials.token)
                writer.write(handshake.answer(await reader.readexactly(HELLO_SIZE)))
                handshake.check(await reader.readexactly(PROOF_SIZE))
            except BaseException:
                writer.transport.abort()
                raise
    except (TimeoutError, OSError, EOFError) as error:
        if not connected:
            raise nobody_answers(address, f"no answer within {timeout:g} s") from error
        raise handshake_error(error) from error
    return Stream(reader, writer)


async def _reach(address: Address) -> socket.socket:
    """A socket that is connected to `address`, by the kernel there. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX if isinstance(address, UnixAddress) else family_of(address.addr))
    sock.setblocking(False)
    try:
        if isinstance(address, UnixAddress):
            with unix_address(address.local_path()) as path:
                # Not `sock_connect`, which takes a listener whose queue is full for one that has answered.
                while True:
                    try:
                        sock.connect(path)
                        break
                    except BlockingIOError:
                        await asyncio.sleep(CONNECT_RETRY_INTERVAL)
        else:
            await asyncio.get_running_loop().sock_connect(sock, (address.addr, address.port))
            keep_alive(sock)
    except BaseException:
        sock.close()
        raise
    return sock


async def _streams(
    sock: socket.socket, address: Address, credentials: Credentials
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams over a connected socket, with TLS to another host unless the job is `insecure`."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = _Protocol(reader)
    transport: asyncio.Transport
    try:
        if isinstance(address, UnixAddress):
            transport, _ = await loop.create_unix_connection(lambda: protocol, sock=sock)
        else:
            tls = credentials.client_context(any_node=not address.node)
            name = server_name(address.node) if tls is not None else None
            transport, _ = await loop.create_connection(
                lambda: protocol, sock=sock, ssl=tls, server_hostname=name
            )
    except BaseException:
        protocol.abort()
        sock.close()
        raise
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class _Protocol(asyncio.StreamReaderProtocol):
    """A protocol that keeps its transport, so that this can be closed if nobody else got it.

    A task that is cancelled when TLS has just been established gets none, and asyncio waits for the peer's end of TLS.
    If the socket were closed meanwhile, the event loop would take the next one with its number for the old one.
    """

    _made: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._made = transport
        super().connection_made(transport)

    def abort(self) -> None:
        """Close the transport at once, if there is one."""
        if isinstance(self._made, asyncio.WriteTransport):
            self._made.abort()


async def _accept(
    sock: socket.socket,
    token: Token,
    tls: ssl.SSLContext | None,
    timeout: float,
    proved: Callable[[Stream], None],
) -> Stream:
    """The server's end of a connection that was just made. Raises `WireError`, and the socket is closed."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = _Protocol(reader)
    try:
        async with asyncio.timeout(timeout):
            try:
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=tls)
            except BaseException:
                protocol.abort()
                raise
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            try:
                handshake = Handshake(token)
                writer.write(handshake.hello())
                proof = handshake.proof(await reader.readexactly(ANSWER_SIZE))
                stream = Stream(reader, writer)
                proved(stream)
                writer.write(proof)
            except BaseException:
                transport.abort()
                raise
    except (TimeoutError, OSError, EOFError) as error:
        raise handshake_error(error) from error
    return stream


AT_ONCE = 16
"""Connections that are accepted before other work of the event loop has its turn."""


class StreamServer:
    """Accepts connections on `listener`, a unix or a TCP socket, and calls `handler` with each that has proved the
    token. `refused` gets a text for those that have not, and their number so far.

    A connection has `timeout` seconds to prove the token. `Strangers` says which of them may begin to, so that
    one peer with many connections cannot keep others out. `known` says whether an address is one of the job's hosts.
    `proved` gets each stream on which the token was proved, before the peer can know that it has been let in.
    """

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials,
        handler: Callable[[Stream], Coroutine[Any, Any, None]],
        refused: Callable[[str, int], None],
        *,
        timeout: float = HANDSHAKE_TIMEOUT,
        known: Callable[[str], bool] = lambda origin: False,
        proved: Callable[[Stream], None] = lambda stream: None,
    ) -> None:
        self._listener, self._token = listener, credentials.token
        self._handler, self._timeout, self._proved = handler, timeout, proved
        self._tls = credentials.server_context() if listener.family != socket.AF_UNIX else None
        self._strangers: Strangers[socket.socket] = Strangers(known, refused, asyncio.get_running_loop().time)
        self._entering: dict[socket.socket, asyncio.Task[Stream]] = {}
        self._look: asyncio.TimerHandle | None = None
        self._known: set[asyncio.Future[None]] = set()
        listener.setblocking(False)
        self._accepting = asyncio.ensure_future(self._accept_all())

    def close(self) -> None:
        """Stop listening, and end the connections that have not proved the token."""
        for task in (self._accepting, *self._entering.values()):
            task.cancel()
        if self._look is not None:
            self._look.cancel()
        for sock in self._strangers:
            if sock not in self._entering:
                sock.close()

    async def closed(self) -> None:
        """Wait, after `close`, until it accepts no more and all handshakes have ended. Streams stay open."""
        await asyncio.wait({self._accepting, *self._entering.values()})

    async def _accept_all(self) -> None:
        loop = asyncio.get_running_loop()
        number = 0
        try:
            while True:
                number += 1
                if number % AT_ONCE == 0:
                    # sock_accept does not yield while connections wait, so nothing else would run.
                    await asyncio.sleep(0)
                try:
                    sock, place = await loop.sock_accept(self._listener)
                except ConnectionError:
                    # The peer has gone already.
                    continue
                except OSError as error:
                    # Out of descriptors or memory: connections wait in the listener's queue.
                    self._strangers.refused(error)
                    await asyncio.sleep(ACCEPT_RETRY_INTERVAL)
                    continue
                self.take(sock, place)
        finally:
            self._listener.close()

    def take(self, sock: socket.socket, place: Any) -> None:
        """Take a connection that was accepted, from the address `place` of its family."""
        sock.setblocking(False)
        out = self._strangers.arrives(sock, place[0] if place else "")
        if out is not None:
            out.close()
        self._go_on()

    def _go_on(self) -> None:
        """Let connections begin whose turn it is."""
        while (begins := self._strangers.next()) is not None:
            task = self._entering[begins] = asyncio.ensure_future(self._admit(begins))
            task.add_done_callback(partial(self._entered, begins))
        if self._strangers.waiting and self._look is None:
            self._look = asyncio.get_running_loop().call_later(OVERDUE_POLL_INTERVAL, self._look_again)

    def _look_again(self) -> None:
        """End the connections that make room for others."""
        self._look = None
        for sock in self._strangers.overdue():
            if (task := self._entering.get(sock)) is not None:
                task.cancel()
            else:
                sock.close()
        self._go_on()

    async def _admit(self, sock: socket.socket) -> Stream:
        if sock.family != socket.AF_UNIX:
            keep_alive(sock)
        return await _accept(sock, self._token, self._tls, self._timeout, self._proved)

    def _entered(self, sock: socket.socket, task: asyncio.Task[Stream]) -> None:
        """Serve a connection that has proved the token; close any other."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        del self._entering[sock]
        if not task.cancelled():
            self._strangers.ends(sock, error)
        if error is None:
            serving = asyncio.ensure_future(self._handler(task.result()))
            self._known.add(serving)
            serving.add_done_callback(self._known.discard)
        else:
            sock.close()
            _free(error)
        if not self._accepting.done():
            self._go_on()
        if error is not None and not isinstance(error, WireError | OSError | asyncio.CancelledError):
            raise error


def _free(error: BaseException | None) -> None:
    """Forget the variables in the frames of an error and of those that have led to it. In a handshake of TLS they form
    cycles, with a buffer of 256 KiB, that only a full collection would find."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
