"""The agent on the head accepts other nodes while no master does, so that they know that they are not given up.

Where the store is a file on the head, other nodes know of the job by the head's address alone. A master there that is
stopped, or dead with its successor on the way, does not answer. A connection that a kernel at that address accepts
proves nothing: it may be that of another machine. The agent on the head holds the same listening socket. When
connections wait there, it lets them prove the token, as a master would, tells the master which nodes have come
(`Knock`), and closes them. Where it follows no master at all, it says so first: a master that is busy or stopped is
waited for much longer than one that cannot be started.
"""

from __future__ import annotations

import asyncio
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from unirun.errors import UnirunError
from unirun.wire.aio import Stream, StreamServer
from unirun.wire.credentials import Credentials
from unirun.wire.messages import Dismissed
from unirun.wire.reporting import report
from unirun.wire.reports import Knock

BACKLOG_POLL_INTERVAL = 0.1
"""Seconds between two looks at the listener."""

BACKLOG_POLLS = 5
"""Looks. No master accepts connections when one waits at each look and is as old as all of them take."""

MOST = 0.8
"""Fraction of that time that is enough: the first bytes of a peer may come a little later."""

ACCEPT_SECONDS = 1.0
"""Seconds for which the agent then accepts connections."""

_LAST_ACK = 8 + 12 * 4
"""Offset of ``tcpi_last_ack_recv`` in ``struct tcp_info``: 8 bytes, and 12 numbers of 4."""


class Witness:
    """Watches `listener`. `tell` gets each node that has proved the token, before it can know that it has been let in;
    `led` says whether this agent follows a master; `refused` is as for `StreamServer`."""

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials,
        tell: Callable[[Knock], None],
        led: Callable[[], bool],
        refused: Callable[[str, int], None],
    ) -> None:
        self._listener, self._credentials = listener, credentials
        listener.setblocking(False)
        self._tell, self._led, self._refused = tell, led, refused
        # The addresses from which the token was proved.
        self._origins: set[str] = set()

    async def watch(self) -> None:
        """Let nodes in whenever no master does. An error in that, such as a lack of descriptors, ends nothing
        else."""
        while True:
            await _comes(self._listener)
            if (found := await self._old()) is None:
                continue
            try:
                await self._let_in(*found)
            except (OSError, UnirunError) as error:
                found[0].close()
                report(f"unirun-agent: no node could be let in: {error}")
                await asyncio.sleep(ACCEPT_SECONDS)

    async def _old(self) -> tuple[socket.socket, Any] | None:
        """Accept a connection that has waited too long. Returns it with its address; None when there is none.

        When many peers connect, one waits at each look although a master accepts. Then the accepted connection is
        young: it is closed, and its peer connects again.
        """
        began = time.monotonic()
        for _ in range(BACKLOG_POLLS):
            await asyncio.sleep(BACKLOG_POLL_INTERVAL)
            if not _waits(self._listener):
                return None
        try:
            sock, place = self._listener.accept()
        except OSError:
            # Another process has been faster, or the peer has gone.
            return None
        if _age(sock) >= (time.monotonic() - began) * MOST:
            return sock, place
        sock.close()
        return None

    async def _let_in(self, first: socket.socket, place: Any) -> None:
        server = StreamServer(
            self._listener.dup(),
            self._credentials,
            self._send_away,
            self._refused,
            known=self._origins.__contains__,
            proved=self._knocked,
        )
        server.take(first, place)
        try:
            await asyncio.sleep(ACCEPT_SECONDS)
        finally:
            server.close()
        await server.closed()

    async def _send_away(self, stream: Stream) -> None:
        if not self._led():
            stream.send(Dismissed("the job has no master now", "see master.log of the job"))
        await stream.close()

    def _knocked(self, stream: Stream) -> None:
        self._origins.add(stream.origin)
        self._tell(Knock(stream.peer, stream.origin))


async def _comes(listener: socket.socket) -> None:
    """Wait until a connection is there to be accepted, by this process or another."""
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_reader(listener, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(listener)


def _waits(listener: socket.socket) -> bool:
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    return bool(poll.poll(0))


def _age(sock: socket.socket) -> float:
    """Seconds since the peer last sent anything, which it does as soon as it is connected (tcpi_last_ack_recv,
    tcp(7))."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK + 4)
    return int.from_bytes(info[_LAST_ACK:], sys.byteorder) / 1000
