"""The launcher's side of the lobby: it hears the nodes' offers, gives each its task, and lets all start at once.

Whatever is wrong is told of all nodes at once, before anything starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from unirun.errors import RendezvousError, UnirunError, WireError
from unirun.failover.offers import NodeFault
from unirun.rendezvous.endpoints import BIND_TIMEOUT
from unirun.values import Value
from unirun.wire.aio import Stream
from unirun.wire.messages import Assigned, Dismissed, Message, Offer, Ready, expected


class Guest(Value):
    """A node that has made an offer."""

    stream: Stream
    offer: Offer

    @property
    def node(self) -> str:
        """Its name."""
        return self.offer.node


def refusal(unfit: Sequence[NodeFault]) -> RendezvousError:
    """One error for all nodes that cannot take part."""
    if len(unfit) == 1:
        return RendezvousError(f"{unfit[0].node}: {unfit[0].problem}", unfit[0].remedy)
    return RendezvousError(
        f"{len(unfit)} nodes cannot take part\n" + "\n".join(f"  {each}" for each in unfit)
    )


async def each(
    guests: Sequence[Guest], talk: Callable[[Guest], Coroutine[Any, Any, None]], timeout: float
) -> None:
    """Talk to all `guests` at once. Raises `RendezvousError` with everything that went wrong."""
    unfit: list[NodeFault] = []

    async def one(guest: Guest) -> None:
        try:
            async with asyncio.timeout(timeout):
                await talk(guest)
        except TimeoutError:
            unfit.append(NodeFault(guest.node, f"it has not answered within {timeout:g} s"))
        except UnirunError as error:
            unfit.append(NodeFault(guest.node, error.problem, error.remedy))

    await asyncio.gather(*(one(guest) for guest in guests))
    if unfit:
        raise refusal(sorted(unfit, key=lambda each: [guest.node for guest in guests].index(each.node)))


async def assign(guests: Sequence[Guest], tasks: Mapping[str, Assigned]) -> None:
    """Give each node its task, and wait until all are ready. Raises `RendezvousError`: then nobody may start."""

    async def talk(guest: Guest) -> None:
        guest.stream.send(tasks[guest.node])
        expected(await guest.stream.receive(), Ready)

    await each(guests, talk, BIND_TIMEOUT)


async def tell(guests: Sequence[Guest], word: Message) -> None:
    """Send `word` to all `guests`; one that is gone will be missed by the master."""
    for guest in guests:
        guest.stream.send(word)


async def part(guests: Sequence[Guest], word: Message) -> None:
    """Send the last `word` to all `guests` and close their streams."""
    await tell(guests, word)
    await asyncio.gather(*(guest.stream.close() for guest in guests))


class Lobby:
    """Nodes that connect by themselves, until there are `most` with the one that is `here`. `names` are those of all
    nodes by rank, where they are known."""

    def __init__(self, most: int, here: Offer, names: Sequence[str] = ()) -> None:
        self._most, self._here, self._names = most, here, names
        self._guests: dict[str, Guest] = {}
        self._news = asyncio.Event()

    @property
    def guests(self) -> list[Guest]:
        """In the order of their ranks; those without one follow in the order of their arrival."""
        found = list(self._guests.values())
        ranked = sorted((each for each in found if each.offer.rank >= 0), key=lambda each: each.offer.rank)
        return [*ranked, *(each for each in found if each.offer.rank < 0)]

    async def admit(self, stream: Stream) -> None:
        """Hear one node, and keep its stream open."""
        try:
            first = await stream.receive()
        except WireError:
            await stream.close()
            return
        trouble = self._trouble(first, stream.peer)
        if trouble is not None:
            stream.send(trouble)
            await stream.close()
            return
        assert isinstance(first, Offer)
        # The caller that lets the nodes go closes their streams.
        self._guests[first.node] = Guest(stream, first)
        self._news.set()

    async def gather(self, least: int, timeout: float, last_call: float) -> None:
        """Wait until all have come; or, once `least` are there, `last_call` seconds for the others.

        Raises `RendezvousError` when fewer than `least` have come after `timeout` seconds. This node counts as one.
        """
        loop = asyncio.get_running_loop()
        end, began_last = loop.time() + timeout, 0.0
        while len(self._guests) + 1 < self._most:
            if len(self._guests) + 1 >= least and not began_last:
                began_last = loop.time()
                end = min(end, began_last + last_call)
            self._news.clear()
            try:
                async with asyncio.timeout_at(end):
                    await self._news.wait()
            except TimeoutError:
                if len(self._guests) + 1 < least:
                    raise self._missing(least, timeout) from None
                return

    def _trouble(self, first: Message, peer: str) -> Dismissed | None:
        if not isinstance(first, Offer):
            return Dismissed(f"the job has not begun, and {type(first).__name__} comes too early")
        others = [self._here, *(guest.offer for guest in self._guests.values())]
        if peer and first.node != peer:
            return Dismissed(f"its certificate is that of node {peer}, and it says that it is {first.node}")
        if first.node in (each.node for each in others):
            return Dismissed(
                f"a node called {first.node} is there already", "give it another name: --node-name"
            )
        if first.rank >= 0 and first.rank in (each.rank for each in others):
            return Dismissed(f"node rank {first.rank} is taken", "give each node a --node-rank of its own")
        if first.rank >= self._most or len(others) >= self._most:
            return Dismissed(f"the job has {self._most} nodes", "see --nnodes")
        return None

    def _missing(self, least: int, timeout: float) -> RendezvousError:
        here = [self._here, *(guest.offer for guest in self._guests.values())]
        ranks = {each.rank for each in here}
        gone = [rank for rank in range(self._most) if rank not in ranks]
        names = ", ".join(self._names[rank] if self._names else f"node rank {rank}" for rank in gone)
        missing = f"; missing: {names}" if -1 not in ranks else ""
        came = ", ".join(each.node for each in here)
        return RendezvousError(
            f"{len(here)} of {least} nodes have come within {timeout:g} s: {came}{missing}",
            "start the command on the others, or raise --rdzv-conf join_timeout=SECONDS",
        )
