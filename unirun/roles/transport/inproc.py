"""Calls between threads of one process, for tests and notebooks. Values are copied as on every other transport."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable

from unirun.errors import ChannelError
from unirun.roles.transport.protocol import Channel, Handler, Inbox, Parcel, Scheduler, own
from unirun.values import WorkerId

_servers: dict[str, _Server] = {}
_numbers = itertools.count()
_lock = threading.Lock()
"""Guards `_servers`: a channel is added to a server before its end, which closes all channels, or not at all."""


class _Server:
    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.channels: set[_Channel] = set()
        self.executor = Scheduler("unirun-inproc")


class _Channel:
    def __init__(self, server: _Server, executor: Scheduler, broken: Callable[[str], None]) -> None:
        self._server, self._executor, self._broken = server, executor, broken
        self._open = True
        server.channels.add(self)

    def call(self, parcel: Parcel, done: Callable[[Parcel], None], patience: float | None = None) -> None:
        sent = own(parcel)
        self._server.executor.soon(
            lambda: self._server.handler(sent, lambda reply: self._answer(reply, done))
        )

    def _answer(self, reply: Parcel, done: Callable[[Parcel], None]) -> None:
        answer = own(reply)
        self._executor.soon(lambda: done(answer) if self._open else None)

    def keep(self) -> None:
        """Everything is sent at once."""

    def close(self) -> None:
        self._open = False
        self._server.channels.discard(self)

    def cut(self, reason: str) -> None:
        if self._open:
            self.close()
            self._executor.soon(lambda: self._broken(reason))


class InprocTransport:
    """One for each worker that is a thread of this process. ``close`` is the worker's death for the others."""

    name = "inproc"

    def __init__(self) -> None:
        self._executor = Scheduler("unirun-inproc")
        self._endpoint = ""
        self._channels: list[_Channel] = []

    def inbox(self) -> Inbox:
        """A plain queue."""
        return queue.SimpleQueue()

    def serve(self, me: WorkerId, handler: Handler) -> str:
        """Take requests. The endpoint is valid in this process only."""
        self._endpoint = f"inproc:{next(_numbers)}"
        _servers[self._endpoint] = _Server(handler)
        return self._endpoint

    def connect(self, peer: WorkerId, endpoint: str, broken: Callable[[str], None]) -> Channel:
        """A channel to a worker of this process."""
        with _lock:
            server = _servers.get(endpoint)
            if server is None:
                raise ChannelError(f"{peer} is not there", "it has ended")
            channel = _Channel(server, self._executor, broken)
        self._channels.append(channel)
        return channel

    def is_here(self, endpoint: str) -> bool:
        """Memory is copied here, never lent."""
        return False

    def close(self) -> None:
        """Break every channel to this worker, and close its own."""
        with _lock:
            server = _servers.pop(self._endpoint, None)
        if server is not None:
            for channel in list(server.channels):
                channel.cut("the worker has ended")
            server.executor.close()
        for channel in self._channels:
            channel.close()
        self._executor.close()
