"""A standby finds the leader, and starts candidates when there is none, with growing delays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.launcher.candidates import Started, follow, run
from tests.unit.rendezvous.standin import PATIENCE, Place
from unirun.errors import RendezvousError
from unirun.launcher import standby
from unirun.launcher.standby import Standby
from unirun.rendezvous import election
from unirun.rendezvous.election import campaign, job_prefix
from unirun.wire.address import TcpAddress
from unirun.wire.messages import Attach
from unirun.wire.sockets import listen_tcp


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(standby, "MASTER_RETRY_INTERVAL", 0.005)
    monkeypatch.setattr(standby, "CANDIDATE_POLL_INTERVAL", 0.005)
    monkeypatch.setattr(election, "CALM_POLL_INTERVAL", 0.02)
    monkeypatch.setattr(election, "ELECTION_RETRY_INTERVAL", 0.02)
    monkeypatch.setattr(standby, "CANDIDACY_DELAY", 0.1)
    with Place() as place:
        yield place


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    found = Started(tmp_path, monkeypatch)
    yield found
    for pid, _ in found.lines:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


class TestWhileSomebodyLeads:
    def test_a_standby_follows_the_leader(self, place: Place, started: Started) -> None:
        master = place.leader()
        assert follow(place) == 1
        assert master.heard.get(timeout=PATIENCE) == Attach()
        assert started.lines == []

    def test_a_standby_starts_no_candidate_while_there_is_a_leader(
        self, place: Place, started: Started
    ) -> None:
        place.leader()

        async def wait(watch: Standby) -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(watch.another(1), 0.3)

        run(place, wait)
        assert started.lines == []

    def test_a_standby_waits_a_moment_for_the_first_master(
        self, place: Place, started: Started, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(standby, "CANDIDACY_DELAY", PATIENCE)

        async def go(watch: Standby) -> int:
            finding = asyncio.ensure_future(watch.next(0, PATIENCE))
            await asyncio.sleep(0.03)
            place.leader()
            epoch, stream = await finding
            await stream.close()
            return epoch

        assert run(place, go) == 1
        assert started.lines == []

    def test_a_standby_reports_another_leader(self, place: Place, started: Started) -> None:
        place.leader()

        async def go(watch: Standby) -> bool:
            telling = asyncio.ensure_future(watch.another(1))
            await asyncio.sleep(0.1)
            before = telling.done()
            place.leader("second", deposing=1)
            await telling
            return before

        assert run(place, go) is False
        assert started.lines == []

    @pytest.mark.starts_processes
    def test_a_standby_does_not_follow_a_leader_of_an_earlier_term(
        self, place: Place, started: Started
    ) -> None:
        place.leader()

        async def go(watch: Standby) -> None:
            finding = asyncio.ensure_future(watch.next(5, PATIENCE))
            await started.until(1)
            assert not finding.done()
            finding.cancel()

        run(place, go)


class TestWhenTheLeaderIsDead:
    @pytest.mark.starts_processes
    def test_a_standby_starts_a_candidate_at_once_when_the_leader_is_dead(
        self, place: Place, started: Started, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(standby, "CANDIDACY_DELAY", PATIENCE)
        place.leader().die()

        async def go(watch: Standby) -> tuple[int, set[int]]:
            finding = asyncio.ensure_future(watch.next(1, PATIENCE))
            await started.until(1)
            place.leader("second", deposing=1)
            epoch, stream = await finding
            await stream.close()
            return epoch, watch.pids

        epoch, pids = run(place, go)
        assert epoch == 2
        ((pid, arguments),) = started.lines
        assert arguments == ["-P", "-m", "unirun.launcher.master", str(place.job.path), "1"]
        assert pids == {pid}

    @pytest.mark.starts_processes
    def test_a_leader_of_this_node_that_has_ended_is_dead_although_the_agent_holds_its_socket(
        self, place: Place, started: Started, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(standby, "CANDIDACY_DELAY", PATIENCE)
        ended = subprocess.Popen(["true"])
        ended.wait()
        with listen_tcp("127.0.0.1") as listener:
            address = TcpAddress("127.0.0.1", listener.getsockname()[1], "n0")
            assert campaign(place.store, job_prefix("run-1"), address, ended.pid, ttl=60.0) is not None

            async def go(watch: Standby) -> None:
                finding = asyncio.ensure_future(watch.next(1, PATIENCE))
                await started.until(1)
                finding.cancel()

            run(place, go, listener)
        ((_, arguments),) = started.lines
        assert arguments[-2] == "1", "it deposes that one"

    @pytest.mark.starts_processes
    def test_a_started_master_has_the_jobs_lock_and_its_own_session(
        self, place: Place, started: Started
    ) -> None:
        place.leader().die()

        async def go(watch: Standby) -> None:
            finding = asyncio.ensure_future(watch.next(1, PATIENCE))
            await started.until(1)
            finding.cancel()

        run(place, go)
        ((pid, _),) = started.lines
        place.let_go()
        assert place.job.alive()
        assert os.getsid(pid) == pid
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert not place.job.alive()

    @pytest.mark.starts_processes
    def test_a_standby_starts_further_candidates_with_growing_delays(
        self, place: Place, started: Started, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(standby, "DELAY", 0.1)
        monkeypatch.setattr(standby, "MAX_DELAY", 0.4)
        started.then("exit 1")
        place.leader().die()

        async def go() -> float:
            watch = Standby(place.job, place.lock, "n0", ("n0",))
            began = time.monotonic()
            finding = asyncio.ensure_future(watch.next(1, PATIENCE))
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
        self, place: Place, started: Started, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(standby, "DELAY", 0.01)
        monkeypatch.setattr(standby, "CANDIDATE_START_TIMEOUT", 0.5)
        place.leader().die()

        async def go(watch: Standby) -> float:
            finding = asyncio.ensure_future(watch.next(1, PATIENCE))
            await started.until(1)
            began = time.monotonic()
            await started.until(2)
            finding.cancel()
            return time.monotonic() - began

        assert run(place, go) > 0.4

    @pytest.mark.starts_processes
    @pytest.mark.parametrize(("steady", "tries"), [(0.0, 1), (PATIENCE, 4)])
    def test_a_standby_resets_its_delay_after_a_master_that_led_for_long(
        self, place: Place, started: Started, monkeypatch: pytest.MonkeyPatch, steady: float, tries: int
    ) -> None:
        """A master that has led only for a moment may have failed for a reason that also ends the next one."""
        monkeypatch.setattr(standby, "DELAY", 0.01)
        monkeypatch.setattr(standby, "PER_NODE_DELAY", 0.01)
        monkeypatch.setattr(standby, "BACKOFF_RESET_SECONDS", steady)
        started.then("exit 1")
        place.leader().die()

        async def go(watch: Standby) -> int:
            finding = asyncio.ensure_future(watch.next(1, PATIENCE))
            await started.until(3)
            second = place.leader("second", deposing=1)
            _, stream = await finding
            await stream.close()
            # The next one comes up until the test is over.
            started.then("exec sleep 100")
            second.die()
            before = len(started.lines)
            finding = asyncio.ensure_future(watch.next(2, PATIENCE))
            await started.until(before + 1)
            finding.cancel()
            return watch._attempts.number - (before - 3 if steady else 0)

        assert run(place, go) == tries
        assert started.deposing[-1] == "2"


class TestWhenNobodyLeads:
    @pytest.mark.starts_processes
    def test_a_standby_starts_a_candidate_after_a_while_without_a_leader(
        self, place: Place, started: Started
    ) -> None:
        began = time.monotonic()

        async def go(watch: Standby) -> None:
            finding = asyncio.ensure_future(watch.next(0, PATIENCE))
            await started.until(1)
            finding.cancel()

        run(place, go)
        assert time.monotonic() - began >= standby.CANDIDACY_DELAY
        assert started.deposing == ["0"]

    def test_a_standby_gives_up_when_there_was_never_a_leader(self, place: Place, started: Started) -> None:
        async def go(watch: Standby) -> None:
            await watch.next(0, 0.05)

        with pytest.raises(RendezvousError, match=r"no master after 0.05 s: nobody leads"):
            run(place, go)

    @pytest.mark.starts_processes
    def test_a_standby_never_gives_up_after_a_first_leader(self, place: Place, started: Started) -> None:
        async def go(watch: Standby) -> int:
            finding = asyncio.ensure_future(watch.next(1, 0.01))
            await started.until(1)
            place.leader("m1")
            epoch, stream = await finding
            await stream.close()
            return epoch

        assert run(place, go) == 1

    @pytest.mark.starts_processes
    def test_a_standby_starts_a_candidate_when_its_masters_lease_expires(
        self, place: Place, started: Started
    ) -> None:
        master = place.leader()
        place.store.txn([], deletes=["jobs/run-1/lead/leader"])

        async def go(watch: Standby) -> None:
            telling = asyncio.ensure_future(watch.another(1))
            await started.until(1)
            assert not telling.done(), "there is no use in leaving it yet"
            second = place.leader("second")
            assert second.path != master.path
            await telling

        run(place, go)
        assert started.deposing == ["0"]


class TestAStoreThatIsAway:
    def test_a_standby_keeps_the_leader_while_the_store_is_away(self, place: Place, started: Started) -> None:
        place.leader()
        file = place.job.path / "store.db"

        async def go(watch: Standby) -> None:
            telling = asyncio.ensure_future(watch.another(1))
            await asyncio.sleep(0.05)
            file.rename(file.with_suffix(".away"))
            await asyncio.sleep(0.2)
            assert not telling.done()
            telling.cancel()

        run(place, go)
        assert started.lines == []

    def test_a_standby_that_gives_up_names_the_store_that_is_away(
        self, place: Place, started: Started
    ) -> None:
        async def go(watch: Standby) -> None:
            while not watch._masters.seat.known:
                await watch._masters.news()
            (place.job.path / "store.db").unlink()
            await watch.next(0, 0.5)

        with pytest.raises(RendezvousError, match=r"no master after 0.5 s: .*was deleted or replaced"):
            run(place, go)
        assert started.lines == []


def test_a_standby_waits_for_a_hanging_leader(
    place: Place, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease shows when it is no longer the leader."""
    monkeypatch.setattr("unirun.rendezvous.masters.MASTER_CONNECT_TIMEOUT", 0.05)
    hanging = place.master()
    hanging.lead(place.store)
    hanging._first = None

    async def go(watch: Standby) -> None:
        finding = asyncio.ensure_future(watch.next(1, PATIENCE))
        await asyncio.sleep(0.4)
        assert not finding.done()
        assert started.lines == []
        place.leader("second", deposing=1)
        epoch, stream = await finding
        await stream.close()
        assert epoch == 2

    run(place, go)
    assert started.lines == []


@pytest.mark.starts_processes
def test_a_candidate_inherits_the_socket_that_listens_for_other_hosts(place: Place, started: Started) -> None:
    started.then("readlink /proc/self/fd/$6 >> $0.inherited; exec sleep 100")

    async def go(watch: Standby) -> None:
        search = asyncio.ensure_future(watch.next(1, PATIENCE))
        async with asyncio.timeout(PATIENCE):
            while not started.inherited:
                await asyncio.sleep(0.005)
        search.cancel()

    with listen_tcp("127.0.0.1") as tcp:
        run(place, go, tcp)
        assert started.lines[0][1][-1] == str(tcp.fileno())
        assert started.inherited == os.readlink(f"/proc/self/fd/{tcp.fileno()}")


@pytest.mark.starts_processes
def test_a_standby_retries_a_candidate_that_cannot_be_started(
    place: Place, started: Started, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An agent without a free descriptor must not end its workers."""
    program = sys.executable
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(standby, "DELAY", 0.01)

    async def go(watch: Standby) -> None:
        search = asyncio.ensure_future(watch.next(1, PATIENCE))
        while "no master can be started" not in capfd.readouterr().err:
            await asyncio.sleep(0.005)
        assert not search.done()
        monkeypatch.setattr(sys, "executable", program)
        await started.until(1)
        search.cancel()

    run(place, go)
