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

from tests.contract.store.etcd_server import EtcdCluster
from tests.effort import variants
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.rendezvous.store.protocol import Put
from unirun.rendezvous.store.url import open_store

from .harness import SHORT_DELAYS, SHORT_TERM, START_TIMEOUT, Unirun, command_in
from .masters import Masters, SteadyJob, calm

pytestmark = pytest.mark.timeout(300)

AWAY = 3 * SHORT_TERM["unirun.launcher.master.lead.TERM_TTL"]
"""Seconds of an outage: three times a master's lease."""

Cluster = Callable[..., EtcdCluster]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Starts a cluster for one test, by default of three members."""
    with ExitStack() as stack:
        count = 0

        def start(members: int = 3) -> EtcdCluster:
            nonlocal count
            count += 1
            folder = tmp_path / f"etcd{count}"
            folder.mkdir()
            servers = EtcdCluster(folder, members)
            stack.callback(servers.stop)
            settle(servers)
            return servers

        yield start


def settle(servers: EtcdCluster) -> None:
    """Wait until writes are fast: new members first fill their logs, for seconds on a busy disk."""
    store = open_store(servers.url(prefix="/settle/"))
    try:
        quick = 0
        deadline = time.monotonic() + START_TIMEOUT
        while quick < 5:
            assert time.monotonic() < deadline, "the cluster stays slow"
            began = time.monotonic()
            store.txn([], [Put("a", str(began))])
            quick = quick + 1 if time.monotonic() - began < 0.2 else 0
    finally:
        store.close()


def url(servers: EtcdCluster, timeout: float = 5) -> str:
    """The URL of the store, by default with the default timeout."""
    return servers.url(timeout=timeout)


def freeze(servers: EtcdCluster) -> None:
    for member in servers.members:
        assert member.process is not None
        os.kill(member.process.pid, signal.SIGSTOP)


def thaw(servers: EtcdCluster) -> None:
    for member in servers.members:
        assert member.process is not None
        os.kill(member.process.pid, signal.SIGCONT)


def kill(servers: EtcdCluster) -> None:
    for member in servers.members:
        member.kill()


def start(servers: EtcdCluster) -> None:
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
    steady_job = SteadyJob(unirun, "--store", url(servers))
    steady_job.pids()
    masters = Masters(unirun)
    leader = servers.leader()
    follower = next(each for each in servers.members if each is not leader)
    follower.kill()
    masters.kill()
    masters.next()
    steady_job.goes_on()
    servers.start(follower)
    eventually(lambda: servers.ctl("endpoint", "health", endpoint=follower.endpoint) or True, "it is back")
    leader.kill()
    masters.kill()
    masters.next()
    steady_job.goes_on()
    assert calm(steady_job.end())


@dataclass
class JobOnEtcd:
    """A job whose store goes away."""

    unirun: Unirun
    servers: EtcdCluster
    steady_job: SteadyJob
    pids: list[int]
    masters: Masters

    def trouble(self) -> str:
        """The trouble in ``unirun status``."""
        text: str = self.unirun.status()["trouble"]
        return text

    def has_restarted(self) -> bool:
        """Return True if the thinker was restarted."""
        return (self.unirun.job_dir() / "logs" / "thinker" / "0" / "1").exists()


@pytest.mark.chaos
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
        jobs_on_etcd: dict[str, JobOnEtcd] = {}
        for way in ways:
            servers = cluster()
            (tmp_path / way).mkdir()
            unirun = stack.enter_context(command_in(tmp_path / way))
            steady_job = SteadyJob(unirun, "--store", url(servers), "--max-restarts", 3, constants=SHORT_TERM)
            jobs_on_etcd[way] = JobOnEtcd(unirun, servers, steady_job, steady_job.pids(), Masters(unirun))
        began = time.monotonic()
        for way, job_on_etcd in jobs_on_etcd.items():
            ways[way][0](job_on_etcd.servers)
        for job_on_etcd in jobs_on_etcd.values():
            trouble = eventually(job_on_etcd.trouble, "the status tells of the store")
            assert "decisions wait until it can be written" in trouble
            shown = job_on_etcd.unirun("status")
            assert shown.code == 0
            assert "decisions wait" in shown.out
            job_on_etcd.steady_job.goes_on()
            os.kill(job_on_etcd.pids[3], signal.SIGKILL)
        while (left := began + AWAY - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
            for job_on_etcd in jobs_on_etcd.values():
                assert not job_on_etcd.has_restarted(), "nobody can have written it"
        for way, job_on_etcd in jobs_on_etcd.items():
            ways[way][1](job_on_etcd.servers)
        for way, job_on_etcd in jobs_on_etcd.items():
            eventually(job_on_etcd.has_restarted, f"{way}: the dead worker is started again", START_TIMEOUT)
            job_on_etcd.steady_job.goes_on(START_TIMEOUT)
            eventually(
                lambda job_on_etcd=job_on_etcd: job_on_etcd.trouble() == "",  # type: ignore[misc]
                f"{way}: the term is kept again, too",
            )
            assert job_on_etcd.masters.restarts() == {"adder": 0, "thinker": 1, "trainer": 0}
        for job_on_etcd in jobs_on_etcd.values():
            row = job_on_etcd.steady_job.end()
            assert [pid for pid, _ in row["after"][:2]] == job_on_etcd.pids[1:3]
            assert [incarnation for _, incarnation in row["after"]] == [0, 0, 1]


class TestCtrlCWhileTheStoreIsAway:
    @pytest.mark.parametrize("gone", variants(freeze, kill))
    def test_ctrl_c_while_the_store_is_away_ends_the_job(
        self, unirun: Unirun, cluster: Cluster, gone: Callable[[EtcdCluster], None]
    ) -> None:
        servers = cluster(members=1)
        steady_job = SteadyJob(unirun, "--store", url(servers, timeout=2))
        steady_job.pids()
        gone(servers)
        steady_job.job.signal(signal.SIGINT)
        end = steady_job.job.end(WAIT_TIMEOUT)
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
        steady_job = SteadyJob(unirun, "--store", url(servers, timeout=2), constants=SHORT_DELAYS)
        steady_job.pids()
        masters = Masters(unirun)
        masters.next()
        kill(servers)
        os.kill(masters.known.pid, signal.SIGKILL)
        for answer in ("stopping", "killing"):
            steady_job.job.signal(signal.SIGINT)
            steady_job.job.lines(f"SIGINT: {answer}")
        end = steady_job.job.end(WAIT_TIMEOUT)
        assert end.code == 130, end.err
