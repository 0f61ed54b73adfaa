"""Commands on each host: the head and a node in one process, over loopback, up to the start of the agents."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.unit.wire.endpoints import Endpoint
from tests.waiting import WAIT_TIMEOUT
from unirun.collocation import Inventory
from unirun.errors import RendezvousError, WireError
from unirun.failover.offers import AgentTask
from unirun.launcher.hosts import ssh
from unirun.launcher.hosts.byhand import Meeting, run_head, run_member
from unirun.launcher.hosts.lobby import early_agent, offer, take_part
from unirun.launcher.planned import PlannedJob
from unirun.observe.jobdir import job_at
from unirun.rendezvous.creation import create_job
from unirun.spec.job import Entry, JobSpec, RoleSpec
from unirun.wire.address import TcpAddress
from unirun.wire.aio import Stream, StreamServer
from unirun.wire.blocking import BlockingStream
from unirun.wire.handshake import new_token
from unirun.wire.messages import Assigned, Dismissed, Offer, Ready

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

    head = Meeting("n0", "127.0.0.1", 0, new_token(), WAIT_TIMEOUT, head=True, least=2, most=2)
    with ThreadPoolExecutor() as pool:
        leading = pool.submit(run_head, head, SPEC, never, store=None, quiet=True, publish=withdrawn)
        endpoint = told.get(timeout=WAIT_TIMEOUT)
        node = Meeting("n1", endpoint.addr, endpoint.port, head.token, WAIT_TIMEOUT)
        with pytest.raises(RendezvousError, match="the job was not started: the note where the head is"):
            run_member(node, None, quiet=True)
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
        node = Meeting("n1", there.addr, there.port, new_token(), 600.0, insecure=insecure)
        try:
            with pytest.raises(WireError, match="is not node|is the token right"):
                run_member(node, None, quiet=True)
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
    script = tmp_path / "train.py"
    script.touch()
    roles = (RoleSpec("actor", 1, Entry("script", str(script))),)
    spec = JobSpec("mine", "mine", roles, ("actor",))
    task = AgentTask(spec, "n1", ("n0", "n1"), "", str(tmp_path))
    with early_agent(None) as agent, ThreadPoolExecutor() as pool:
        offered = offer("n1", addr="127.0.0.1")
        joining = pool.submit(take_part, theirs, offered, agent, new_token(), insecure=True)
        assert isinstance(ours.receive(WAIT_TIMEOUT), Offer)
        head = TcpAddress("127.0.0.1", 1, "n0")
        ours.send(Assigned("mine", "u1", head, task.to_json()))
        assert ours.receive(WAIT_TIMEOUT) == Ready()
        folder = job_at("mine", "n1").path
        assert (folder / "token").exists()
        ours.send(Dismissed("another node cannot take part"))
        with pytest.raises(RendezvousError, match="another node cannot take part"):
            joining.result(WAIT_TIMEOUT)
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(agent.pid, 0)
    for stream in (ours, theirs):
        stream.close()
