"""An etcd whose members die or hang, one or all, while a job runs: nothing restarts, and what is due is done later."""

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
from unirun.rendezvous.store.protocol import Put
from unirun.rendezvous.store.url import open_store

from .harness import IMPATIENT, SHORT_TERM, SOON, START, Unirun, command_in, eventually
from .masters import Masters, Steady, calm

pytestmark = pytest.mark.timeout(300)

AWAY = 3 * SHORT_TERM["unirun.master.lead.TERM_TTL"]
"""Seconds that a cluster is away: three times as long as a master's lease."""

Cluster = Callable[..., Servers]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Starts a cluster, of three members if nothing else is said, for one test."""
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
    """Wait until writes are quick: new members fill their logs first, for seconds on a busy disk."""
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
    """With the timeout that a user has who asks for none, unless something else is said."""
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


def test_a_member_and_then_the_leader_of_the_members_may_die(unirun: Unirun, cluster: Cluster) -> None:
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
        """What ``unirun status`` says of the store."""
        text: str = self.unirun.status()["trouble"]
        return text

    def has_restarted(self) -> bool:
        """Whether the thinker was started again."""
        return (self.unirun.job_dir() / "logs" / "thinker" / "0" / "1").exists()


def test_the_whole_cluster_may_hang_or_die_for_a_while(tmp_path: Path, cluster: Cluster) -> None:
    """Two jobs at once, so that the waiting is done once."""
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
    @pytest.mark.parametrize("gone", [kill, freeze])
    def test_ends_the_job_all_the_same(
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

    def test_ends_it_when_it_comes_twice_and_there_is_no_master_either(
        self, unirun: Unirun, cluster: Cluster
    ) -> None:
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
