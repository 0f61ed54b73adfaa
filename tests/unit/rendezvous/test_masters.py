"""Connections to the leader: found by the store, checked for its term, and sure about dead masters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.rendezvous.fake_master import FakeJob
from tests.unit.simulated_loop import SimulatedLoop
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import AuthError, RendezvousError, StoreAway, WireError
from unirun.observe.jobdir import HEAD
from unirun.rendezvous import masters
from unirun.rendezvous.election import Leader, Seat, campaign, job_prefix
from unirun.rendezvous.masters import HEAD_RETRY_INTERVAL, MasterGone, Masters, call_master
from unirun.wire.address import TcpAddress, UnixAddress
from unirun.wire.handshake import HANDSHAKE_TIMEOUT, new_token
from unirun.wire.messages import Appointed, Attach, Shutdown, Stop
from unirun.wire.sockets import listen


@pytest.fixture
def fake_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJob]:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    with FakeJob() as fake_job:
        yield fake_job


async def seat_of(found: Masters, epoch: int) -> Seat:
    """Wait until the term `epoch` is known."""
    while not found.seat.known or found.seat.epoch < epoch:
        await found.news(WAIT_TIMEOUT)
    return found.seat


def reach(fake_job: FakeJob, leader: Leader | None = None) -> Leader:
    """Reach the leader, or its stand-in, and attach to it. Returns its name."""

    async def go() -> Leader:
        found = Masters(fake_job.job_dir)
        try:
            target = leader or (await seat_of(found, 1)).leader
            assert target is not None
            stream = await found.reach(target)
            stream.send(Attach())
            await stream.close()
            return target
        finally:
            found.close()
            found.close()

    return asyncio.run(asyncio.wait_for(go(), WAIT_TIMEOUT))


def says(fake_job: FakeJob, epoch: int) -> Leader:
    """The leader that the store would name for the stand-in ``first``."""
    return Leader(epoch, UnixAddress.here(fake_job.job_dir.path / "first.sock"), 7)


class TestWhoLeads:
    def test_masters_see_no_leader_at_first_and_then_one_after_another(self, fake_job: FakeJob) -> None:
        async def ask() -> list[Seat]:
            found = Masters(fake_job.job_dir)
            seats = [await seat_of(found, 0)]
            for number in range(2):
                fake_job.leader(f"m{number}", deposing=number)
                seats.append(await seat_of(found, number + 1))
            found.close()
            return seats

        before, first, second = asyncio.run(ask())
        assert before.leader is None
        assert first.leader is not None
        assert second.leader is not None
        assert (first.leader.epoch, second.leader.epoch) == (1, 2)
        assert second.leader.address == UnixAddress.here(fake_job.job_dir.path / "m1.sock")

    def test_waiting_for_news_of_masters_ends_at_its_timeout(self, fake_job: FakeJob) -> None:
        async def ask() -> Seat:
            found = Masters(fake_job.job_dir)
            await seat_of(found, 0)
            await found.news(0.01)
            found.close()
            return found.seat

        assert asyncio.run(asyncio.wait_for(ask(), WAIT_TIMEOUT)).leader is None

    def test_news_that_come_while_nobody_waits_are_told_once(self, fake_job: FakeJob) -> None:
        async def ask() -> list[bool]:
            found: Any = Masters(fake_job.job_dir)
            found._watch = SimpleNamespace(hurry=asked.append, close=lambda: None)
            found._tell(Seat(None, known=True))
            told = []
            for patience, eager in ((10.0, True), (0.01, False)):
                try:
                    await asyncio.wait_for(found.news(eager=eager), patience)
                    told.append(True)
                except TimeoutError:
                    told.append(False)
            found.close()
            return told

        asked: list[bool] = []
        assert asyncio.run(ask()) == [True, False]
        assert asked == [True, False]

    @pytest.mark.parametrize(("timeout", "lasts"), [(2.0, 2.0), (0.0, HEAD_RETRY_INTERVAL), (None, None)])
    def test_without_a_store_no_news_come_and_the_wait_for_them_lasts_as_long_as_it_may(
        self, fake_job: FakeJob, timeout: float | None, lasts: float | None
    ) -> None:
        fake_job.job_dir.write_json(HEAD, {"type": "tcp", "addr": "10.0.0.1", "port": 1, "node": "n0"})
        loop, found = SimulatedLoop(), Masters(fake_job.job_dir)
        assert found.seat == Seat(Leader(0, TcpAddress("10.0.0.1", 1, "n0"), 0), known=True)
        began, waits = loop.time(), loop.create_task(found.news(timeout))
        loop.passes((lasts or 1000.0) - 0.01)
        assert not waits.done()
        if lasts is not None:
            loop.do(asyncio.wait_for(waits, 1.0))
            assert loop.time() - began == pytest.approx(lasts)
        loop.end()


class TestAMasterThatIsReached:
    def test_a_master_that_is_reached_is_the_one_that_leads(self, fake_job: FakeJob) -> None:
        master = fake_job.leader()
        assert reach(fake_job).epoch == 1
        assert master.heard.get(timeout=WAIT_TIMEOUT) == Attach()

    def test_a_master_that_is_reached_may_lead_in_a_later_term_by_then(self, fake_job: FakeJob) -> None:
        master = fake_job.master(first=Appointed(9))
        reach(fake_job, says(fake_job, 3))
        assert master.heard.get(timeout=WAIT_TIMEOUT) == Attach()


class TestAMasterThatIsGone:
    def test_a_master_whose_socket_has_no_listener_is_gone(self, fake_job: FakeJob) -> None:
        fake_job.leader().die()
        with pytest.raises(MasterGone, match=r"first.sock"):
            reach(fake_job)

    def test_a_master_whose_socket_is_missing_is_gone(self, fake_job: FakeJob) -> None:
        master = fake_job.leader()
        master.path.unlink()
        with pytest.raises(MasterGone):
            reach(fake_job)

    def test_a_master_on_another_host_is_not_taken_for_gone(self, fake_job: FakeJob) -> None:
        """The file may be missing on this host while the master leads on its own; it must not be deposed."""
        leader = Leader(1, UnixAddress(str(fake_job.job_dir.path / "first.sock"), "elsewhere"), 7)
        with pytest.raises(RendezvousError, match=r"can be reached on host elsewhere only") as error:
            reach(fake_job, leader)
        assert not isinstance(error.value, MasterGone)

    def test_a_master_that_hangs_is_not_taken_for_gone(
        self, fake_job: FakeJob, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(masters, "MASTER_CONNECT_TIMEOUT", 1.0)
        fake_job.master()
        with pytest.raises(WireError, match=r"first.sock does not say anything"):
            reach(fake_job, says(fake_job, 1))

    def test_a_master_that_does_not_accept_is_not_taken_for_gone(
        self, fake_job: FakeJob, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The process is stopped; the kernel accepts connections all the same."""
        monkeypatch.setattr(masters, "MASTER_CONNECT_TIMEOUT", 0.1)
        started = time.monotonic()
        with listen(fake_job.job_dir.path / "first.sock"), pytest.raises(WireError, match="in time"):
            reach(fake_job, says(fake_job, 1))
        assert time.monotonic() - started < HANDSHAKE_TIMEOUT

    def test_a_master_that_does_not_lead_yet_is_not_taken_for_gone(self, fake_job: FakeJob) -> None:
        fake_job.master(first=Appointed(2))
        with pytest.raises(WireError, match="does not lead in term 3"):
            reach(fake_job, says(fake_job, 3))

    def test_a_master_with_another_first_message_is_not_taken_for_gone(self, fake_job: FakeJob) -> None:
        fake_job.master(first=Shutdown())
        with pytest.raises(WireError, match="is no master"):
            reach(fake_job, says(fake_job, 1))

    def test_a_master_with_another_token_is_not_taken_for_gone(self, fake_job: FakeJob) -> None:
        fake_job.master(first=Appointed(1), token=new_token())
        with pytest.raises(WireError):
            reach(fake_job, says(fake_job, 1))


class TestACall:
    def test_a_call_to_a_job_without_a_master_says_so(self, fake_job: FakeJob) -> None:
        with pytest.raises(RendezvousError, match="job run-1 has no master now; try again in a moment"):
            call_master(fake_job.job_dir)

    def test_a_call_reaches_a_master_that_has_confirmed_that_it_leads(self, fake_job: FakeJob) -> None:
        master = fake_job.leader(script=lambda stream: stream.send(Shutdown()))
        with call_master(fake_job.job_dir) as stream:
            stream.send(Attach())
            assert stream.receive(WAIT_TIMEOUT) == Shutdown()
        assert master.heard.get(timeout=WAIT_TIMEOUT) == Attach()

    def test_a_call_may_send_and_close_at_once(self, fake_job: FakeJob) -> None:
        master = fake_job.leader()
        stop = Stop(15, "unirun stop")
        for _ in range(50):
            with call_master(fake_job.job_dir) as stream:
                stream.send(stop)
            assert master.heard.get(timeout=WAIT_TIMEOUT) == stop

    def test_a_call_to_a_dead_master_fails(self, fake_job: FakeJob) -> None:
        fake_job.leader().die()
        with pytest.raises(RendezvousError, match="nobody answers"):
            call_master(fake_job.job_dir)

    def test_a_call_to_a_stranger_fails_and_leaves_no_stream_open(self, fake_job: FakeJob) -> None:
        fake_job.master(first=Shutdown()).lead(fake_job.store)
        with pytest.raises(WireError, match="does not lead in term 1"):
            call_master(fake_job.job_dir)

    def test_a_call_to_a_hanging_master_fails_in_time(
        self, fake_job: FakeJob, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(masters, "MASTER_CONNECT_TIMEOUT", 1.0)
        silent = fake_job.master()
        silent.lead(fake_job.store)
        silent._first = None
        with pytest.raises(RendezvousError, match=r"sent nothing for 1 s"):
            call_master(fake_job.job_dir)

    def test_a_call_to_a_master_that_does_not_accept_fails_in_time(
        self, fake_job: FakeJob, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(masters, "MASTER_CONNECT_TIMEOUT", 0.1)
        path = fake_job.job_dir.path / "first.sock"
        campaign(fake_job.store, job_prefix("run-1"), UnixAddress.here(path), 7, ttl=60)
        started = time.monotonic()
        with listen(path), pytest.raises(WireError, match="in time"):
            call_master(fake_job.job_dir)
        assert time.monotonic() - started < HANDSHAKE_TIMEOUT

    def test_a_call_with_another_token_fails(self, fake_job: FakeJob) -> None:
        fake_job.master(token=new_token()).lead(fake_job.store)
        with pytest.raises((AuthError, WireError)):
            call_master(fake_job.job_dir)


class TestACallWhileTheStoreIsAway:
    @pytest.fixture(autouse=True)
    def away(self, fake_job: FakeJob) -> None:
        (fake_job.job_dir.path / "store").write_text("etcd://127.0.0.1:1?timeout=0.1")

    def test_a_call_without_the_store_reaches_the_master_in_the_jobs_directory(
        self, fake_job: FakeJob
    ) -> None:
        master = fake_job.master("master.1", first=Appointed(1))
        with call_master(fake_job.job_dir) as stream:
            stream.send(Attach())
        assert master.heard.get(timeout=WAIT_TIMEOUT) == Attach()

    def test_a_call_without_the_store_reaches_the_master_of_the_latest_term(self, fake_job: FakeJob) -> None:
        fake_job.master("master.1", first=Appointed(1)).die()
        for number, epoch in ((2, 2), (3, 4), (4, 3)):
            fake_job.master(f"master.{number}", first=Appointed(epoch))
        latest = fake_job._masters[2]
        with call_master(fake_job.job_dir) as stream:
            stream.send(Attach())
        assert latest.heard.get(timeout=WAIT_TIMEOUT) == Attach()

    def test_a_call_without_store_and_master_raises_the_stores_error(self, fake_job: FakeJob) -> None:
        fake_job.master("master.1", first=Appointed(1)).die()
        fake_job.master("master.2", first=Shutdown())
        with pytest.raises(StoreAway):
            call_master(fake_job.job_dir)
