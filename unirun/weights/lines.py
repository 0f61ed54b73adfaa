"""`PeerConnection`: requests to one other process, and futures of their answers."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial

from unirun.errors import PeerLost
from unirun.roles.transport.protocol import Channel, Parcel, Transport
from unirun.values import WorkerId


class PeerConnection:
    """A connection to `who`. Thread-safe."""

    def __init__(self, who: WorkerId, transport: Transport, endpoint: str) -> None:
        """Raises `ChannelError` when nobody answers."""
        self.who, self.endpoint = who, endpoint
        self._lock = threading.Lock()
        self._open: set[Future[Parcel]] = set()
        self._lost = ""
        self._channel: Channel = transport.connect(who, endpoint, self._broken)

    @property
    def lost(self) -> bool:
        """True if the connection has ended."""
        return bool(self._lost)

    def _broken(self, reason: str) -> None:
        with self._lock:
            self._lost = reason or "the connection has ended"
            failed, self._open = self._open, set()
        for future in failed:
            future.set_exception(self._error())

    def _error(self) -> PeerLost:
        return PeerLost(
            f"{self.who} is gone: {self._lost}", "try again when it was started again", worker=str(self.who)
        )

    def ask(self, head: bytes) -> Future[Parcel]:
        """Send a request. The future raises `PeerLost` when the connection ends; this does when it has ended."""
        future: Future[Parcel] = Future()
        with self._lock:
            if self._lost:
                raise self._error()
            self._open.add(future)
        self._channel.call(Parcel(head), partial(self._answered, future))
        return future

    def _answered(self, future: Future[Parcel], parcel: Parcel) -> None:
        with self._lock:
            # The connection may be closed in another thread meanwhile.
            waits = future in self._open
            self._open.discard(future)
        if waits:
            future.set_result(parcel)

    def close(self, reason: str = "it was closed here") -> None:
        """Close the connection, which the other end sees."""
        self._channel.close()
        self._broken(reason)
