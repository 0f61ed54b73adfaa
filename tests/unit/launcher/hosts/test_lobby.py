"""The lobby over streams that are real, without a network: socket pairs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from tests.unit.launcher.hosts.offers import HEAD, made, offer
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import RendezvousError
from unirun.launcher.hosts.lobby import Lobby
from unirun.launcher.planned import PlannedJob
from unirun.wire.aio import Stream
from unirun.wire.messages import AgentTask, Dismissed, Ready, Stop
from unirun.wire.reports import Message


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


def names(lobby: Lobby) -> list[str]:
    return [each.node for each in lobby.offers]


async def full(*nodes: str) -> tuple[Lobby, list[Stream]]:
    """A lobby with the head and `nodes`, and their ends of the streams."""
    lobby, streams = Lobby(len(nodes) + 1, offer("h0", masters=HEAD)), []
    for node in nodes:
        here, there = await pair()
        lobby.enter(offer(node), here)
        streams.append(there)
    return lobby, streams


async def visit(lobby: Lobby, first: Message) -> Stream:
    """A node connects and says `first`. It stays as long as the lobby has its stream."""
    here, there = await pair()
    here.node = there  # type: ignore[attr-defined]
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
            assert names(lobby) == ["h0", "h1", "h2", "x", "y"]

        run(play)

    @pytest.mark.parametrize(
        ("second", "says"),
        [
            (offer("h0"), "the job has a node called h0"),
            (offer("h1", 2), "the job has a node called h1"),
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
            assert names(lobby) == ["h0", "h1"]

        run(play)

    def test_a_node_that_has_gone_makes_room_for_another(self) -> None:
        """Its command was ended, and is started again."""

        async def play() -> None:
            lobby = Lobby(2, offer("h0", 0))
            first = await visit(lobby, offer("h1", 1))
            await asyncio.sleep(0.01)
            assert names(lobby) == ["h0", "h1"]
            await first.close()
            await asyncio.sleep(0.01)
            second = await visit(lobby, offer("h1", 1))
            await lobby.gather(2, 5.0, 5.0)
            assert names(lobby) == ["h0", "h1"]
            await lobby.part(Ready())
            assert await second.receive() == Ready()

        run(play)

    def test_a_node_that_has_gone_has_not_come(self) -> None:
        async def play() -> None:
            lobby = Lobby(2, offer("h0", 0))
            await (await visit(lobby, offer("h1", 1))).close()
            await asyncio.sleep(0.01)
            with pytest.raises(RendezvousError, match="1 of 2 nodes have come .* missing: node rank 1"):
                await lobby.gather(2, 0.1, 5.0)

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
            assert names(lobby) == ["h0", "h1"]

        run(play)


class TestTheStart:
    def test_all_nodes_get_their_task_and_begin_when_all_are_ready(self) -> None:
        async def play() -> None:
            lobby, nodes = await full("h1", "h2")
            assigning = asyncio.ensure_future(lobby.assign(made, uid="u1", cwd="/work"))
            told = []
            for number, node in enumerate(nodes, 1):
                word = await node.receive()
                assert isinstance(word, AgentTask)
                assert (word.node, word.cwd, word.uid, word.head) == (f"h{number}", "/work", "u1", HEAD)
                assert not assigning.done()
                told.append(word)
                node.send(Ready())
            planned, tasks = await assigning
            assert [*tasks.values()][1:] == told
            assert PlannedJob.from_json(tasks["h0"].planned) == planned
            await lobby.part(Ready())
            assert [await node.receive() for node in nodes] == [Ready(), Ready()]

        run(play)

    def test_a_first_node_that_is_not_here_gets_the_plan(self) -> None:
        async def play() -> None:
            lobby, streams = Lobby(3), []
            for number in range(3):
                here, there = await pair()
                lobby.enter(offer(f"h{number}", masters=None if number else HEAD), here)
                streams.append(there)
            assigning = asyncio.ensure_future(lobby.assign(made, uid="u1"))
            first, *others = [await stream.receive() for stream in streams]
            assert isinstance(first, AgentTask)
            assert PlannedJob.from_json(first.planned).spec == first.spec
            assert all(isinstance(each, AgentTask) and not each.planned for each in others)
            assigning.cancel()

        run(play)

    def test_agents_elsewhere_can_start_masters_where_they_reach_the_store(self) -> None:
        async def play() -> None:
            for store, masters in ((None, ("h0",)), ("etcd://h9:2379", ("h0", "h1"))):
                lobby, (node,) = await full("h1")
                assigning = asyncio.ensure_future(lobby.assign(made, uid="u1", store=store))
                word = await node.receive()
                assert isinstance(word, AgentTask)
                assert (word.nodes, word.store) == (masters, store or "")
                assigning.cancel()

        run(play)

    def test_a_node_that_the_job_excludes_is_let_go(self) -> None:
        async def play() -> None:
            lobby, (out, *nodes) = await full("out", "h1", "h2")
            assigning = asyncio.ensure_future(lobby.assign(made, uid="u1"))
            assert await out.receive() == Dismissed("the job excludes this node", "see --exclude")
            await nodes[0].receive()
            assert names(lobby) == ["h0", "h1", "h2"]
            assigning.cancel()

        run(play)

    def test_a_head_that_the_job_excludes_is_an_error(self) -> None:
        async def play() -> None:
            lobby = Lobby(2, offer("out", masters=HEAD))
            lobby.enter(offer("h1"), (await pair())[0])
            with pytest.raises(RendezvousError, match="h1 has not told where masters listen"):
                await lobby.assign(made, uid="u1")

        run(play)

    def test_every_node_that_cannot_take_part_is_named_in_one_error(self) -> None:
        async def play() -> None:
            lobby, nodes = await full("h1", "h2", "h3")
            nodes[0].send(Dismissed("it has no train.py", "put it there"))
            nodes[1].send(Ready())
            await nodes[2].close()
            with pytest.raises(RendezvousError) as caught:
                await lobby.assign(made, uid="u1")
            lines = str(caught.value).splitlines()
            assert lines[0] == "2 nodes cannot take part"
            assert lines[1] == "  h1: it has no train.py; put it there"
            assert lines[2].startswith("  h3: the peer closed the stream")

        run(play)

    def test_versions_that_differ_are_told_before_anything_is_planned(self) -> None:
        async def play() -> None:
            lobby = Lobby(2, offer("h0"))
            lobby.enter(offer("h1", versions={"torch": "1.0"}), (await pair())[0])
            with pytest.raises(RendezvousError, match=r"h1: it has torch 1\.0"):
                await lobby.assign(made, uid="u1")

        run(play)
