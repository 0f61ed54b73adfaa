"""A job on other hosts is followed: their files are copied, whatever happens to the connections, and it is given up
when it has to be."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
from collections import deque
from pathlib import Path
from typing import Literal

import pytest

from tests.effort import seeds
from tests.unit.launcher.instant_loop import InstantLoop
from unirun import atomic
from unirun.errors import ConnectionLost, RendezvousError
from unirun.failover.silence import SILENCE_TIMEOUT
from unirun.launcher.hostlist import Host
from unirun.launcher.hosts import copying
from unirun.launcher.hosts.connection import RemoteNode
from unirun.launcher.hosts.copying import (
    FINAL_COPY_TIMEOUT,
    HOST_CONNECT_TIMEOUT,
    HOST_POLL_INTERVAL,
    HOST_RETRY_INTERVAL,
    Mirror,
    record_hosts,
    recorded_hosts,
)
from unirun.launcher.hosts.feed import news
from unirun.launcher.hosts.ssh import (
    NO_MASTER_BUSY_TIMEOUT,
    NO_MASTER_STORE_TIMEOUT,
    NO_MASTER_TIMEOUT,
    RemoteJob,
)
from unirun.observe.jobdir import HEAD, HOSTS, JobDir
from unirun.observe.status import JobStatus, write_status
from unirun.spec.job import Entry, JobSpec, RoleSpec
from unirun.wire.messages import Chunk, Resume
from unirun.wire.reports import Message

FILES = ("stdout", "stderr", "agent", "events")
SPEC = JobSpec("job", "run-1", (RoleSpec("actor", 1, Entry("script", "a.py")),), ("actor",))

LOOK = 1.0
"""Seconds between two looks of a host at its files."""

MOST = HOST_CONNECT_TIMEOUT + HOST_RETRY_INTERVAL + 1.0
"""Seconds in which a host is reached that answers."""


class FakeStream:
    """The stream from a host. When it is lost, all that is on its way is lost."""

    def __init__(self, host: FakeHost) -> None:
        self._host = host
        self._sent: deque[Message] = deque()
        self._changed = asyncio.Event()
        self.lost = self.stalled = self.closed = False

    def send(self, message: Message) -> None:
        assert isinstance(message, Resume)
        self._host.begin(self, message.offsets)

    def put(self, message: Message) -> None:
        self._sent.append(message)
        self._changed.set()

    def stall(self, stalled: bool) -> None:
        self.stalled = stalled
        self._changed.set()

    def cut(self) -> None:
        self.lost = True
        self._sent.clear()
        self._changed.set()

    async def receive(self) -> Message:
        assert not self.closed
        while self.stalled or not self._sent:
            if self.lost:
                raise ConnectionLost("the cable is cut")
            self._changed.clear()
            await self._changed.wait()
        return self._sent.popleft()


class FakeRemote(RemoteNode):
    """A connection to a host, without a process."""

    def __init__(self, host: FakeHost) -> None:
        self.host = Host(host.name, host.name)
        self.fake = FakeStream(host)
        self.stream = self.fake  # type: ignore[assignment]

    async def close(self) -> None:
        self.fake.cut()
        self.fake.closed = True


class FakeHost:
    """A host with the directory of its node, and an agent that lives until `end`."""

    def __init__(self, name: str, path: Path, loop: InstantLoop) -> None:
        self.name, self._loop = name, loop
        self.job = JobDir(path)
        self.files = {
            "stdout": f"logs/actor/{name}/0/stdout.log",
            "stderr": f"logs/actor/{name}/0/stderr.log",
            "agent": f"agent.{name}.log",
            "events": "events.jsonl",
        }
        (path / self.files["stdout"]).parent.mkdir(parents=True)
        self._lock: int | None = os.open(self.job.lock, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.door: Literal["open", "refuses", "hangs"] = "open"
        self.remotes: list[FakeRemote] = []
        self._lines = 0
        self._last_words = False

    def connect(self) -> FakeRemote:
        self.remotes.append(FakeRemote(self))
        return self.remotes[-1]

    @property
    def connected(self) -> list[FakeRemote]:
        return [remote for remote in self.remotes if not remote.fake.closed]

    @property
    def alive(self) -> bool:
        return self._lock is not None

    def write(self, file: str, count: int) -> None:
        with (self.job.path / self.files[file]).open("ab") as out:
            for _ in range(count):
                self._lines += 1
                out.write(b"%s %d\n" % (self.name.encode(), self._lines))

    def end(self) -> None:
        """The agent ends; not before it has said its last words, which it writes when others are being sent."""
        self.write("stdout", 1)
        self._last_words = True

    def end_now(self) -> None:
        if self._lock is not None:
            self.write("agent", 1)
            os.close(self._lock)
            self._lock = None

    def begin(self, stream: FakeStream, offsets: dict[str, int]) -> None:
        """The process of the node, which sends on `stream`."""
        self._loop.create_task(self._feed(stream, dict(offsets)))

    async def _feed(self, stream: FakeStream, offsets: dict[str, int]) -> None:
        for message in news(self.job, offsets, self._loop.time):
            if stream.lost:
                return
            if message is None:
                await asyncio.sleep(LOOK)
                continue
            stream.put(message)
            if self._last_words and isinstance(message, Chunk) and message.path == self.files["stdout"]:
                self.end_now()


NAMES = ("h1", "h2", "h3")


class FollowingHosts:
    """A command that follows two hosts and a third that joins, in a history of its own. With a head, masters are there
    alone. The reference for a copy are the files themselves."""

    def __init__(self, rng: random.Random, folder: Path, loop: InstantLoop) -> None:
        self.rng, self.loop = rng, loop
        self.hosts = {name: FakeHost(name, folder / name, loop) for name in NAMES}
        self.copy = JobDir(folder / "copy")
        self.copy.logs.mkdir(parents=True)
        self.head = rng.random() < 0.5
        if self.head:
            self.copy.write_json(HEAD, {"type": "tcp", "addr": "10.0.0.1", "port": 1, "node": "h1"})
        self.recorded = {"h1", "h2"}
        record_hosts(self.copy, [Host(name, name) for name in sorted(self.recorded)])
        remotes = {name: self.hosts[name].connect() for name in sorted(self.recorded)}
        self.follow(remotes)
        for name, remote in remotes.items():
            self.hosts[name].begin(remote.fake, {})

    def play(self) -> None:
        """Things happen, then all hosts answer, and all agents end."""
        usual = (self.write, self.write, self.write_state, self.turn_door, self.cut, self.stall, self.wait)
        rare = (self.join, self.restart, self.ask_for_what_there_is, self.settle, self.end)
        for _ in range(self.rng.randrange(40)):
            if self.copying.done():
                break
            self.rng.choice(usual if self.rng.random() < 0.8 else rare)()
            self.nothing_is_copied_twice()
        self.settle()
        for host in self.hosts.values():
            host.end_now()
        self.settle()
        assert self.copying.done()
        self.copying.result()
        assert sorted(self.complete) == sorted(self.came)
        assert len({*self.came}) == len(self.came)
        assert not (self.copy.path / HOSTS).exists()
        assert not [remote for host in self.hosts.values() for remote in host.connected]

    @property
    def some(self) -> FakeHost:
        """Any host."""
        return self.hosts[self.rng.choice(NAMES)]

    def follow(self, remotes: dict[str, FakeRemote]) -> None:
        self.came: list[str] = []
        self.complete: list[str] = []
        self.silent: set[str] = set()
        self.notes: list[str] = []
        self.mirror = Mirror(
            self.copy, remotes, self.notes.append, self.came.append, self.complete.append, self.hear
        )
        self.copying = self.loop.create_task(self.mirror.run())
        self.loop.wait(0.0)

    def hear(self, name: str, silent: bool) -> None:
        (self.silent.add if silent else self.silent.discard)(name)

    async def reach(self, host: Host) -> RemoteNode:
        fake = self.hosts[host.name]
        if fake.door == "hangs":
            await asyncio.Event().wait()
        if fake.door == "refuses":
            raise RendezvousError("it does not answer")
        return fake.connect()

    def join(self) -> None:
        """A host that joins is copied soon, though the others have not ended."""
        record_hosts(self.copy, [Host("h3", "h3")])
        self.recorded.add("h3")
        self.loop.wait(HOST_POLL_INTERVAL + 0.1)
        assert "h3" in self.came or self.copying.done()

    def write(self) -> None:
        host, file = self.some, self.rng.choice(FILES)
        if host.alive and not (file == "events" and self.head and host.name != "h1"):
            host.write(file, self.rng.randint(1, 3))

    def write_state(self) -> None:
        if self.hosts["h1"].alive:
            atomic.replace(self.hosts["h1"].job.state, str(self.rng.random()))

    def turn_door(self) -> None:
        self.some.door = self.rng.choice(("open", "open", "refuses", "hangs"))

    def cut(self) -> None:
        """A connection is lost. The host is silent as long as it cannot be reached."""
        host = self.some
        for remote in host.connected:
            remote.fake.cut()
            self.loop.wait(0.01)
            assert remote.fake.closed
            assert (host.name in self.silent) == (host.door != "open")

    def stall(self) -> None:
        """A host is busy for some time, or its connection is lost after that."""
        host, seconds, cut = self.some, self.rng.choice((1.0, SILENCE_TIMEOUT + 0.5)), self.rng.random() < 0.5
        self.loop.wait(0.1)
        for remote in host.connected:
            remote.fake.stall(True)
            self.loop.wait(seconds)
            assert (host.name in self.silent) == (seconds > SILENCE_TIMEOUT)
            if cut:
                remote.fake.cut()
            remote.fake.stall(False)
            self.loop.wait(LOOK)
            assert cut or host.name not in self.silent

    def wait(self) -> None:
        self.loop.wait(self.rng.choice((0.03, 0.2, 2.0, 20.0)))

    def restart(self) -> None:
        """Another process goes on copying."""
        self.copying.cancel()
        self.loop.wait(0.0)
        for host in self.hosts.values():
            for remote in host.connected:
                self.loop.run_until_complete(remote.close())
        self.follow({})

    def ask_for_what_there_is(self) -> None:
        """Hosts that do not answer are not waited for."""
        self.loop.run_until_complete(asyncio.wait_for(self.mirror.current(), MOST))

    def end(self) -> None:
        host = self.some
        if host.alive:
            self.rng.choice((host.end_now, host.end))()

    def settle(self) -> None:
        """The copy has all that hosts have written when all of them answer."""
        for host in self.hosts.values():
            host.door = "open"
        self.loop.wait(MOST)
        assert not self.silent
        for name in self.recorded:
            self.check(name, whole=True)
        if self.head and self.hosts["h1"].job.state.exists():
            assert self.copy.state.read_bytes() == self.hosts["h1"].job.state.read_bytes()

    def nothing_is_copied_twice(self) -> None:
        for name in self.recorded:
            self.check(name, whole=False)
            assert len(self.hosts[name].connected) <= 1
        assert not [note for note in self.notes if "not copied" in note]

    def check(self, name: str, *, whole: bool) -> None:
        """The copy has of each file of a host what was written first, or the `whole`. Events of several hosts are in
        one file, so lines tell whose they are."""
        host = self.hosts[name]
        for file in host.files.values():
            there = lines(host.job.path / file)
            here = [line for line in lines(self.copy.path / file) if line.startswith(name.encode())]
            assert here == there[: len(here)]
            assert not whole or here == there


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


@pytest.mark.parametrize("seed", seeds(100))
def test_files_of_hosts_are_copied_once_whatever_happens(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = InstantLoop()
    model = FollowingHosts(random.Random(seed), tmp_path, loop)
    monkeypatch.setattr(copying, "reach", model.reach)
    try:
        model.play()
    finally:
        loop.end()


class GivingUp:
    """A command that has lost the master. The reference is the history of what it has heard, and when."""

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self.rng, self.now = rng, 100.0
        job = JobDir(folder)
        head = rng.random() < 0.5
        if head:
            job.write_json(HEAD, {"type": "tcp", "addr": "10.0.0.1", "port": 1, "node": "h1"})
        self.limit = NO_MASTER_TIMEOUT if head else NO_MASTER_STORE_TIMEOUT
        self.job = RemoteJob(job, SPEC, NAMES, lambda: self.now)
        self.nodes, self.silent = {*NAMES}, set[str]()
        self.heard: list[tuple[float, str]] = []

    def play(self) -> None:
        self.find_a_master()
        actions = (self.look, self.look, self.look, self.find_a_master, self.hear, self.hear, self.end)
        for _ in range(60):
            self.now += self.rng.choice((0.0, 0.1, 1.0, 7.0, 0.9 * self.limit))
            self.rng.choice(actions)()

    def find_a_master(self) -> None:
        self.job.led_by(7)
        self.heard.clear()

    def hear(self) -> None:
        name, silent = self.rng.choice(NAMES), self.rng.random() < 0.5
        self.job.silent(name, silent)
        (self.silent.add if silent else self.silent.discard)(name)

    def end(self) -> None:
        """An agent ends, and sometimes another node joins."""
        name = self.rng.choice(NAMES)
        if self.rng.random() < 0.5:
            self.job.came(name)
            self.nodes.add(name)
        elif len(self.nodes) > 1:
            self.job.complete(name)
            self.nodes.discard(name)
            self.heard.append((self.now, "end"))

    def look(self) -> None:
        word = self.rng.choice(("none", "busy", "vacant"))
        given_up = self.job.given_up(True, {"none": None, "busy": True, "vacant": False}[word])
        self.heard.append((self.now, word))
        looks = [(when, what) for when, what in self.heard if what != "end"]
        alone = looks[0][0]
        after = self.heard[self.heard.index(looks[0]) :]
        told = [(when, what) for when, what in looks if what != "none"]
        busy = told[-1][0] if told and told[-1][1] == "busy" else alone
        ended = any(what == "end" for _, what in after)
        assert given_up == (
            (ended and self.nodes <= self.silent)
            or self.now > max(alone, busy) + self.limit
            or self.now > alone + NO_MASTER_BUSY_TIMEOUT
        )


@pytest.mark.parametrize("seed", seeds(100))
def test_a_job_is_given_up_by_what_was_heard_since_its_last_master(seed: int, tmp_path: Path) -> None:
    GivingUp(random.Random(seed), tmp_path).play()


def test_a_host_that_sends_much_after_the_end_of_the_job_is_copied_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way to it is slow, and the logs are long."""
    loop = InstantLoop()
    host, copy = FakeHost("h1", tmp_path / "h1", loop), JobDir(tmp_path / "copy")
    copy.logs.mkdir(parents=True)
    record_hosts(copy, [Host("h1", "h1")])
    write_status(copy, JobStatus("run-1", "job", "succeeded", "", 1.0, None, None, ()))

    async def reach(_: Host) -> RemoteNode:
        return host.connect()

    monkeypatch.setattr(copying, "reach", reach)
    for number in range(8):
        loop.call_later(number * FINAL_COPY_TIMEOUT / 2, host.write, "stdout", 1)
    loop.call_later(4 * FINAL_COPY_TIMEOUT, host.end)
    loop.run_until_complete(copying._copy_all(copy, os.dup(1)))
    assert recorded_hosts(copy) == ()
    name = host.files["stdout"]
    assert (copy.path / name).read_bytes() == (host.job.path / name).read_bytes()
    loop.end()


@pytest.mark.parametrize("ends", [0.0, 40.0])
@pytest.mark.parametrize("late", [0.0, 5.0, FINAL_COPY_TIMEOUT - 2.0, FINAL_COPY_TIMEOUT + 2.0])
def test_a_host_that_answers_in_time_after_the_end_of_the_job_is_copied(
    ends: float, late: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that goes on copying ends also without it. Before the end it has no deadline."""
    loop = InstantLoop()
    host, copy = FakeHost("h1", tmp_path / "h1", loop), JobDir(tmp_path / "copy")
    copy.logs.mkdir(parents=True)
    record_hosts(copy, [Host("h1", "h1")])
    lock = os.open(copy.lock, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    began = loop.time()

    def is_now(phase: str) -> None:
        write_status(copy, JobStatus("run-1", "job", phase, "", 1.0, None, None, ()))

    async def reach(_: Host) -> RemoteNode:
        if loop.time() < began + ends + late:
            raise RendezvousError("no route to h1")
        return host.connect()

    monkeypatch.setattr(copying, "reach", reach)
    is_now("running")
    loop.call_at(began + ends, is_now, "succeeded")
    host.end_now()
    told, tells = os.pipe()
    loop.run_until_complete(copying._copy_all(copy, tells))
    assert os.read(told, 1) == b"", "those that wait for it go on"
    came = late < FINAL_COPY_TIMEOUT
    assert (recorded_hosts(copy) == ()) == came
    assert (copy.path / "agent.h1.log").exists() == came
    assert loop.time() - began <= ends + min(late, FINAL_COPY_TIMEOUT) + 2 * HOST_POLL_INTERVAL
    for handle in (told, lock):
        os.close(handle)
    loop.end()
