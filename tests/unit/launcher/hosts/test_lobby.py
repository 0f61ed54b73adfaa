"""The lobby over streams that are real, without a network: socket pairs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
from msgspec.json import encode as to_json

from tests.waiting import WAIT_TIMEOUT
from unirun.collocation.inventory import Node
from unirun.errors import RendezvousError
from unirun.launcher.hosts.lobby import Guest, Lobby, assign, part
from unirun.wire.address import TcpAddress
from unirun.wire.aio import Stream
from unirun.wire.messages import Assigned, Dismissed, Go, Message, Offer, Ready, Stop

OURS = {"python": "3.11", "torch": "2.13.0", "unirun": "0.1.0"}
HEAD = TcpAddress("10.0.0.1", 29400, "h0")


def offer(node: str, rank: int = -1, versions: dict[str, str] | None = None, **more: object) -> Offer:
    inventory = to_json(Node(node, (0, 1))).decode()
    return Offer(node, node, rank, inventory, OURS | (versions or {}), **more)  # type: ignore[arg-type]


def run(play: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(WAIT_TIMEOUT):
            await play()

    asyncio.run(within())


async def pair() -> tuple[Stream, Stream]:
    ours, theirs = socket.socketpair()
    return Stream(*await asyncio.open_unix_connection(sock=ours)), Stream(
        *await asyncio.open_unix_connection(sock=theirs)
    )


async def guest(node: str) -> tuple[Guest, Stream]:
    here, there = await pair()
    return Guest(here, offer(node)), there


async def visit(lobby: Lobby, first: Message) -> Stream:
    """A node connects and says `first`."""
    here, there = await pair()
    task = asyncio.ensure_future(lobby.admit(here))
    there.send(first)
    there.task = task  # type: ignore[attr-defined]
    return there


class TestWhoIsLetIn:
    def test_nodes_are_in_the_order_of_their_ranks_and_others_in_the_order_of_their_arrival(self) -> None:
        async def play() -> None:
            lobby = Lobby(5, offer("h0", 0))
            for each in (offer("h2", 2), offer("x"), offer("h1", 1), offer("y")):
                await visit(lobby, each)
                await asyncio.sleep(0.01)
            await lobby.gather(5, 5.0, 5.0)
            assert [guest.node for guest in lobby.guests] == ["h1", "h2", "x", "y"]

        run(play)

    @pytest.mark.parametrize(
        ("second", "says"),
        [
            (offer("h0"), "a node called h0 is there already"),
            (offer("h1", 2), "a node called h1 is there already"),
            (offer("h2", 1), "node rank 1 is taken"),
            (offer("h2", 3), "the job has 3 nodes"),
            (Stop(15, "x"), "Stop comes too early"),
        ],
    )
    def test_a_node_that_does_not_fit_is_told_why_and_the_others_are_kept(
        self, second: Message, says: str
    ) -> None:
        async def play() -> None:
            lobby = Lobby(3, offer("h0", 0))
            await visit(lobby, offer("h1", 1))
            await asyncio.sleep(0.01)
            answer = await (await visit(lobby, second)).receive()
            assert isinstance(answer, Dismissed)
            assert says in answer.problem
            assert [guest.node for guest in lobby.guests] == ["h1"]

        run(play)

    def test_nodes_that_do_not_come_are_named_by_their_ranks_or_their_names(self) -> None:
        async def play() -> None:
            for names, missing in (((), "node rank 1, node rank 3"), (("a", "b", "c", "d"), "b, d")):
                lobby = Lobby(4, offer("h0", 0), names)
                await visit(lobby, offer("h2", 2))
                with pytest.raises(RendezvousError, match=f"2 of 4 nodes have come .* missing: {missing}"):
                    await lobby.gather(4, 0.1, 5.0)

        run(play)

    def test_the_least_number_of_nodes_is_enough_after_the_last_call(self) -> None:
        async def play() -> None:
            lobby = Lobby(4, offer("h0"))
            await visit(lobby, offer("h1"))
            await lobby.gather(2, 60.0, 0.05)
            assert [guest.node for guest in lobby.guests] == ["h1"]

        run(play)


class TestTheStart:
    def test_all_nodes_get_their_task_and_go_when_all_are_ready(self) -> None:
        async def play() -> None:
            guests, nodes = zip(*[await guest(f"h{n}") for n in (1, 2)], strict=True)
            tasks = {f"h{n}": Assigned("run", "uid", f"task {n}", HEAD) for n in (1, 2)}
            assigning = asyncio.ensure_future(assign(guests, tasks))
            for number, node in enumerate(nodes, 1):
                assert await node.receive() == tasks[f"h{number}"]
                assert not assigning.done()
                node.send(Ready())
            await assigning
            await part(guests, Go())
            assert [await node.receive() for node in nodes] == [Go(), Go()]

        run(play)

    def test_every_node_that_cannot_take_part_is_named_in_one_error(self) -> None:
        async def play() -> None:
            guests, nodes = zip(*[await guest(f"h{n}") for n in (1, 2, 3)], strict=True)
            tasks = {f"h{n}": Assigned("run", "uid", "", HEAD) for n in (1, 2, 3)}
            nodes[0].send(Dismissed("it has no train.py", "put it there"))
            nodes[1].send(Ready())
            await nodes[2].close()
            with pytest.raises(RendezvousError) as caught:
                await assign(guests, tasks)
            lines = str(caught.value).splitlines()
            assert lines[0] == "2 nodes cannot take part"
            assert lines[1] == "  h1: it has no train.py; put it there"
            assert lines[2].startswith("  h3: the peer closed the stream")

        run(play)
