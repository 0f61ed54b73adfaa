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
from collections.abc import Callable

from unirun.wire.aio import Server, Stream
from unirun.wire.credentials import Credentials
from unirun.wire.reports import Knock

LOOK = 0.1
LOOKS = 5
"""No master accepts connections when one waits at so many looks, with so many seconds between two."""

DUTY = 1.0
"""Seconds for which the agent accepts connections then."""


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
        self._tell, self._refused = tell, refused

    async def watch(self) -> None:
        """Let nodes in whenever no master does."""
        while True:
            await _comes(self._listener)
            if await self._nobody_accepts():
                await self._let_in()

    async def _nobody_accepts(self) -> bool:
        for _ in range(LOOKS):
            await asyncio.sleep(LOOK)
            if not _waits(self._listener):
                return False
        return True

    async def _let_in(self) -> None:
        server = Server(
            self._listener.dup(), self._credentials, Stream.close, self._refused, proved=self._knocked
        )
        try:
            await asyncio.sleep(DUTY)
        finally:
            server.close()
        await server.closed()

    def _knocked(self, stream: Stream) -> None:
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
