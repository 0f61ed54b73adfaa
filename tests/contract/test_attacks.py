"""Attacks on the listeners of a job of several hosts: each is refused, told of and counted, and all others are served."""

from __future__ import annotations

import asyncio
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.attacks import INSIDE, OUTSIDE, Target, flood, noise_after_the_token, silence
from tests.unit.launcher.master.harness import MasterHarness, end_well
from tests.unit.wire.endpoints import credentials_in
from tests.waiting import WAIT_TIMEOUT
from unirun.observe.events import read_events
from unirun.roles.transport.protocol import Parcel
from unirun.roles.transport.socket_transport import CallAddress, SocketTransport
from unirun.values import WorkerId
from unirun.wire import handshake
from unirun.wire.handshake import new_token

ME = WorkerId("worker", 0, 0)
LET_IN = 8.0
"""Seconds in which a peer that proves the token is let in and served, whatever other peers connect; mostly one."""
REFUSED = "a connection from 127.0.0.1 was refused: "


class MasterListener:
    """A master that listens for other hosts."""

    def __init__(self, folder: Path) -> None:
        self.harness = MasterHarness(folder, tcp=True)
        assert self.harness.tcp is not None
        inside = credentials_in(folder / "n0", self.harness.token, "n0")
        there = self.harness.tcp
        self.target = Target(there.addr, there.port, there.node, inside, folder)

    def during(self, attack: Callable[[Target], None]) -> None:
        """Attack; then the job's agent joins over TLS, and its workers end well."""

        async def others() -> None:
            await asyncio.to_thread(attack, self.target)
            await end_well(await self.harness.agent(self.target.inside))

        assert self.harness.run(others) == []
        assert self.harness.status()["phase"] == "succeeded"

    def refused(self) -> list[tuple[str, int]]:
        """The refusals in the job's events, and their number so far."""
        events = [event for event in read_events(self.harness.job.events) if event.kind == "refused"]
        return [(event.text, int(event.details.get("count", 0))) for event in events]


class WorkerListener:
    """A worker that takes calls from other hosts."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._token = folder, new_token()
        self._told: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self.transport = SocketTransport(
            folder / "calls",
            credentials_in(folder / "there", self._token, "there"),
            "127.0.0.1",
            lambda text, count: self._told.put((text, count)),
        )
        self.endpoint = self.transport.serve(ME, lambda parcel, reply: reply(parcel))
        there = CallAddress.parse(self.endpoint).tcp
        assert there is not None
        inside = credentials_in(folder / "here", self._token, "here")
        self.target = Target(there.addr, there.port, there.node, inside, folder)

    def during(self, attack: Callable[[Target], None]) -> None:
        """Attack, and then call."""
        attack(self.target)
        caller = SocketTransport(self._folder / "none", self.target.inside)
        answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        channel = caller.connect(ME, self.endpoint, lambda reason: answers.put(reason.encode()))
        channel.call(Parcel(b"are you there?"), lambda parcel: answers.put(parcel.head))
        assert answers.get(timeout=WAIT_TIMEOUT) == b"are you there?"
        caller.close()

    def refused(self) -> list[tuple[str, int]]:
        """The first refusal that was told."""
        return [self._told.get(timeout=WAIT_TIMEOUT)]


@pytest.fixture(params=[MasterListener, WorkerListener])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MasterListener | WorkerListener]:
    listener = request.param(tmp_path)
    yield listener
    if isinstance(listener, WorkerListener):
        listener.transport.close()


@pytest.mark.parametrize("attack", OUTSIDE, ids=lambda attack: attack.__name__)
def test_a_stranger_is_refused_and_counted_and_the_job_goes_on(
    listener: MasterListener | WorkerListener, attack: Callable[[Target], None]
) -> None:
    listener.during(attack)
    counts = [count for text, count in listener.refused() if text.startswith(REFUSED)]
    assert counts == [1]


@pytest.mark.parametrize("attack", INSIDE, ids=lambda attack: attack.__name__)
def test_a_master_ends_the_stream_of_who_sends_anything_but_messages(
    tmp_path: Path, attack: Callable[[Target], None]
) -> None:
    listener = MasterListener(tmp_path)
    listener.during(attack)
    ((text, _),) = listener.refused()
    assert text.startswith("a connection ended early: ")


def test_a_worker_ends_the_connection_of_who_sends_anything_but_frames(tmp_path: Path) -> None:
    listener = WorkerListener(tmp_path)
    listener.during(noise_after_the_token)
    listener.transport.close()


def test_silent_connections_keep_nobody_out(
    listener: MasterListener | WorkerListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "EACH", 4)
    monkeypatch.setattr(handshake, "MIN_HANDSHAKE_SECONDS", 0.1)
    held = []
    listener.during(lambda target: held.extend(silence(target, 6)))
    assert listener.refused() != []
    for sock in held:
        sock.close()


@pytest.mark.parametrize("origins", [1, 40])
def test_floods_from_other_addresses_keep_nobody_waiting(
    listener: MasterListener | WorkerListener, origins: int
) -> None:
    held, began = [], 0.0

    def attack(target: Target) -> None:
        nonlocal began
        held.extend(flood(target, 600, origins))
        began = time.monotonic()

    listener.during(attack)
    assert time.monotonic() - began < LET_IN
    assert listener.refused() != []
    for sock in held:
        sock.close()


AS_NOBODY = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
socket.socket(socket.AF_UNIX).connect(sys.argv[1])
"""


@pytest.mark.starts_processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reaches_no_unix_socket_of_a_job(listener: MasterListener | WorkerListener) -> None:
    path = (
        listener.harness.path
        if isinstance(listener, MasterListener)
        else Path(CallAddress.parse(listener.endpoint).path)
    )

    def attack(target: Target) -> None:
        command = [sys.executable, "-S", "-c", AS_NOBODY, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "PermissionError" in done.stderr, done.stderr

    listener.during(attack)
