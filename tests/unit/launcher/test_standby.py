"""A standby finds the leader, and starts candidates when there is none, with growing delays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from tests.effort import seeds
from tests.unit.launcher.instant_loop import InstantLoop
from tests.unit.rendezvous.fake_master import FakeJob
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import RendezvousError, WireError
from unirun.launcher import standby
from unirun.launcher.standby import HeadFollower, Standby
from unirun.rendezvous import election
from unirun.rendezvous.election import campaign, job_prefix
from unirun.wire.address import TcpAddress
from unirun.wire.messages import Attach
from unirun.wire.sockets import listen_tcp

T = TypeVar("T")


class StartedMasters:
    """The started masters: each is a process that records its arguments and sleeps."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / "started"
        self.file.touch()
        self._program = folder / "python"
        self.then("exec sleep 100")
        monkeypatch.setattr(sys, "executable", str(self._program))

    def then(self, command: str) -> None:
        """Set a command that masters started from now on run after that."""
        self._program.write_text(f'#!/bin/sh\necho "$$ $*" >> {self.file}\n{command}\n')
        self._program.chmod(0o700)

    @property
    def lines(self) -> list[tuple[int, list[str]]]:
        """Pid and arguments of each."""
        rows = [line.split() for line in self.file.read_text().splitlines()]
        return [(int(row[0]), row[1:]) for row in rows]

    @property
    def deposing(self) -> list[str]:
        """The term that each was to depose."""
        return [arguments[-1] for _, arguments in self.lines]

    @property
    def inherited(self) -> str:
        """The file of the descriptor that the last argument of a candidate names, if it has looked."""
        file = Path(f"{self._program}.inherited")
        return file.read_text().strip() if file.exists() else ""

    async def until(self, count: int) -> None:
        """Wait until that many were started."""
        async with asyncio.timeout(WAIT_TIMEOUT):
            while len(self.lines) < count:
                await asyncio.sleep(0.005)


def run(
    fake_job: FakeJob, do: Callable[[Standby], Coroutine[Any, Any, T]], tcp: socket.socket | None = None
) -> T:
    async def go() -> T:
        watch = Standby(fake_job.job_dir, fake_job.lock, "n0", ("n0",), tcp)
        try:
            return await asyncio.wait_for(do(watch), WAIT_TIMEOUT)
        finally:
            watch.close()

    return asyncio.run(go())


def follow(fake_job: FakeJob, known: int = 0) -> int:
    """The term of the found master, after a message on its stream."""

    async def go(watch: Standby) -> int:
        epoch, stream = await watch.next(known, WAIT_TIMEOUT)
        stream.send(Attach())
        await stream.close()
        return epoch

    return run(fake_job, go)


@pytest.fixture
def fake_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJob]:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(standby, "MASTER_RETRY_INTERVAL", 0.005)
    monkeypatch.setattr(standby, "CANDIDATE_POLL_INTERVAL", 0.005)
    monkeypatch.setattr(election, "CALM_POLL_INTERVAL", 0.02)
    monkeypatch.setattr(election, "ELECTION_RETRY_INTERVAL", 0.02)
    monkeypatch.setattr(standby, "CANDIDACY_DELAY", 0.1)
    with FakeJob() as fake_job:
        yield fake_job


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartedMasters]:
    found = StartedMasters(tmp_path, monkeypatch)
    yield found
    for pid, _ in found.lines:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


class TestWhileSomebodyLeads:
    def test_a_standby_follows_the_leader(self, fake_job: FakeJob, started: StartedMasters) -> None:
        master = fake_job.leader()
        assert follow(fake_job) == 1
        assert master.heard.get(timeout=WAIT_TIMEOUT) == Attach()
        assert started.lines == []

    def test_a_standby_starts_no_candidate_while_there_is_a_leader(
        self, fake_job: FakeJob, started: StartedMasters
    ) -> None:
        fake_job.leader()

        async def wait(watch: Standby) -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(watch.another(1), 0.3)

        run(fake_job, wait)
        assert started.lines == []

    def test_a_standby_waits_a_moment_for_the_first_master(
        self, fake_job: FakeJob, started: StartedMasters, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(standby, "CANDIDACY_DELAY", WAIT_TIMEOUT)

        async def go(watch: Standby) -> int:
            finding = asyncio.ensure_future(watch.next(0, WAIT_TIMEOUT))
            await asyncio.sleep(0.03)
            fake_job.leader()
            epoch, stream = await finding
            await stream.close()
            return epoch

        assert run(fake_job, go) == 1
        assert started.lines == []

    def test_a_standby_reports_another_leader(self, fake_job: FakeJob, started: StartedMasters) -> None:
        fake_job.leader()

        async def go(watch: Standby) -> bool:
            telling = asyncio.ensure_future(watch.another(1))
            await asyncio.sleep(0.1)
            before = telling.done()
            fake_job.leader("second", deposing=1)
            await telling
            return before

        assert run(fake_job, go) is False
        assert started.lines == []

    @pytest.mark.starts_processes
    def test_a_standby_does_not_follow_a_leader_of_an_earlier_term(
        self, fake_job: FakeJob, started: StartedMasters
    ) -> None:
        fake_job.leader()

        async def go(watch: Standby) -> None:
            finding = asyncio.ensure_future(watch.next(5, WAIT_TIMEOUT))
            await started.until(1)
            assert not finding.done()
            finding.cancel()

        run(fake_job, go)


class TestWhenTheLeaderIsDead:
    @pytest.mark.starts_processes
    def test_a_standby_starts_a_candidate_at_once_when_the_leader_is_dead(
        self, fake_job: FakeJob, started: StartedMasters, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(standby, "CANDIDACY_DELAY", WAIT_TIMEOUT)
        fake_job.leader().die()

        async def go(watch: Standby) -> tuple[int, set[int]]:
            finding = asyncio.ensure_future(watch.next(1, WAIT_TIMEOUT))
            await started.until(1)
            fake_job.leader("second", deposing=1)
            epoch, stream = await finding
            await stream.close()
            return epoch, watch.pids

        epoch, pids = run(fake_job, go)
        assert epoch == 2
        ((pid, arguments),) = started.lines
        assert arguments == ["-P", "-m", "unirun.launcher.master", str(fake_job.job_dir.path), "1"]
        assert pids == {pid}

    @pytest.mark.starts_processes
    def test_a_leader_of_this_node_that_has_ended_is_dead_although_the_agent_holds_its_socket(
        self, fake_job: FakeJob, started: StartedMasters, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(standby, "CANDIDACY_DELAY", WAIT_TIMEOUT)
        ended = subprocess.Popen(["true"])
        ended.wait()
        with listen_tcp("127.0.0.1") as listener:
            address = TcpAddress("127.0.0.1", listener.getsockname()[1], "n0")
            assert campaign(fake_job.store, job_prefix("run-1"), address, ended.pid, ttl=60.0) is not None

            async def go(watch: Standby) -> None:
                finding = asyncio.ensure_future(watch.next(1, WAIT_TIMEOUT))
                await started.until(1)
                finding.cancel()

            run(fake_job, go, listener)
        ((_, arguments),) = started.lines
        assert arguments[-2] == "1", "it deposes that one"

    @pytest.mark.starts_processes
    def test_a_standby_that_came_later_has_the_lock_when_all_others_have_ended(
        self, fake_job: FakeJob, started: StartedMasters
    ) -> None:
        fake_job.leader().die()
        mine = os.open(fake_job.job_dir.lock, os.O_RDWR)

        async def go() -> None:
            watch = Standby(fake_job.job_dir, mine, "n0", ("n0",))
            finding = asyncio.ensure_future(watch.next(1, WAIT_TIMEOUT))
            await started.until(1)
            finding.cancel()
            watch.close()

        asyncio.run(go())
        ((pid, _),) = started.lines
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        fake_job.let_go()
        eventually(fake_job.job_dir.alive, "the lock is taken")
        os.close(mine)
        assert not fake_job.job_dir.alive()

    @pytest.mark.starts_processes
    def test_a_started_master_has_the_jobs_lock_and_its_own_session(
        self, fake_job: FakeJob, started: StartedMasters
    ) -> None:
        fake_job.leader().die()

        async def go(watch: Standby) -> None:
            finding = asyncio.ensure_future(watch.next(1, WAIT_TIMEOUT))
            await started.until(1)
            finding.cancel()

        run(fake_job, go)
        ((pid, _),) = started.lines
        fake_job.let_go()
        assert fake_job.job_dir.alive()
        assert os.getsid(pid) == pid
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert not fake_job.job_dir.alive()

    @pytest.mark.starts_processes
    def test_a_standby_starts_further_candidates_with_growing_delays(
        self, fake_job: FakeJob, started: StartedMasters, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(standby, "DELAY", 0.1)
        monkeypatch.setattr(standby, "MAX_DELAY", 0.4)
        started.then("exit 1")
        fake_job.leader().die()

        async def go() -> float:
            watch = Standby(fake_job.job_dir, fake_job.lock, "n0", ("n0",))
            began = time.monotonic()
            finding = asyncio.ensure_future(watch.next(1, WAIT_TIMEOUT))
            await started.until(5)
            took = time.monotonic() - began
            finding.cancel()
            await asyncio.gather(finding, return_exceptions=True)
            watch.close()
            return took

        assert asyncio.run(go()) >= 0.1 + 0.2 + 0.4 + 0.4
        assert started.deposing == ["1"] * 5

    @pytest.mark.starts_processes
    def test_a_standby_starts_no_second_candidate_while_one_comes_up(
        self, fake_job: FakeJob, started: StartedMasters, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(standby, "DELAY", 0.01)
        monkeypatch.setattr(standby, "CANDIDATE_START_TIMEOUT", 0.5)
        fake_job.leader().die()

        async def go(watch: Standby) -> float:
            finding = asyncio.ensure_future(watch.next(1, WAIT_TIMEOUT))
            await started.until(1)
            began = time.monotonic()
            await started.until(2)
            finding.cancel()
            return time.monotonic() - began

        assert run(fake_job, go) > 0.4

    @pytest.mark.starts_processes
    @pytest.mark.parametrize(("steady", "tries"), [(0.0, 1), (WAIT_TIMEOUT, 4)])
    def test_a_standby_resets_its_delay_after_a_master_that_led_for_long(
        self,
        fake_job: FakeJob,
        started: StartedMasters,
        monkeypatch: pytest.MonkeyPatch,
        steady: float,
        tries: int,
    ) -> None:
        """A master that has led only for a moment may have failed for a reason that also ends the next one."""
        monkeypatch.setattr(standby, "DELAY", 0.01)
        monkeypatch.setattr(standby, "PER_NODE_DELAY", 0.01)
        monkeypatch.setattr(standby, "BACKOFF_RESET_SECONDS", steady)
        started.then("exit 1")
        fake_job.leader().die()

        async def go(watch: Standby) -> int:
            finding = asyncio.ensure_future(watch.next(1, WAIT_TIMEOUT))
            await started.until(3)
            second = fake_job.leader("second", deposing=1)
            _, stream = await finding
            await stream.close()
            # The next one comes up until the test is over.
            started.then("exec sleep 100")
            second.die()
            before = len(started.lines)
            finding = asyncio.ensure_future(watch.next(2, WAIT_TIMEOUT))
            await started.until(before + 1)
            finding.cancel()
            return watch._attempts.number - (before - 3 if steady else 0)

        assert run(fake_job, go) == tries
        assert started.deposing[-1] == "2"

    @pytest.mark.starts_processes
    def test_a_candidate_that_has_led_is_not_waited_for_when_its_term_is_over(
        self, fake_job: FakeJob, started: StartedMasters, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its process may go on, as one that hangs."""
        monkeypatch.setattr(standby, "DELAY", 0.01)
        monkeypatch.setattr(standby, "PER_NODE_DELAY", 0.01)
        monkeypatch.setattr(standby, "CANDIDATE_START_TIMEOUT", 10 * WAIT_TIMEOUT)
        fake_job.leader().die()

        async def go(watch: Standby) -> None:
            finding = asyncio.ensure_future(watch.next(1, WAIT_TIMEOUT))
            await started.until(1)
            second = fake_job.leader("second", deposing=1)
            _, stream = await finding
            await stream.close()
            second.die()
            finding = asyncio.ensure_future(watch.next(2, WAIT_TIMEOUT))
            await started.until(2)
            finding.cancel()

        run(fake_job, go)
        assert started.deposing == ["1", "2"]

    def test_a_master_that_cannot_be_reached_again_is_doubted(
        self, fake_job: FakeJob, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        leader, doubts = fake_job.leader(), 0

        def doubt() -> None:
            nonlocal doubts
            doubts += 1

        async def go(watch: Standby) -> None:
            _, stream = await watch.next(1, WAIT_TIMEOUT)
            await stream.close()
            monkeypatch.setattr(watch._masters, "doubt", doubt)
            _, stream = await watch.again(1, WAIT_TIMEOUT)
            await stream.close()
            assert doubts == 0
            leader.die()
            with pytest.raises(RendezvousError):
                await watch.again(1, WAIT_TIMEOUT)
            assert doubts == 1

        run(fake_job, go)


class TestWhenNobodyLeads:
    @pytest.mark.starts_processes
    def test_a_standby_starts_a_candidate_after_a_while_without_a_leader(
        self, fake_job: FakeJob, started: StartedMasters
    ) -> None:
        began = time.monotonic()

        async def go(watch: Standby) -> None:
            finding = asyncio.ensure_future(watch.next(0, WAIT_TIMEOUT))
            await started.until(1)
            finding.cancel()

        run(fake_job, go)
        assert time.monotonic() - began >= standby.CANDIDACY_DELAY
        assert started.deposing == ["0"]

    def test_a_standby_gives_up_when_there_was_never_a_leader(
        self, fake_job: FakeJob, started: StartedMasters
    ) -> None:
        async def go(watch: Standby) -> None:
            await watch.next(0, 0.05)

        with pytest.raises(RendezvousError, match=r"no master after 0.05 s: nobody leads"):
            run(fake_job, go)

    @pytest.mark.starts_processes
    def test_a_standby_never_gives_up_after_a_first_leader(
        self, fake_job: FakeJob, started: StartedMasters
    ) -> None:
        async def go(watch: Standby) -> int:
            finding = asyncio.ensure_future(watch.next(1, 0.01))
            await started.until(1)
            fake_job.leader("m1")
            epoch, stream = await finding
            await stream.close()
            return epoch

        assert run(fake_job, go) == 1

    @pytest.mark.starts_processes
    def test_a_standby_starts_a_candidate_when_its_masters_lease_expires(
        self, fake_job: FakeJob, started: StartedMasters
    ) -> None:
        master = fake_job.leader()
        fake_job.store.txn([], deletes=["jobs/run-1/lead/leader"])

        async def go(watch: Standby) -> None:
            telling = asyncio.ensure_future(watch.another(1))
            await started.until(1)
            assert not telling.done(), "there is no use in leaving it yet"
            second = fake_job.leader("second")
            assert second.path != master.path
            await telling

        run(fake_job, go)
        assert started.deposing == ["0"]


class TestAStoreThatIsAway:
    def test_a_standby_keeps_the_leader_while_the_store_is_away(
        self, fake_job: FakeJob, started: StartedMasters
    ) -> None:
        fake_job.leader()
        file = fake_job.job_dir.path / "store.db"

        async def go(watch: Standby) -> None:
            telling = asyncio.ensure_future(watch.another(1))
            await asyncio.sleep(0.05)
            file.rename(file.with_suffix(".away"))
            await asyncio.sleep(0.2)
            assert not telling.done()
            telling.cancel()

        run(fake_job, go)
        assert started.lines == []

    def test_a_standby_that_gives_up_names_the_store_that_is_away(
        self, fake_job: FakeJob, started: StartedMasters
    ) -> None:
        async def go(watch: Standby) -> None:
            while not watch._masters.seat.known:
                await watch._masters.news()
            (fake_job.job_dir.path / "store.db").unlink()
            await watch.next(0, 0.5)

        with pytest.raises(RendezvousError, match=r"no master after 0.5 s: .*was deleted or replaced"):
            run(fake_job, go)
        assert started.lines == []


def test_a_standby_waits_for_a_hanging_leader(
    fake_job: FakeJob, started: StartedMasters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease shows when it is no longer the leader."""
    monkeypatch.setattr("unirun.rendezvous.masters.MASTER_CONNECT_TIMEOUT", 0.05)
    hanging = fake_job.master()
    hanging.lead(fake_job.store)
    hanging._first = None

    async def go(watch: Standby) -> None:
        finding = asyncio.ensure_future(watch.next(1, WAIT_TIMEOUT))
        await asyncio.sleep(0.4)
        assert not finding.done()
        assert started.lines == []
        fake_job.leader("second", deposing=1)
        epoch, stream = await finding
        await stream.close()
        assert epoch == 2

    run(fake_job, go)
    assert started.lines == []


@pytest.mark.starts_processes
def test_a_candidate_inherits_the_socket_that_listens_for_other_hosts(
    fake_job: FakeJob, started: StartedMasters
) -> None:
    started.then("readlink /proc/self/fd/$6 >> $0.inherited; exec sleep 100")

    async def go(watch: Standby) -> None:
        search = asyncio.ensure_future(watch.next(1, WAIT_TIMEOUT))
        async with asyncio.timeout(WAIT_TIMEOUT):
            while not started.inherited:
                await asyncio.sleep(0.005)
        search.cancel()

    with listen_tcp("127.0.0.1") as tcp:
        run(fake_job, go, tcp)
        assert started.lines[0][1][-1] == str(tcp.fileno())
        assert started.inherited == os.readlink(f"/proc/self/fd/{tcp.fileno()}")


@pytest.mark.starts_processes
def test_a_standby_retries_a_candidate_that_cannot_be_started(
    fake_job: FakeJob,
    started: StartedMasters,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """An agent without a free descriptor must not end its workers."""
    program = sys.executable
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(standby, "DELAY", 0.01)

    async def go(watch: Standby) -> None:
        search = asyncio.ensure_future(watch.next(1, WAIT_TIMEOUT))
        while "no master can be started" not in capfd.readouterr().err:
            await asyncio.sleep(0.005)
        assert not search.done()
        monkeypatch.setattr(sys, "executable", program)
        await started.until(1)
        search.cancel()

    run(fake_job, go)


@pytest.mark.starts_processes
def test_a_standby_that_can_start_no_thread_starts_a_candidate_all_the_same(
    fake_job: FakeJob, started: StartedMasters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent must not end its workers where they have used up all processes of their user."""

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(standby, "threading", SimpleNamespace(Thread=NoThread))

    async def go(watch: Standby) -> None:
        search = asyncio.ensure_future(watch.next(1, WAIT_TIMEOUT))
        coming = asyncio.ensure_future(started.until(1))
        await asyncio.wait({search, coming}, return_when=asyncio.FIRST_COMPLETED)
        assert not search.done()
        search.cancel()

    run(fake_job, go)


class HeadElsewhere:
    """Masters of a head, one after another, with pauses, each of which is connected to in simulated time."""

    def __init__(self, rng: random.Random, loop: InstantLoop) -> None:
        self._rng, self._loop = rng, loop
        self.began = loop.time()
        at = self.began + rng.choice((0.0, 0.0, 3.0, 30.0))
        self.terms: list[tuple[float, float, int]] = []
        for epoch in range(1, rng.randint(2, 5)):
            end = at + rng.choice((1.0, 5.0, 20.0))
            self.terms.append((at, end, epoch))
            at = end + rng.choice((0.0, 0.5, 4.0))
        self.streams: list[tuple[int, Any]] = []

    async def appointed(self, *_: Any) -> tuple[int, Any]:
        await asyncio.sleep(self._rng.choice((0.0, 0.01)))
        epoch = next((epoch for at, end, epoch in self.terms if at <= self._loop.time() < end), None)
        if epoch is None:
            raise self._rng.choice((RendezvousError("nobody listens"), WireError("the stream has ended")))
        self.streams.append((epoch, FakeStream()))
        return self.streams[-1]


class FakeStream:
    closed = False

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("seed", seeds(60))
def test_masters_on_a_head_elsewhere_are_followed_by_their_terms(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The present one is returned, unless it is older than the one that the agent knows. Only the first has a deadline."""
    rng, loop = random.Random(seed), InstantLoop()
    head = HeadElsewhere(rng, loop)
    monkeypatch.setattr(standby, "appointed", head.appointed)
    monkeypatch.setattr(standby, "time", SimpleNamespace(monotonic=loop.time))
    follower: Any = HeadFollower(TcpAddress("10.0.0.1", 1, "h1"), None)  # type: ignore[arg-type]
    known, patience = rng.randint(0, len(head.terms)), rng.choice((1.0, 10.0, 60.0))
    first = next(at for at, end, epoch in head.terms if epoch >= known)
    late = 2 * standby.MASTER_RETRY_INTERVAL
    try:
        epoch, stream = loop.run_until_complete(follower.next(known, patience))
    except RendezvousError:
        assert known == 0
        assert first - head.began > patience - late
        assert loop.time() - head.began == pytest.approx(patience, abs=late)
    else:
        assert epoch >= known
        assert loop.time() <= first + late
        assert [each.closed for _, each in head.streams] == [True] * (len(head.streams) - 1) + [False]
        assert stream is head.streams[-1][1]
        with pytest.raises(WireError, match="is over"):
            loop.run_until_complete(follower.again(epoch + 1, 3.0))
        assert head.streams[-1][1].closed
        again, other = loop.run_until_complete(follower.again(epoch, 3.0))
        assert (again, other.closed) == (epoch, False)
    loop.end()
