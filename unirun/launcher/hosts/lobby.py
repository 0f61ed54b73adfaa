"""The lobby: nodes make offers and bind what their tasks need, then the launcher lets all start at once.

Whatever is wrong is told of all nodes at once, before anything starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from msgspec.structs import replace

from unirun.collocation import Inventory
from unirun.errors import Fault, RendezvousError, UnirunError, WireError
from unirun.failover.offers import false_name, inventory_of, misfits, taken_or_full, versions
from unirun.launcher.launch import agents_of, tasks_of
from unirun.launcher.planned import PlannedJob
from unirun.rendezvous.creation import store_for
from unirun.rendezvous.endpoints import BIND_TIMEOUT
from unirun.wire.aio import Stream
from unirun.wire.messages import AgentTask, Dismissed, Offer, Ready, expected
from unirun.wire.reports import Message

T = TypeVar("T")


def refusal(unfit: Sequence[Fault]) -> RendezvousError:
    """One error for all nodes that cannot take part."""
    if len(unfit) == 1:
        return RendezvousError(f"{unfit[0].where}: {unfit[0].problem}", unfit[0].remedy)
    return RendezvousError(
        f"{len(unfit)} nodes cannot take part\n" + "\n".join(f"  {each}" for each in unfit)
    )


async def from_all(
    nodes: Sequence[str],
    ask: Callable[[str], Awaitable[T]],
    timeout: float,
    remedy: Callable[[str], str] = lambda _: "",
) -> tuple[dict[str, T], list[Fault]]:
    """Ask all `nodes` at once. Returns the answers, and what went wrong with the others; `remedy` is for those that
    have not answered within `timeout` seconds."""
    answers: dict[str, T] = {}
    unfit: dict[str, Fault] = {}

    async def one(node: str) -> None:
        try:
            async with asyncio.timeout(timeout):
                answers[node] = await ask(node)
        except TimeoutError:
            unfit[node] = Fault(node, f"it has not answered within {timeout:g} s", remedy(node))
        except UnirunError as error:
            unfit[node] = Fault(node, error.problem, error.remedy)

    await asyncio.gather(*map(one, nodes))
    return answers, [unfit[node] for node in nodes if node in unfit]


class Lobby:
    """The nodes of a job that has not begun: their offers, and the streams to all but the one that is `here`.

    There are `most` of them; `names` are theirs by rank, where they are known.
    """

    def __init__(self, most: int, here: Offer | None = None, names: Sequence[str] = ()) -> None:
        self._most, self._names = most, names
        self._offers = {} if here is None else {here.node: here}
        self._streams: dict[str, Stream] = {}
        self._news = asyncio.Event()

    @property
    def offers(self) -> list[Offer]:
        """That of the node here first, then in the order of their ranks; those without one follow in the order of their
        arrival."""
        return sorted(
            self._offers.values(),
            key=lambda each: (each.node in self._streams, each.rank if each.rank >= 0 else self._most),
        )

    def enter(self, offer: Offer, stream: Stream) -> None:
        """A node has made an offer."""
        self._offers[offer.node], self._streams[offer.node] = offer, stream
        self._news.set()

    async def admit(self, stream: Stream) -> None:
        """Hear one node that has connected by itself, and keep its stream open."""
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
        self.enter(first, stream)

    async def gather(self, least: int, timeout: float, last_call: float) -> None:
        """Wait until all have come; or, once `least` are there, `last_call` seconds for the others. One that has gone
        has not come.

        Raises `RendezvousError` when fewer than `least` have come after `timeout` seconds.
        """
        loop = asyncio.get_running_loop()
        latest = end = loop.time() + timeout
        while True:
            self._forget_gone()
            if len(self._offers) == self._most:
                return
            enough = len(self._offers) >= least
            end = min(end, loop.time() + last_call) if enough else latest
            if loop.time() >= end:
                if enough:
                    return
                raise self._missing(least, timeout)
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(end):
                    await self._news.wait()

    def _forget_gone(self) -> None:
        """Forget the nodes whose commands have ended. They may come again."""
        for node in [node for node, stream in self._streams.items() if stream.ended]:
            self._streams.pop(node).abort()
            del self._offers[node]

    async def assign(
        self,
        make_plan: Callable[[Inventory], PlannedJob],
        *,
        uid: str,
        store: str | None = None,
        insecure: bool = False,
        cwd: str = "",
    ) -> tuple[PlannedJob, dict[str, AgentTask]]:
        """Plan the job for all nodes, let those go that it excludes, and give the others their tasks, in the directory
        `cwd`, empty for each one's own. Wait until all but the one that is here are ready. Returns the plan and the
        tasks; the first is that of the head.

        Raises `RendezvousError` with all nodes that cannot take part, and what `make_plan` raises: then nobody may
        start.
        """
        if found := misfits(self.offers, versions()):
            raise refusal(found)
        planned = make_plan(inventory_of(self.offers))
        excluded = self._offers.keys() & {*planned.placement.excluded}
        await self._part(
            excluded & self._streams.keys(), Dismissed("the job excludes this node", "see --exclude")
        )
        for node in excluded:
            del self._offers[node]
        url, members = store_for(store, self.offers, insecure=insecure)
        first = self.offers[0]
        if first.masters is None:
            raise RendezvousError(f"{first.node} has not told where masters listen")
        masters = (first.node,) if url is None else agents_of(planned)
        common = {"uid": uid, "head": first.masters, "store": url or "", "etcd": members, "cwd": cwd}
        tasks = {node: replace(task, **common) for node, task in tasks_of(planned, masters).items()}
        tasks[first.node] = replace(tasks[first.node], planned=planned.to_json())

        async def ask(node: str) -> None:
            self._streams[node].send(tasks[node])
            expected(await self._streams[node].receive(), Ready)

        _, unfit = await from_all([node for node in tasks if node in self._streams], ask, BIND_TIMEOUT)
        if unfit:
            raise refusal(unfit)
        return planned, tasks

    def tell(self, word: Message) -> None:
        """Send `word` to all nodes; one that is gone will be missed by the master."""
        for stream in self._streams.values():
            stream.send(word)

    async def part(self, word: Message) -> None:
        """Send the last `word` to all nodes and close their streams."""
        await self._part([*self._streams], word)

    async def _part(self, nodes: Iterable[str], word: Message) -> None:
        for node in nodes:
            self._streams[node].send(word)
        await asyncio.gather(*(self._streams.pop(node).close() for node in nodes))

    def _trouble(self, first: Message, peer: str) -> Dismissed | None:
        if not isinstance(first, Offer):
            return Dismissed(f"the job has not begun, and {type(first).__name__} comes too early")
        self._forget_gone()
        refusal = false_name(first, peer)
        if refusal is None and first.rank in (each.rank for each in self._offers.values() if each.rank >= 0):
            refusal = Dismissed(f"node rank {first.rank} is taken", "give each node a --node-rank of its own")
        count = max(len(self._offers), first.rank)
        return refusal or taken_or_full(first, self._offers, count, self._most)

    def _missing(self, least: int, timeout: float) -> RendezvousError:
        ranks = {each.rank for each in self._offers.values()}
        gone = [rank for rank in range(self._most) if rank not in ranks]
        names = ", ".join(self._names[rank] if self._names else f"node rank {rank}" for rank in gone)
        missing = f"; missing: {names}" if -1 not in ranks else ""
        came = ", ".join(each.node for each in self.offers)
        return RendezvousError(
            f"{len(self._offers)} of {least} nodes have come within {timeout:g} s: {came}{missing}",
            "start the command on the others, or raise --rdzv-conf join_timeout=SECONDS",
        )
