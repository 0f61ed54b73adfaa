"""Commands on each host: the head and a node in one process, over loopback, up to the start of the agents."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest
from msgspec.structs import replace

from tests.unit.wire.endpoints import Endpoint
from tests.waiting import WAIT_TIMEOUT
from unirun.collocation import Inventory
from unirun.errors import RendezvousError, WireError
from unirun.launcher.hosts import ssh
from unirun.launcher.hosts.byhand import run_head, run_member
from unirun.launcher.hosts.node import take_part
from unirun.launcher.planned import PlannedJob
from unirun.observe.jobdir import job_at
from unirun.rendezvous.creation import create_job
from unirun.spec.job import Entry, JobSpec, RoleSpec
from unirun.wire.address import TcpAddress
from unirun.wire.aio import Stream, StreamServer
from unirun.wire.blocking import BlockingStream
from unirun.wire.handshake import new_token
from unirun.wire.messages import AgentTask, Dismissed, Invite, Offer, Ready

SPEC = JobSpec(
    "mine", "mine", (RoleSpec("actor", 1, Entry("program", "sleep"), contract="none"),), ("actor",)
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the directories of jobs."""
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.starts_processes
def test_nodes_that_have_come_are_told_why_the_head_gives_up(home: Path) -> None:
    told: SimpleQueue[TcpAddress] = SimpleQueue()

    @contextmanager
    def withdrawn(address: TcpAddress) -> Iterator[None]:
        told.put(address)
        yield
        raise RendezvousError("the note where the head is cannot be removed")

    def never(_: Inventory) -> PlannedJob:
        raise AssertionError

    place = TcpAddress("127.0.0.1", 0, "")
    head = Invite(new_token().hex(), "n0", spec=SPEC, head=place, leads=True)
    lead = partial(
        run_head, head, (2, 2), never, timeout=WAIT_TIMEOUT, store=None, quiet=True, publish=withdrawn
    )
    with ThreadPoolExecutor() as pool:
        leading = pool.submit(lead)
        endpoint = told.get(timeout=WAIT_TIMEOUT)
        node = Invite(head.token, "n1", head=endpoint)
        with pytest.raises(RendezvousError, match="the job was not started: the note where the head is"):
            run_member(node, timeout=WAIT_TIMEOUT, quiet=True)
        with pytest.raises(RendezvousError, match="cannot be removed"):
            leading.result(WAIT_TIMEOUT)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((endpoint.addr, endpoint.port))


@pytest.mark.starts_processes
@pytest.mark.parametrize("insecure", [False, True])
def test_a_node_with_another_secret_fails_at_once(tmp_path: Path, insecure: bool) -> None:
    endpoint = Endpoint("insecure" if insecure else "tls", tmp_path)

    async def head(told: SimpleQueue[TcpAddress], over: threading.Event) -> None:
        server = StreamServer(endpoint.listen(), endpoint.credentials, Stream.close, lambda *_: None)
        assert isinstance(endpoint.address, TcpAddress)
        told.put(endpoint.address)
        await asyncio.to_thread(over.wait, WAIT_TIMEOUT)
        server.close()
        await server.closed()

    told: SimpleQueue[TcpAddress] = SimpleQueue()
    over = threading.Event()
    with ThreadPoolExecutor() as pool:
        leading = pool.submit(asyncio.run, head(told, over))
        there = told.get(timeout=WAIT_TIMEOUT)
        node = Invite(new_token().hex(), "n1", head=there, insecure=insecure)
        try:
            with pytest.raises(WireError, match="is not node|is the token right"):
                run_member(node, timeout=WAIT_TIMEOUT, quiet=True)
        finally:
            over.set()
        leading.result(WAIT_TIMEOUT)


def test_a_command_waits_long_for_a_master_whose_host_takes_connections(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master is busy, or strangers take the places of its listener."""
    monkeypatch.setattr(ssh, "NO_MASTER_TIMEOUT", 0.0)
    job, lock = create_job("run-1", new_token(), head=TcpAddress("127.0.0.1", 1, "n0"))
    os.close(lock)
    processes = ssh.RemoteProcesses(job, ["n0"])
    assert not processes.given_up(True, busy=True)
    assert processes.given_up(True)
    monkeypatch.setattr(ssh, "NO_MASTER_BUSY_TIMEOUT", -1.0)
    assert processes.given_up(True, busy=True)


@pytest.mark.starts_processes
def test_a_node_that_is_ready_and_then_dismissed_keeps_no_directory_of_the_job(tmp_path: Path) -> None:
    ours, theirs = map(BlockingStream, socket.socketpair())
    children = psutil.Process().children()
    script = tmp_path / "train.py"
    script.touch()
    roles = (RoleSpec("actor", 1, Entry("script", str(script))),)
    spec = JobSpec("mine", "mine", roles, ("actor",))
    task = AgentTask(spec, "n1", ("n0", "n1"), "", str(tmp_path))
    invite = Invite(new_token().hex(), "n1", insecure=True)
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(take_part, invite, theirs)
        assert isinstance(ours.receive(WAIT_TIMEOUT), Offer)
        ours.send(replace(task, uid="u1", head=TcpAddress("127.0.0.1", 1, "n0")))
        assert ours.receive(WAIT_TIMEOUT) == Ready()
        folder = job_at("mine", "n1").path
        assert (folder / "token").exists()
        ours.send(Dismissed("another node cannot take part"))
        with pytest.raises(RendezvousError, match="another node cannot take part"):
            joining.result(WAIT_TIMEOUT)
    assert not folder.exists()
    assert psutil.Process().children() == children
    for stream in (ours, theirs):
        stream.close()
