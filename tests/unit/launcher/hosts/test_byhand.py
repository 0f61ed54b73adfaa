"""Commands on each host, up to the start of the agents, over loopback.

A command forks its agent, which only a process with one thread may do: commands are processes of their own here.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from tests.unit.wire.endpoints import Endpoint
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import JobError
from unirun.launcher.hosts import byhand, ssh
from unirun.launcher.hosts.byhand import TOKEN_INTERVAL, shared_secret
from unirun.observe.jobdir import job_at
from unirun.rendezvous.creation import create_job
from unirun.spec.job import Entry, JobSpec, RoleSpec
from unirun.wire.address import TcpAddress
from unirun.wire.aio import Stream, StreamServer
from unirun.wire.blocking import BlockingStream
from unirun.wire.frames import encode
from unirun.wire.handshake import new_token
from unirun.wire.messages import AgentTask, Dismissed, Invite, Offer, Ready

SPEC = JobSpec(
    "mine", "mine", (RoleSpec("actor", 1, Entry("program", "sleep"), contract="none"),), ("actor",)
)

COMMAND = f"""
import json, os, socket, sys, time
from contextlib import contextmanager
from unirun.errors import RendezvousError, UnirunError
from unirun.launcher.hosts.byhand import run_head, run_member
from unirun.launcher.hosts.node import take_part
from unirun.launcher.process import children
from unirun.wire.blocking import BlockingStream
from unirun.wire.frames import decode
invite, timeout = decode(json.loads(sys.argv[1])), {WAIT_TIMEOUT}

@contextmanager
def withdrawn(address):
    print(address.port, flush=True)
    yield
    raise RendezvousError("the note where the head is cannot be removed")

def never(inventory):
    raise AssertionError

def when_it_imports(invite):
    end, (agent,) = time.monotonic() + timeout, children()
    while not children(agent) and time.monotonic() < end:
        time.sleep(0.01)
    raise RendezvousError(str(len(children(agent))) + " spawner and no head")

try:
    CALL
except UnirunError as error:
    print(error)
assert children() == [], "its agent is left"
"""

LEAD = "run_head(invite, (2, 2), never, timeout=timeout, store=None, quiet=True, publish=withdrawn)"
JOIN = "run_member(invite, timeout=timeout, quiet=True)"
WAIT = "run_member(invite, timeout=timeout, quiet=True, complete=when_it_imports)"
TAKE_PART = "take_part(invite, BlockingStream(socket.socket(fileno={})))"


@contextmanager
def command(invite: Invite, call: str, *pass_fds: int) -> Iterator[subprocess.Popen[str]]:
    """A process that makes the `call` with the `invite`, and prints the error that ends it."""
    code = COMMAND.replace("CALL", call.format(*pass_fds))
    arguments = [sys.executable, "-c", code, json.dumps(encode(invite))]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, pass_fds=pass_fds, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    """The error that has ended a command."""
    out, _ = process.communicate(timeout=WAIT_TIMEOUT)
    assert process.returncode == 0
    return out


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the directories of jobs."""
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.starts_processes
def test_nodes_that_have_come_are_told_why_the_head_gives_up() -> None:
    head = Invite(new_token().hex(), "n0", spec=SPEC, head=TcpAddress("127.0.0.1", 0, ""), leads=True)
    with command(head, LEAD) as leading:
        assert leading.stdout is not None
        port = int(leading.stdout.readline())
        with command(Invite(head.token, "n1", head=TcpAddress("127.0.0.1", port, "n0")), JOIN) as joining:
            assert "the job was not started: the note where the head is" in said(joining)
        assert "cannot be removed" in said(leading)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.starts_processes
def test_a_node_imports_while_it_waits_for_what_the_head_makes_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIRUN_WARM", "0")
    role = RoleSpec("actor", 1, Entry("script", "a.py"))
    with command(Invite("", "n1", spec=replace(SPEC, roles=(role,))), WAIT) as waiting:
        assert said(waiting) == "1 spawner and no head\n"


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
        try:
            with command(Invite(new_token().hex(), "n1", head=there, insecure=insecure), JOIN) as joining:
                why = said(joining)
        finally:
            over.set()
        leading.result(WAIT_TIMEOUT)
    assert "is not node" in why or "is the token right" in why


def test_a_command_waits_long_for_a_master_whose_host_takes_connections(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master is busy, or strangers take the places of its listener."""
    monkeypatch.setattr(ssh, "NO_MASTER_TIMEOUT", 0.0)
    job, lock = create_job("run-1", new_token(), head=TcpAddress("127.0.0.1", 1, "n0"))
    os.close(lock)
    running = ssh.RemoteJob(job, SPEC, ["n0"])
    assert not running.given_up(True, busy=True)
    assert running.given_up(True)
    monkeypatch.setattr(ssh, "NO_MASTER_BUSY_TIMEOUT", -1.0)
    assert running.given_up(True, busy=True)


@pytest.mark.starts_processes
def test_a_node_that_is_ready_and_then_dismissed_keeps_no_directory_of_the_job(tmp_path: Path) -> None:
    here, there = socket.socketpair()
    script = tmp_path / "train.py"
    script.touch()
    roles = (RoleSpec("actor", 1, Entry("script", str(script))),)
    spec = JobSpec("mine", "mine", roles, ("actor",))
    task = AgentTask(spec, "n1", ("n0", "n1"), "", str(tmp_path))
    invite = Invite(new_token().hex(), "n1", insecure=True)
    with BlockingStream(here) as ours, there, command(invite, TAKE_PART, there.fileno()) as joining:
        assert isinstance(ours.receive(WAIT_TIMEOUT), Offer)
        ours.send(replace(task, uid="u1", head=TcpAddress("127.0.0.1", 1, "n0")))
        assert ours.receive(WAIT_TIMEOUT) == Ready()
        folder = job_at("mine", "n1").path
        assert (folder / "token").exists()
        ours.send(Dismissed("another node cannot take part"))
        assert "another node cannot take part" in said(joining)
    assert not folder.exists()


@pytest.mark.parametrize("written", [None, "", "no secret"])
def test_a_file_without_a_secret_is_told_with_the_command_that_makes_one(
    written: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    if written is not None:
        file.touch(mode=0o600)
        file.write_text(written)
    with pytest.raises(JobError) as caught:
        shared_secret(str(file), make=False, timeout=0.0)
    assert caught.value.problem.count(str(file)) == 1
    assert "openssl rand -hex 32" in caught.value.remedy


@pytest.mark.parametrize("after", [0.0, 5.0, 59.0, 61.0])
@pytest.mark.parametrize("make", [False, True])
def test_the_nodes_wait_for_the_secret_that_the_head_makes(
    make: bool, after: float, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head makes it at once, and another node of a shared directory may look before."""
    now, file, secret = 1000.0, home / "token", new_token()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now >= 1000.0 + after and not file.exists():
            home.mkdir(mode=0o700, exist_ok=True)
            file.touch(mode=0o600)
            file.write_text(secret.hex())

    monkeypatch.setattr(byhand, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    if make:
        made = shared_secret(None, make=True, timeout=60.0)
        assert shared_secret(None, make=True, timeout=60.0) == made, "there is one"
        assert now == 1000.0
        assert file.stat().st_mode & 0o777 == 0o600
    elif after < 60.0:
        assert shared_secret(None, make=False, timeout=60.0) == secret
        assert now <= 1000.0 + after + 2 * TOKEN_INTERVAL
    else:
        with pytest.raises(JobError, match="copy it from the head"):
            shared_secret(None, make=False, timeout=60.0)
        assert now == pytest.approx(1060.0, abs=2 * TOKEN_INTERVAL)
