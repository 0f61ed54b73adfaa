"""Calls over authenticated sockets: unix sockets in the job's directory, and between hosts TCP with TLS.

`unirun.roles.transport.loop` reads; the thread that calls or answers writes by itself. Both ends prove the token before
a byte of a request is parsed.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

from msgspec import to_builtins

from unirun.errors import ChannelError, UnirunError
from unirun.roles.transport.channel import SocketChannel
from unirun.roles.transport.listener import Listener
from unirun.roles.transport.loop import Loop, RequestInbox
from unirun.roles.transport.protocol import Channel, Handler, Inbox
from unirun.values import Value, WorkerId
from unirun.wire.address import TcpAddress, unix_address
from unirun.wire.credentials import Credentials
from unirun.wire.frames import from_json
from unirun.wire.sockets import listen, listen_tcp, tcp_address


class Endpoint(Value):
    """The address of a worker for calls: a unix socket for processes on its node, and `tcp` for those on others."""

    path: str
    tcp: TcpAddress | None = None

    def __str__(self) -> str:
        return self.path if self.tcp is None else json.dumps(to_builtins(self))

    @classmethod
    def parse(cls, text: str) -> Endpoint:
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
        """Listen. The endpoint is the text of an `Endpoint`."""
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
        return str(Endpoint(str(path), tcp))

    def connect(self, peer: WorkerId, endpoint: str, broken: Callable[[str], None]) -> Channel:
        """Connect. The handshake goes on in the background; requests wait for it."""
        try:
            there = Endpoint.parse(endpoint)
            if there.tcp is None or self.is_here(endpoint):
                return self._connect_here(there.path, broken)
            from unirun.roles.transport.channel import connect

            return connect(there.tcp, self._credentials, self._loop, broken)
        except (OSError, UnirunError) as error:
            raise ChannelError(f"{peer} cannot be reached: {error}") from error

    def is_here(self, endpoint: str) -> bool:
        """Return True if `endpoint` is on this host, so that memory can be shared with it. Raises `FrameError`."""
        tcp = Endpoint.parse(endpoint).tcp
        return tcp is None or tcp.node == self._credentials.node

    def _connect_here(self, path: str, broken: Callable[[str], None]) -> Channel:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            with unix_address(path) as address:
                sock.connect(address)
            return SocketChannel(sock, self._credentials.token, self._loop, broken)
        except OSError:
            sock.close()
            raise

    def close(self) -> None:
        """End the threads and every connection."""
        for listener in self._listeners:
            listener.close()
        self._loop.close()
        self._inbox.close()
