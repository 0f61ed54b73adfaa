"""A command follows one master after another: what the user asks for reaches each of them as often as it must."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.effort import seeds
from tests.unit.launcher.instant_loop import InstantLoop
from unirun.errors import ConnectionLost, RendezvousError
from unirun.failover.silence import SILENCE_TIMEOUT
from unirun.launcher.foreground import session
from unirun.launcher.foreground.console import Console
from unirun.launcher.foreground.session import NO_MASTER_NOTICE_DELAY, JobFollower
from unirun.launcher.hosts.ssh import RemoteJob
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.creation import create_job
from unirun.rendezvous.election import Leader, Seat
from unirun.rendezvous.masters import MASTER_CONNECT_TIMEOUT, Masters
from unirun.spec.job import Entry, JobSpec, RoleSpec
from unirun.wire.address import UnixAddress
from unirun.wire.aio import Stream
from unirun.wire.handshake import new_token
from unirun.wire.messages import Attach, Ended, Heartbeat, PassOn, Stop
from unirun.wire.reports import Message, Notice

CHECK = session.AGENT_CHECK_INTERVAL + 0.1
"""Seconds in which a command notices what has become of a master."""


class FakeStream(Stream):
    """A stream to a master on another host."""

    remote = True

    def __init__(self, loop: InstantLoop, epoch: int) -> None:
        self._loop, self.epoch = loop, epoch
        self.told: list[Message] = []
        self._words: deque[Message] = deque()
        self._changed = asyncio.Event()
        self.lost = self.closed = False
        self.spoke = self.left = loop.time()

    def send(self, message: Message) -> None:
        if not self.closed:
            self.told.append(message)

    def say(self, message: Message) -> None:
        self.spoke = self._loop.time()
        self._words.append(message)
        self._changed.set()

    def cut(self) -> None:
        self.lost = True
        self._changed.set()

    async def receive(self) -> Message:
        while not self._words:
            if self.lost or self.closed:
                raise ConnectionLost("the master is gone")
            self._changed.clear()
            await self._changed.wait()
        return self._words.popleft()

    async def close(self) -> None:
        self.closed, self.left = True, self._loop.time()
        self._changed.set()


class FakeMasters(Masters):
    """Masters, of which one `lives` or none."""

    def __init__(self, loop: InstantLoop) -> None:
        self._loop = loop
        self.seat = Seat()
        self.lives = False
        self.streams: list[FakeStream] = []
        self._news = asyncio.Event()

    def succeed(self) -> None:
        """Another master leads."""
        epoch = self.seat.epoch + 1
        self.seat = Seat(Leader(epoch, UnixAddress(f"/m{epoch}", "h1"), 7), epoch, known=True)
        self.lives = True
        self._news.set()

    def die(self) -> None:
        self.lives = False
        for stream in self.streams:
            stream.cut()

    async def news(self, timeout: float | None = None, *, eager: bool = True) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout(timeout):
                await self._news.wait()
        except TimeoutError:
            pass

    async def reach(self, leader: Leader, timeout: float = MASTER_CONNECT_TIMEOUT) -> Stream:
        if not self.lives or leader != self.seat.leader:
            raise RendezvousError("nobody listens")
        self.streams.append(FakeStream(self._loop, leader.epoch))
        return self.streams[-1]

    def close(self) -> None:
        """Nothing is watched."""


class Job(RemoteJob):
    """The job. `woken` is the time at which agents were let go on last."""

    def __init__(self, job: JobDir, loop: InstantLoop) -> None:
        spec = JobSpec("job", "run-1", (RoleSpec("actor", 1, Entry("script", "a.py")),), ("actor",))
        super().__init__(job, spec, ["h1"], lambda: 0.0)
        self._loop, self.woken = loop, 0.0

    def wake_agents(self) -> None:
        self.woken = self._loop.time()


class Following:
    """A command, its user, and the masters of the job. The reference is what the user has asked for, and when."""

    def __init__(self, rng: random.Random, loop: InstantLoop) -> None:
        self.rng, self.loop = rng, loop
        job, lock = create_job("run-1", new_token())
        os.close(lock)
        self.job = Job(job, loop)
        self.command, self.alone_since = JobFollower(self.job, Console(quiet=True)), loop.time()
        self.command._masters = self.masters = FakeMasters(loop)
        self.passed_on = 0
        self.following = loop.create_task(self.command._follow_to_end())

    def play(self) -> None:
        actions = (
            self.stop,
            self.pass_on,
            self.pass_on,
            self.succeed,
            self.die,
            self.speak,
            self.speak,
            self.wait,
        )
        for _ in range(self.rng.randrange(40)):
            self.rng.choice(actions)()
            self.check()
        self.die()
        self.succeed()
        ended = Ended(0, "succeeded", "")
        self.present.say(ended)
        assert self.loop.run_until_complete(self.following) == ended
        assert self.count() == self.passed_on

    @property
    def present(self) -> FakeStream:
        return self.masters.streams[-1]

    def count(self) -> int:
        return sum(isinstance(word, PassOn) for each in self.masters.streams for word in each.told)

    def stop(self) -> None:
        self.command._stop(
            Stop(int(self.rng.choice((signal.SIGTERM, signal.SIGHUP, signal.SIGINT))), "asked")
        )

    def pass_on(self) -> None:
        self.command._pass_on(signal.SIGUSR1)
        self.passed_on += 1

    def succeed(self) -> None:
        """Another leads. It is told what the user wants, whatever was told before."""
        self.die() if self.rng.random() < 0.5 else None
        self.masters.succeed()
        self.loop.wait(CHECK)
        first = self.present.told[0]
        assert first == Attach(owner=True)
        assert self.count() == self.passed_on
        assert [
            word for word in self.present.told if isinstance(word, Stop)
        ] == self.command._requests.for_next

    def die(self) -> None:
        self.masters.die()
        self.loop.wait(0.1)

    def speak(self) -> None:
        if self.masters.lives and self.masters.streams:
            word = self.rng.choice((Heartbeat(), Notice("h1", "hello")))
            before = self.present.told.count(Heartbeat())
            self.present.say(word)
            self.loop.wait(0.01)
            assert self.present.told.count(Heartbeat()) == before + (word == Heartbeat())

    def wait(self) -> None:
        self.loop.wait(self.rng.choice((0.5, 0.7 * SILENCE_TIMEOUT, 2 * SILENCE_TIMEOUT)))

    def check(self) -> None:
        """A master that has spoken a moment ago is followed, one that has not for long is left. When there has been
        none for a while, agents that are stopped are let go on, again and again."""
        if self.command._master is not None:
            self.alone_since = self.loop.time()
        alone = self.loop.time() - max(self.alone_since, self.job.woken)
        assert alone <= NO_MASTER_NOTICE_DELAY + CHECK
        assert (
            self.job.woken <= self.alone_since or self.job.woken >= self.alone_since + NO_MASTER_NOTICE_DELAY
        )
        assert len([each for each in self.masters.streams if not each.closed]) <= 2
        for each in self.masters.streams:
            if not each.lost and each.epoch == self.masters.seat.epoch:
                silent = (each.left if each.closed else self.loop.time()) - each.spoke
                assert each.closed == (self.command._master is not each)
                assert not each.closed or silent > SILENCE_TIMEOUT


def test_a_master_elsewhere_that_answers_is_not_left_after_a_second_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agents are on other hosts, and end the job as soon as they can."""
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    loop = InstantLoop()
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=loop.time))
    try:
        following = Following(random.Random(0), loop)
        following.job._clock = loop.time
        following.succeed()
        for _ in range(2):
            following.command._stop(Stop(int(signal.SIGINT), "asked"))
        for _ in range(100):
            following.present.say(Heartbeat())
            loop.wait(1.0)
        following.present.say(ended := Ended(1, "stopped", ""))
        assert loop.run_until_complete(following.following) == ended
        assert len(following.masters.streams) == 1
    finally:
        loop.end()


@pytest.mark.parametrize("seed", seeds(100))
def test_what_the_user_asks_for_reaches_each_master_that_must_hear_it(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    loop = InstantLoop()
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=loop.time))
    try:
        Following(random.Random(seed), loop).play()
    finally:
        loop.end()
