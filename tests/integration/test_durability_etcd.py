"""etcd members that die or hang, one or all, while a job runs: nothing restarts, and decisions are made later."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract.store.etcd_server import Servers
from tests.effort import variants
from unirun.rendezvous.store.protocol import Put
from unirun.rendezvous.store.url import open_store

from .harness import IMPATIENT, SHORT_TERM, SOON, START, Unirun, command_in, eventually
from .masters import Masters, Steady, calm

pytestmark = pytest.mark.timeout(300)

AWAY = 3 * SHORT_TERM["unirun.launcher.master.lead.TERM_TTL"]
"""Seconds of an outage: three times a master's lease."""

Cluster = Callable[..., Servers]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Starts a cluster for one test, by default of three members."""
    with ExitStack() as stack:
        count = 0

        def start(members: int = 3) -> Servers:
            nonlocal count
            count += 1
            folder = tmp_path / f"etcd{count}"
            folder.mkdir()
            servers = Servers(folder, members)
            stack.callback(servers.stop)
            settle(servers)
            return servers

        yield start


def settle(servers: Servers) -> None:
    """Wait until writes are fast: new members first fill their logs, for seconds on a busy disk."""
    store = open_store(servers.url(prefix="/settle/"))
    try:
        quick = 0
        deadline = time.monotonic() + START
        while quick < 5:
            assert time.monotonic() < deadline, "the cluster stays slow"
            began = time.monotonic()
            store.txn([], [Put("a", str(began))])
            quick = quick + 1 if time.monotonic() - began < 0.2 else 0
    finally:
        store.close()


def url(servers: Servers, timeout: float = 5) -> str:
    """The URL of the store, by default with the default timeout."""
    return servers.url(timeout=timeout)


def freeze(servers: Servers) -> None:
    for member in servers.members:
        assert member.process is not None
        os.kill(member.process.pid, signal.SIGSTOP)


def thaw(servers: Servers) -> None:
    for member in servers.members:
        assert member.process is not None
        os.kill(member.process.pid, signal.SIGCONT)


def kill(servers: Servers) -> None:
    for member in servers.members:
        member.kill()


def start(servers: Servers) -> None:
    for member in servers.members:
        servers.start(member)


def test_a_job_survives_the_death_of_an_etcd_member_and_of_the_etcd_leader(
    unirun: Unirun, cluster: Cluster
) -> None:
    """
    1. An etcd follower and the master are killed: the next master leads, and the job continues.
    2. The follower is started again.
    3. The etcd leader and the master are killed: the next master leads, and the job continues.
    4. The job ends without a restart.
    """
    servers = cluster()
    steady = Steady(unirun, "--store", url(servers))
    steady.pids()
    masters = Masters(unirun)
    leader = servers.leader()
    follower = next(each for each in servers.members if each is not leader)
    follower.kill()
    masters.kill()
    masters.next()
    steady.goes_on()
    servers.start(follower)
    eventually(lambda: servers.ctl("endpoint", "health", endpoint=follower.endpoint) or True, "it is back")
    leader.kill()
    masters.kill()
    masters.next()
    steady.goes_on()
    assert calm(steady.end())


@dataclass
class Stage:
    """A job whose store goes away."""

    unirun: Unirun
    servers: Servers
    steady: Steady
    pids: list[int]
    masters: Masters

    def trouble(self) -> str:
        """The trouble in ``unirun status``."""
        text: str = self.unirun.status()["trouble"]
        return text

    def has_restarted(self) -> bool:
        """Return True if the thinker was restarted."""
        return (self.unirun.job_dir() / "logs" / "thinker" / "0" / "1").exists()


def test_a_job_survives_an_outage_of_the_whole_etcd_cluster(tmp_path: Path, cluster: Cluster) -> None:
    """
    Two jobs at once, to wait only once: the cluster of one hangs, that of the other is killed.
    1. The clusters go away: the status reports it, and calls continue.
    2. A workload is killed: nothing restarts while the outage lasts, for longer than the master's lease.
    3. The clusters come back: the workload restarts, and the status is clear.
    4. The jobs end with one restart each; all other processes are the same.
    """
    ways = {"hang": (freeze, thaw), "die": (kill, start)}
    with ExitStack() as stack:
        stages: dict[str, Stage] = {}
        for way in ways:
            servers = cluster()
            (tmp_path / way).mkdir()
            unirun = stack.enter_context(command_in(tmp_path / way))
            steady = Steady(unirun, "--store", url(servers), "--max-restarts", 3, constants=SHORT_TERM)
            stages[way] = Stage(unirun, servers, steady, steady.pids(), Masters(unirun))
        began = time.monotonic()
        for way, stage in stages.items():
            ways[way][0](stage.servers)
        for stage in stages.values():
            trouble = eventually(stage.trouble, "the status tells of the store")
            assert "decisions wait until it can be written" in trouble
            shown = stage.unirun("status")
            assert shown.code == 0
            assert "decisions wait" in shown.out
            stage.steady.goes_on()
            os.kill(stage.pids[3], signal.SIGKILL)
        while (left := began + AWAY - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
            for stage in stages.values():
                assert not stage.has_restarted(), "nobody can have written it"
        for way, stage in stages.items():
            ways[way][1](stage.servers)
        for way, stage in stages.items():
            eventually(stage.has_restarted, f"{way}: the dead worker is started again", START)
            stage.steady.goes_on(START)
            eventually(lambda stage=stage: stage.trouble() == "", f"{way}: the term is kept again, too")  # type: ignore[misc]
            assert stage.masters.restarts() == {"adder": 0, "thinker": 1, "trainer": 0}
        for stage in stages.values():
            row = stage.steady.end()
            assert [pid for pid, _ in row["after"][:2]] == stage.pids[1:3]
            assert [incarnation for _, incarnation in row["after"]] == [0, 0, 1]


class TestCtrlCWhileTheStoreIsAway:
    @pytest.mark.parametrize("gone", variants(freeze, kill))
    def test_ctrl_c_while_the_store_is_away_ends_the_job(
        self, unirun: Unirun, cluster: Cluster, gone: Callable[[Servers], None]
    ) -> None:
        servers = cluster(members=1)
        steady = Steady(unirun, "--store", url(servers, timeout=2))
        steady.pids()
        gone(servers)
        steady.job.signal(signal.SIGINT)
        end = steady.job.end(SOON)
        assert end.code == 130, end.err
        assert unirun.status()["phase"] == "stopped"

    def test_ctrl_c_twice_without_store_and_master_ends_the_job(
        self, unirun: Unirun, cluster: Cluster
    ) -> None:
        """
        1. etcd is killed, then the master.
        2. Ctrl-C twice: the command stops the agent itself, and ends with 130.
        """
        servers = cluster(members=1)
        steady = Steady(unirun, "--store", url(servers, timeout=2), constants=IMPATIENT)
        steady.pids()
        masters = Masters(unirun)
        masters.next()
        kill(servers)
        os.kill(masters.known.pid, signal.SIGKILL)
        for answer in ("stopping", "killing"):
            steady.job.signal(signal.SIGINT)
            steady.job.lines(f"SIGINT: {answer}")
        end = steady.job.end(SOON)
        assert end.code == 130, end.err
