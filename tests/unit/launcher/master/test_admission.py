"""The master's side of a node that wants to join, over streams that are real, without a network: socket pairs."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.json import encode as to_json
from msgspec.structs import replace

from tests.unit.failover.multi_node import scripts
from tests.waiting import WAIT_TIMEOUT
from unirun.collocation import Inventory, Node
from unirun.failover.draft import Arrived, Event
from unirun.failover.offers import versions
from unirun.launcher.master.shell import NodeAdmission
from unirun.observe.jobdir import JobDir
from unirun.wire.address import Address, TcpAddress, UnixAddress
from unirun.wire.aio import Stream
from unirun.wire.frames import from_json
from unirun.wire.messages import AgentTask, Dismissed, Offer, Ready
from unirun.wire.reports import Message

HERE = UnixAddress.here("/master.sock")
HEAD = TcpAddress("10.0.0.1", 29400, "n0")


def offer(node: str) -> Offer:
    return Offer(node, node, -1, to_json(to_builtins(Node(node, (0,)))).decode(), versions())


class AdmissionHarness:
    """A master with a running job, as far as it is about nodes that join."""

    def __init__(self, folder: Path, address: Address = HEAD) -> None:
        job = JobDir(folder / "mine")
        job.path.mkdir()
        (job.path / "store").write_text(job.own_store)
        (job.path / "uid").write_text("u1")
        self.state = scripts().running().state
        self.applied: list[Event] = []
        self.admission = NodeAdmission(job, address, lambda: self.state, self.apply)

    def apply(self, event: Event) -> bool:
        self.applied.append(event)
        return True

    async def visit(self, first: Offer) -> tuple[Stream, asyncio.Task[None]]:
        ours, theirs = socket.socketpair()
        here = Stream(*await asyncio.open_unix_connection(sock=ours))
        there = Stream(*await asyncio.open_unix_connection(sock=theirs))
        return there, asyncio.ensure_future(self.admission.hear(first, here))


async def answer(stream: Stream) -> Message:
    async with asyncio.timeout(WAIT_TIMEOUT):
        return await stream.receive()


def test_a_node_gets_its_task_and_is_let_in_when_it_is_ready_and_that_is_written(tmp_path: Path) -> None:
    async def play() -> None:
        harness = AdmissionHarness(tmp_path)
        node, hearing = await harness.visit(offer("n9"))
        word = await answer(node)
        assert isinstance(word, AgentTask)
        assert (word.uid, word.head, word.store) == ("u1", HEAD, "")
        assert (word.spec, word.node, word.nodes) == (harness.state.spec, "n9", ("n0", "n1", "n2", "n9"))
        assert word.cwd == os.getcwd()
        node.send(Ready())
        async with asyncio.timeout(WAIT_TIMEOUT):
            while not harness.applied:
                await asyncio.sleep(0)
        assert harness.applied == [Arrived(offer("n9"))]
        harness.admission.answer("n9", Ready())
        assert await answer(node) == Ready()
        await node.close()
        await hearing

    asyncio.run(play())


def test_a_node_gets_the_environment_of_the_job_which_a_master_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_JOB", "1")
    monkeypatch.setenv("SSH_CONNECTION", "of the host")
    monkeypatch.setenv("UNIRUN_STORE_PASSWORD", "secret")

    async def play() -> None:
        word = await answer((await AdmissionHarness(tmp_path).visit(offer("n9")))[0])
        assert isinstance(word, AgentTask)
        assert word.env is not None
        assert word.env["OF_THE_JOB"] == "1"
        assert not {"SSH_CONNECTION", "UNIRUN_STORE_PASSWORD"} & word.env.keys()

    asyncio.run(play())


def test_a_host_that_was_lost_gets_the_number_of_its_next_life(tmp_path: Path) -> None:
    async def play() -> None:
        harness = AdmissionHarness(tmp_path)
        placement = replace(harness.state.placement, lost=("n2",))
        harness.state = replace(harness.state, placement=placement)
        node, hearing = await harness.visit(offer("n2"))
        word = await answer(node)
        assert isinstance(word, AgentTask)
        assert (word.node, word.nodes) == ("n2.2", ("n0", "n1", "n2", "n2.2"))
        node.send(Ready())
        async with asyncio.timeout(WAIT_TIMEOUT):
            while not harness.applied:
                await asyncio.sleep(0)
        assert harness.applied == [Arrived(replace(offer("n2"), node="n2.2"))]
        await node.close()
        await hearing

    asyncio.run(play())


def test_a_node_is_told_of_the_store_with_the_place_where_its_own_directory_is_put_in(tmp_path: Path) -> None:
    async def play() -> None:
        harness = AdmissionHarness(tmp_path)
        url = "etcd://10.0.0.1:2379?cacert={job}/tls/ca.pem"
        (tmp_path / "mine" / "store").write_text(url)
        word = await answer((await harness.visit(offer("n9")))[0])
        assert isinstance(word, AgentTask)
        assert word.store == url

    asyncio.run(play())


def test_a_node_that_goes_away_before_it_is_ready_has_changed_nothing(tmp_path: Path) -> None:
    async def play() -> None:
        harness = AdmissionHarness(tmp_path)
        node, hearing = await harness.visit(offer("n9"))
        await answer(node)
        await node.close()
        await hearing
        assert harness.applied == []
        node, _ = await harness.visit(offer("n9"))
        assert isinstance(await answer(node), AgentTask)

    asyncio.run(play())


def test_a_made_up_node_of_a_job_on_one_host_gets_a_task_without_a_head(tmp_path: Path) -> None:
    async def play() -> None:
        harness = AdmissionHarness(tmp_path, HERE)
        placement = replace(harness.state.placement, lost=("n2",))
        harness.state = replace(harness.state, placement=placement)
        node, hearing = await harness.visit(replace(offer("n2"), inventory=""))
        word = await answer(node)
        assert isinstance(word, AgentTask)
        assert (word.node, word.head, word.addr) == ("n2.2", None, harness.state.spec.master_addr)
        node.send(Ready())
        await node.close()
        await hearing
        (arrived,) = harness.applied
        assert isinstance(arrived, Arrived)
        assert from_json(Node, arrived.offer.inventory) == harness.state.inventory.nodes[2]

    asyncio.run(play())


@pytest.mark.parametrize(
    ("address", "node", "nodes", "problem"),
    [
        (HEAD, "n1", 3, "the job has a node called n1"),
        (HERE, "n1", 3, "the job has a node called n1"),
        (HERE, "n9", 1, "the job runs on one host"),
    ],
)
def test_a_node_that_is_not_let_in_is_told_why(
    tmp_path: Path, address: Address, node: str, nodes: int, problem: str
) -> None:
    async def play() -> None:
        harness = AdmissionHarness(tmp_path, address)
        inventory = Inventory(harness.state.inventory.nodes[:nodes])
        harness.state = replace(harness.state, inventory=inventory)
        stream, hearing = await harness.visit(offer(node))
        word = await answer(stream)
        assert isinstance(word, Dismissed)
        assert word.problem == problem
        await hearing

    asyncio.run(play())


def test_of_two_that_join_under_one_name_the_second_is_refused(tmp_path: Path) -> None:
    async def play() -> None:
        harness = AdmissionHarness(tmp_path)
        first, _ = await harness.visit(offer("n9"))
        await answer(first)
        second, _ = await harness.visit(offer("n9"))
        word = await answer(second)
        assert isinstance(word, Dismissed)
        assert word.problem == "the job has a node called n9"

    asyncio.run(play())
