"""The admission of nodes to the running job: the master's side of their streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from unirun.errors import WireError
from unirun.failover.arrivals import trouble
from unirun.failover.events import Arrived, Event
from unirun.failover.offers import AgentTask, versions
from unirun.failover.state import JobState
from unirun.observe.jobdir import JobDir
from unirun.wire.address import Address, TcpAddress
from unirun.wire.aio import Stream
from unirun.wire.messages import Assigned, Dismissed, Message, Offer, Ready

BIND = 30.0
"""Seconds in which a node that has its task must have bound its endpoints."""


class Admission:
    """Answers nodes that make an offer, as the lobby does before the job has begun.

    `address` is where the master listens, by TCP in a job of several hosts. `state` gives the present state, and
    `apply` takes a step.
    """

    def __init__(
        self,
        job: JobDir,
        address: Address,
        state: Callable[[], JobState],
        apply: Callable[[Event], bool],
    ) -> None:
        self._job, self._address, self._state, self._apply = job, address, state, apply
        self._guests: dict[str, Stream] = {}

    async def hear(self, offer: Offer, stream: Stream) -> None:
        """Give a node its task. When it has bound its endpoints, it is a part of the job."""
        if not isinstance(self._address, TcpAddress):
            refusal: Dismissed | None = Dismissed(
                "the job runs on one host", "start it with --hosts or --nnodes"
            )
        elif stream.peer not in ("", offer.node):
            refusal = Dismissed(
                f"its certificate is that of node {stream.peer}, and it says that it is {offer.node}"
            )
        elif offer.node in self._guests:
            refusal = Dismissed(
                f"a node called {offer.node} is joining already", "give it another name: --node-name"
            )
        else:
            refusal = trouble(self._state(), offer, versions())
        if refusal is not None:
            stream.send(refusal)
            return
        assert isinstance(self._address, TcpAddress)
        self._guests[offer.node] = stream
        try:
            # A node that goes away before it is ready has changed nothing.
            with suppress(WireError, TimeoutError):
                stream.send(self._assigned(offer.node, self._address))
                async with asyncio.timeout(BIND):
                    word = await stream.receive()
                if isinstance(word, Ready):
                    self._apply(Arrived(offer))
                    # The answer is sent when that is in the store; then the node ends the stream.
                    await stream.receive()
        finally:
            del self._guests[offer.node]

    def answer(self, node: str, message: Message) -> None:
        """Tell a node what was decided."""
        if node in self._guests:
            self._guests[node].send(message)

    def _assigned(self, node: str, head: TcpAddress) -> Assigned:
        state, job = self._state(), self._job
        task = AgentTask(state.spec, node, (*state.nodes, node), "", "")
        return Assigned(job.run_id, job.uid, task.to_json(), head, job.shared_store)
