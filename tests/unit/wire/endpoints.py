"""Endpoints of streams: a unix socket, TCP with TLS, and TCP without it."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import WAIT_TIMEOUT
from unirun.wire.address import Address, UnixAddress, unix_address
from unirun.wire.certificates import make_tls
from unirun.wire.credentials import Credentials, load_credentials, server_name
from unirun.wire.frames import FrameReader, decode, encode, encode_frame
from unirun.wire.handshake import ANSWER_SIZE, Handshake, Token, new_token
from unirun.wire.reports import Message
from unirun.wire.sockets import listen, listen_tcp, tcp_address

KINDS = ("unix", "long path", "tls", "insecure")
NODE = "node_0.Example"


def credentials_in(
    folder: Path, token: Token, node: str, *, tls: bool = True, insecure: bool = False
) -> Credentials:
    """Those of a process on `node`, read from the directory of a job that is made for it."""
    folder.mkdir(parents=True)
    (folder / "token").write_text(token.hex())
    (folder / "token").chmod(0o600)
    if tls:
        make_tls(folder, token, node, insecure=insecure)
    return load_credentials(folder)


class Endpoint:
    """A listener of a kind, and the credentials of those that connect."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self._folder = kind, folder
        self.tcp = kind in ("tls", "insecure")
        self.token = new_token()
        self.credentials = self.on(NODE)
        self.stranger = self.on(NODE, new_token())
        """Those of another job."""
        self.address: Address
        if not self.tcp:
            if kind == "long path":
                for _ in range(6):
                    folder /= "d" * 40
                folder.mkdir(parents=True)
                assert len(os.fsencode(folder)) > 200
            self.path = folder / "agent.sock"
            self.address = UnixAddress.here(self.path)
        self._port = 0
        self.listener: socket.socket
        """The latest that was made."""

    def on(self, node: str, token: Token | None = None) -> Credentials:
        """Those of a process on `node`, of this job unless another `token` is given."""
        folder = self._folder / f"job-{os.urandom(4).hex()}"
        insecure = self.kind == "insecure"
        return credentials_in(folder, token or self.token, node, tls=self.tcp, insecure=insecure)

    def listen(self) -> socket.socket:
        """Listen, where nobody does now."""
        if self.tcp:
            listener = self.listener = listen_tcp("127.0.0.1", self._port)
            self.address = tcp_address(listener, NODE)
            self._port = self.address.port
            return listener
        self.path.unlink(missing_ok=True)
        return listen(self.path)

    def wrap(self, connection: socket.socket) -> socket.socket:
        """The server's end of a connection, for servers that are written by hand."""
        context = self.credentials.server_context() if self.tcp else None
        return context.wrap_socket(connection, server_side=True) if context else connection

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of somebody who has a certificate of the job, before the token is proved."""
        if isinstance(self.address, UnixAddress):
            with unix_address(self.path) as path:
                return await asyncio.open_unix_connection(path)
        context = self.credentials.client_context()
        name = server_name(NODE) if context else None
        return await asyncio.open_connection(
            self.address.addr, self.address.port, ssl=context, server_hostname=name
        )


def fail_on_refusal(text: str, count: int) -> None:
    """A server's note about a refused connection where there is none."""
    raise AssertionError(text)


@contextmanager
def serve_once(endpoint: Endpoint, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    """A server in a thread: `serve` gets the first connection."""
    listener = endpoint.listen()
    errors: list[BaseException] = []

    def run() -> None:
        connection, _ = listener.accept()
        connection.settimeout(WAIT_TIMEOUT)
        with endpoint.wrap(connection) as connection:
            try:
                serve(connection)
            except OSError as error:
                errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(WAIT_TIMEOUT)
    listener.close()
    assert not thread.is_alive()


@contextmanager
def hears(agent: Endpoint, count: int) -> Iterator[list[Message]]:
    """An agent, and the first `count` messages that the worker which connects has sent by the end of the block."""
    heard: list[Message] = []

    def serve(connection: socket.socket) -> None:
        handshake, reader = Handshake(agent.token), FrameReader()
        connection.sendall(handshake.hello())
        connection.sendall(handshake.proof(connection.recv(ANSWER_SIZE)))
        while len(heard) < count:
            heard.extend(map(decode, reader.feed(connection.recv(4096))))

    with serve_once(agent, serve):
        yield heard


def encoded(message: Message) -> bytes:
    """The bytes of a message on a stream."""
    return encode_frame(encode(message))
