"""`Hub`: what the channels of one process share: the listener of its publishers, and the way to those of others."""

from __future__ import annotations

import os
import threading
from typing import Final

from unirun.errors import FrameError
from unirun.roles.context import Context
from unirun.roles.transport.protocol import Parcel, Reply
from unirun.values import WorkerId
from unirun.weights.messages import request_of
from unirun.weights.publishing import Publisher
from unirun.weights.receiving import Source
from unirun.wire.reports import Listening

WEIGHTS: Final = "weights"
"""The name of the listener among the addresses of a worker."""


class Hub:
    """One per process."""

    def __init__(self, context: Context) -> None:
        """Raises `UsageError` without a launcher."""
        self._context = context
        self._transport = context.session.sockets(WEIGHTS)
        self._lock = threading.Lock()
        self._publishers: dict[str, Publisher] = {}
        self._listens = False

    def publisher(self, channel: str) -> Publisher:
        """What this process publishes in `channel`. The first call lets receivers connect."""
        with self._lock:
            found = self._publishers.setdefault(channel, Publisher(channel))
            if not self._listens:
                self._listens = True
                endpoint = self._transport.serve(self._context.session.me, self._handle)
                self._context.peers.tell(Listening({WEIGHTS: endpoint}))
        return found

    def _handle(self, parcel: Parcel, reply: Reply) -> None:
        try:
            request = request_of(parcel.head)
        except FrameError:
            reply(Parcel(b""))
            return
        with self._lock:
            # A receiver may ask before the publisher has made this one of its channels.
            found = self._publishers.setdefault(request.channel, Publisher(request.channel))
        found.handle(request, reply)

    def source(self, channel: str, who: WorkerId, endpoint: str) -> Source:
        """A connection to the publisher `who`. Raises `ChannelError` when nobody answers."""
        me = self._context.session.me
        reader = f"{me} {me.incarnation}"
        here = self._transport.is_here(endpoint)
        return Source(channel, who, reader, self._transport, endpoint, here=here)


_hubs: dict[int, Hub] = {}


def hub_of(context: Context) -> Hub:
    """The hub of this process."""
    pid = os.getpid()
    if pid not in _hubs:
        _hubs[pid] = Hub(context)
    return _hubs[pid]
