"""The agent on the head lets other nodes in while no master does, so that they know that they have not been given up.

Where the store is a file on the head, other nodes know of the job by the head's address alone. A master there that is
stopped, or dead with its successor on the way, answers nobody, and what the kernel of some machine at that address does
proves nothing. The agent on the head holds the same listening socket. When connections wait there, it lets them prove
the token, as a master would, tells the master which nodes have come (`Knock`), and closes them.
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
from unirun.reporting import report
from unirun.wire.aio import Server, Stream
from unirun.wire.credentials import Credentials
from unirun.wire.reports import Knock

LOOK = 0.1
LOOKS = 5
"""No master accepts connections when one waits at so many looks, with so many seconds between two, and is that old."""

MOST = 0.8
"""The part of that time which is enough: what a peer sends first may come a little later."""

DUTY = 1.0
"""Seconds for which the agent accepts connections then."""

_LAST_ACK = 8 + 12 * 4
"""Where it is in ``struct tcp_info``: behind 8 bytes and 12 numbers."""


class Witness:
    """Watches `listener`. `tell` gets each node that has proved the token, before it can know that it has been let in;
    `refused` is as for `Server`."""

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials,
        tell: Callable[[Knock], None],
        refused: Callable[[str, int], None],
    ) -> None:
        self._listener, self._credentials = listener, credentials
        listener.setblocking(False)
        self._tell, self._refused = tell, refused
        # The addresses from which the token was proved.
        self._origins: set[str] = set()

    async def watch(self) -> None:
        """Let nodes in whenever no master does. An error in that, as a lack of descriptors, ends nothing else."""
        while True:
            await _comes(self._listener)
            if (found := await self._old()) is None:
                continue
            try:
                await self._let_in(*found)
            except (OSError, UnirunError) as error:
                found[0].close()
                report(f"unirun-agent: no node could be let in: {error}")
                await asyncio.sleep(DUTY)

    async def _old(self) -> tuple[socket.socket, Any] | None:
        """A connection that nobody has accepted for a while, and its address; None when there is none.

        While many connect, one waits at each look though a master accepts: then the next one to be accepted is young,
        and is closed. Its peer connects again.
        """
        began = time.monotonic()
        for _ in range(LOOKS):
            await asyncio.sleep(LOOK)
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
        server = Server(
            self._listener.dup(),
            self._credentials,
            Stream.close,
            self._refused,
            known=self._origins.__contains__,
            proved=self._knocked,
        )
        server.take(first, place)
        try:
            await asyncio.sleep(DUTY)
        finally:
            server.close()
        await server.closed()

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
    """Seconds since the peer has sent something on a connection: it begins at once. (tcpi_last_ack_recv of tcp(7).)"""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK + 4)
    return int.from_bytes(info[_LAST_ACK:], sys.byteorder) / 1000
