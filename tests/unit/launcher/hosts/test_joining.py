"""Hosts join a job: those that come are heard, nobody starts unless all are ready, and who is dismissed leaves nothing."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.effort import seeds
from tests.unit.launcher.hosts.offers import HEAD, made, offer
from tests.unit.launcher.instant_loop import InstantLoop
from unirun.errors import AuthError, ConnectionLost, RendezvousError, UnirunError, WireError
from unirun.launcher.environment import joined
from unirun.launcher.hostlist import Host
from unirun.launcher.hosts import byhand, node, ssh
from unirun.launcher.hosts.byhand import run_member
from unirun.launcher.hosts.connection import RemoteNode
from unirun.launcher.hosts.lobby import Lobby
from unirun.launcher.hosts.node import take_part
from unirun.launcher.hosts.ssh import invite_all
from unirun.launcher.local import AgentProcess, RunningJob
from unirun.observe.jobdir import JobDir, job_at
from unirun.rendezvous.endpoints import BIND_TIMEOUT
from unirun.spec.job import Entry, JobSpec, RoleSpec
from unirun.wire.address import TcpAddress
from unirun.wire.aio import Stream
from unirun.wire.blocking import BlockingStream
from unirun.wire.certificates import temporary
from unirun.wire.credentials import Credentials
from unirun.wire.handshake import new_token
from unirun.wire.messages import AgentTask, Dismissed, Invite, Offer, Ready, W
from unirun.wire.reports import Message

SEEDS = seeds(100)


class Answer(NamedTuple):
    """The answer of a node: after some seconds a message, or the end of its stream for None."""

    after: float
    word: Message | None

    @property
    def fits(self) -> bool:
        return self.word == Ready() and self.after < BIND_TIMEOUT


def any_answer(rng: random.Random) -> Answer:
    word = rng.choice((Ready(), Ready(), Ready(), Ready(), Dismissed("it has no a.py"), None))
    return Answer(rng.choice((0.0, 1.0, 1.0, 2.0, BIND_TIMEOUT + 50.0)), word)


class FakeNode(Stream):
    """The stream to a node that says what it offers, and answers when it is told its task."""

    peer = ""
    ended = False

    def __init__(self, first: Message, answer: Answer) -> None:
        self.first, self.answer = first, answer
        self.node = first.node if isinstance(first, Offer) else ""
        self.told: list[Message] = []
        self.closed = False

    def send(self, message: Message) -> None:
        assert not self.closed
        self.told.append(message)

    async def receive(self) -> Message:
        if not self.told:
            return self.first
        await asyncio.sleep(self.answer.after)
        if self.answer.word is None:
            raise ConnectionLost("the peer closed the stream")
        return self.answer.word

    async def close(self) -> None:
        self.closed = True


class Joining:
    """A head that waits for nodes, and lets those begin that have come. The reference knows who comes when."""

    def __init__(self, rng: random.Random, loop: InstantLoop) -> None:
        self.rng, self.loop = rng, loop
        self.most = rng.randint(2, 5)
        self.least = rng.randint(1, self.most)
        self.timeout, self.last_call = rng.choice((3.0, 10.0, 60.0)), rng.choice((0.0, 2.0, 5.0, 30.0))
        self.lobby = Lobby(self.most, offer("h0", 0, masters=HEAD))
        self.nodes: list[FakeNode] = []
        self.began = loop.time()
        self.came = [0.0]

    def play(self) -> None:
        visits = [self.loop.create_task(self.visit()) for _ in range(self.rng.randint(0, 7))]
        try:
            self.loop.run_until_complete(self.gather(visits))
        except RendezvousError as error:
            assert f"{len(self.came)} of {self.least} nodes have come" in str(error)
            assert len(self.came) < self.least
            assert self.passed == pytest.approx(self.timeout)
            self.loop.run_until_complete(self.lobby.part(Dismissed("too few")))
        else:
            assert self.passed == pytest.approx(self.end())
            self.assign()
        assert all(each.closed for each in self.nodes)

    async def gather(self, visits: Sequence[asyncio.Task[None]]) -> None:
        """Wait for nodes. After that nobody is let in."""
        try:
            await self.lobby.gather(self.least, self.timeout, self.last_call)
        finally:
            for visit in visits:
                visit.cancel()

    @property
    def passed(self) -> float:
        return self.loop.time() - self.began

    def end(self) -> float:
        """The time at which the head goes on: all are there, or those that have to be, and the last call is over."""
        enough = self.came[self.least - 1]
        latest = min(self.timeout, enough + self.last_call)
        return self.came[self.most - 1] if len(self.came) == self.most else latest

    async def visit(self) -> None:
        """A node comes; its name or its rank may be another's."""
        await asyncio.sleep(self.rng.choice((0.5, 1.5, 2.5, 9.0, 20.0)) + self.rng.random() / 10)
        rank = self.rng.choice((-1, -1, -1, 1, 2, 9))
        name = self.rng.choice(("out", *(f"h{number}" for number in range(8))))
        known = self.lobby.offers
        fits = len(known) < self.most and all(
            name != each.node and (rank < 0 or rank != each.rank) for each in known
        )
        stream = FakeNode(offer(name, rank), any_answer(self.rng))
        await self.lobby.admit(stream)
        if fits and rank < self.most:
            self.nodes.append(stream)
            self.came.append(self.passed)
        else:
            assert [type(each) for each in stream.told] == [Dismissed]
            assert stream.closed

    def assign(self) -> None:
        """All get their task, and begin when all are ready; or nobody does, and all that cannot are named. One that
        the job excludes is let go."""
        used = [each for each in self.nodes if each.node != "out"]
        unfit = [each for each in used if not each.answer.fits]
        began, longest = self.loop.time(), max((each.answer.after for each in used), default=0.0)
        try:
            self.loop.run_until_complete(self.lobby.assign(made, uid="u1"))
        except RendezvousError as error:
            assert unfit
            for each in self.nodes:
                assert (f"{each.node}: " in str(error)) == (each in unfit)
            last: Message = Dismissed(str(error))
        else:
            assert not unfit
            last = Ready()
        assert self.loop.time() - began == pytest.approx(min(longest, BIND_TIMEOUT))
        self.loop.run_until_complete(self.lobby.part(last))
        for each in self.nodes:
            assert [type(word) for word in each.told] == (
                [AgentTask, type(last)] if each in used else [Dismissed]
            )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_head_waits_for_its_nodes_and_lets_all_begin_or_none(seed: int) -> None:
    loop = InstantLoop()
    try:
        Joining(random.Random(seed), loop).play()
    finally:
        loop.end()


class FakeRemote(RemoteNode):
    """A connection to a host whose process gives an `Answer`."""

    def __init__(self, host: Host, answer: Answer) -> None:
        self.host, self.answer = host, answer
        self.stream = FakeNode(Ready(), answer)
        self.closed = False

    async def hear(self, kind: type[W]) -> W:
        try:
            word = await self.stream.receive()
        except ConnectionLost as error:
            raise RendezvousError("its process has ended") from error
        if isinstance(word, Dismissed):
            raise RendezvousError(word.problem)
        assert isinstance(word, kind)
        return word

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("seed", SEEDS)
def test_hosts_are_invited_all_or_none(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is left when one cannot take part."""
    rng, loop = random.Random(seed), InstantLoop()
    hosts = [Host(f"h{number}", f"h{number}") for number in range(rng.randint(1, 4))]
    answers = {host.name: any_answer(rng) for host in hosts}
    reached = {host.name: rng.choice((0.0, 0.0, 0.0, 1.0, 1e6)) for host in hosts}
    remotes: list[FakeRemote] = []

    async def reach(host: Host) -> RemoteNode:
        await asyncio.sleep(reached[host.name])
        remotes.append(FakeRemote(host, answers[host.name]))
        return remotes[-1]

    def fits(name: str) -> bool:
        return answers[name].word == Ready() and answers[name].after + reached[name] < BIND_TIMEOUT

    monkeypatch.setattr(ssh, "reach", reach)
    invite = Invite(new_token().hex(), "h0")
    try:
        found = loop.run_until_complete(invite_all(hosts, lambda _: invite, Ready, BIND_TIMEOUT))
    except RendezvousError as error:
        assert [f"{name}: " in str(error) for name in answers] == [not fits(name) for name in answers]
        assert all(remote.closed for remote in remotes)
    else:
        assert all(map(fits, answers))
        assert [remote.host for remote, _ in found] == hosts
        assert not any(remote.closed for remote in remotes)
    finally:
        loop.end()


class FakeAgent(AgentProcess):
    """The process of an agent that may be unable to bind its endpoints. `goes_on`: it has begun."""

    def __init__(self, binds: bool) -> None:
        self.pid = 1
        self.binds = binds
        self.goes_on = self.ended = False
        self.owner: int | None = None
        self.environ: dict[str, str] = {}

    def assign(
        self, job: JobDir, task: AgentTask, lock: int, owner: int | None, tcp: socket.socket | None = None
    ) -> None:
        assert job.alive()
        self.owner, self.environ = owner, dict(os.environ)

    def wait_until_bound(self, deadline: float) -> None:
        if not self.binds:
            raise RendezvousError("the port is taken")

    def begin(self) -> None:
        self.goes_on = True

    def end(self) -> None:
        self.ended = not self.goes_on


class FakeLauncher(BlockingStream):
    """The stream to a launcher, whose next words are known. It may be `gone` when the node is ready."""

    def __init__(self, words: Sequence[Message | None], *, gone: bool = False) -> None:
        self.words, self.told, self.gone = [*words], list[Message](), gone

    def send(self, message: Message) -> None:
        self.told.append(message)
        if self.gone and isinstance(message, Ready):
            raise ConnectionLost("the launcher is gone")

    def receive(self, timeout: float | None = None) -> Message:
        word = self.words.pop(0) if self.words else None
        if word is None:
            raise ConnectionLost("the launcher is gone")
        return word

    def close(self) -> None:
        pass


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_does_not_begin_leaves_nothing(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No directory, no agent and no descriptor; of one that begins, the agent has the lock."""
    rng = random.Random(seed)
    environ = {"UNIRUN_HOME": str(tmp_path), "HOME": "/here", "OF_THE_SHELL": "1"}
    monkeypatch.setattr(os, "environ", environ)
    agent = FakeAgent(binds=rng.random() < 0.7)
    monkeypatch.setattr(node, "early_agent", lambda _: agent)
    script = tmp_path / "a.py"
    if there := rng.random() < 0.8:
        script.touch()
    roles = (RoleSpec("actor", 1, Entry("script", str(script))),)
    # A node that comes into a running job gets the job's variables.
    env = {"OF_THE_JOB": "1"} if rng.random() < 0.5 else None
    task: dict[str, Any] = {"uid": "u1", "head": TcpAddress("127.0.0.1", 1, "h0"), "env": env}
    word: Message = AgentTask(JobSpec("job", "run", roles, ("actor",)), "h1", ("h0",), str(tmp_path), **task)
    first = rng.choice((word, word, word, word, Dismissed("it is not needed"), None))
    last = rng.choice((Ready(), Ready(), Dismissed("another cannot take part"), None))
    launcher = FakeLauncher([first, last], gone=rng.random() < 0.2)
    before = os.listdir("/proc/self/fd")
    fits = first is word and there and agent.binds
    wanted = dict(environ) if env is None else joined(environ, env)
    try:
        take_part(Invite(new_token().hex(), "h1", insecure=True), launcher)
    except UnirunError:
        assert not fits or last != Ready() or launcher.gone
    else:
        assert fits
        assert last == Ready()
    if first is word and there:
        assert agent.environ == wanted, "nothing of the shell gets into the job"
    begins = fits and last == Ready() and not launcher.gone
    assert (agent.goes_on, agent.ended) == (begins, not begins)
    assert job_at("run", "h1").path.exists() == begins
    assert len(os.listdir("/proc/self/fd")) == len(before)
    if first is word:
        assert [type(each) for each in launcher.told] == [Offer, Ready if fits else Dismissed]


@pytest.mark.parametrize("detach", [False, True])
def test_a_node_ends_with_its_command_unless_that_is_to_detach(
    detach: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    agent, head = FakeAgent(binds=True), TcpAddress("127.0.0.1", 1, "h0")
    script = tmp_path / "a.py"
    script.touch()
    roles = (RoleSpec("actor", 1, Entry("script", str(script))),)
    spec = JobSpec("job", "run", roles, ("actor",))
    task = AgentTask(spec, "h1", ("h0",), str(tmp_path), uid="u1", head=head)
    launcher = FakeLauncher([task, Ready()])
    followed: list[str] = []

    def stay(running: RunningJob, *, quiet: bool) -> int:
        followed.append(running.node)
        return 7

    monkeypatch.setattr(node, "early_agent", lambda _: agent)
    monkeypatch.setattr(node, "_reach", lambda *_: launcher)
    monkeypatch.setattr(byhand, "stay", stay)
    invite = Invite(new_token().hex(), "h1", head=head, insecure=True, detach=detach)
    assert run_member(invite, timeout=1.0, quiet=True) == (0 if detach else 7)
    assert agent.goes_on
    assert (agent.owner, followed) == ((None, []) if detach else (os.getpid(), ["h1"]))


class FakeHead:
    """A head that begins to listen at some time, and breaks off connections before and after that."""

    def __init__(self, rng: random.Random) -> None:
        self.now = self.tried = 1000.0
        self.timeout = rng.choice((0.0, 5.0, 60.0))
        self.listens = self.now + rng.choice((0.0, 1.0, 4.0, 30.0, 100.0))
        self.knows = rng.random() < 0.8
        self._rng = rng

    def connect(self, address: TcpAddress, credentials: Credentials) -> BlockingStream:
        assert self.now - self.tried <= 1.0
        self.tried = self.now
        self.now += 0.1
        if self.now < self.listens or self._rng.random() < 0.3:
            if self._rng.random() < 0.5:
                raise RendezvousError("nobody listens")
            raise WireError("the handshake has failed") from ConnectionResetError()
        if not self.knows:
            raise AuthError("is the token right?")
        return FakeLauncher([])

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_waits_for_a_head_that_comes_later(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong secret stays wrong."""
    head = FakeHead(random.Random(seed))
    end = head.now + head.timeout
    monkeypatch.setattr(node, "time", SimpleNamespace(monotonic=lambda: head.now, sleep=head.sleep))
    monkeypatch.setattr(node, "BlockingStream", SimpleNamespace(connect=head.connect))
    with temporary(new_token(), "h1", insecure=True) as credentials:
        try:
            node._reach(TcpAddress("127.0.0.1", 1, "h0"), credentials, head.timeout)
        except AuthError:
            assert not head.knows
        except RendezvousError as error:
            assert f"has not answered within {head.timeout:g} s" in str(error)
            assert end <= head.now <= end + 1.0
        else:
            assert head.knows
            assert head.listens <= head.now <= end + 1.0
