"""A host of a running job falls silent, hangs, loses its power or its agent: its ranks go on elsewhere, and never twice."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.effort import CHAOS
from tests.testbed.warm import is_warm
from tests.waiting import WAIT_TIMEOUT, eventually

from ..harness import Result, Running
from .cluster import LIVING, Start, UnirunOnHosts, places, since, starts, title_of

NOTICED = 30.0
"""Seconds in which a host that hangs must be noticed."""

LOST = 60.0
"""Seconds in which the ranks of a silent host must run elsewhere: it is silent for 4 s, then given up after 2.8."""

AT_ONCE = 60.0
"""Seconds in which the ranks run elsewhere of a host whose kernel closes its connections; 1.5 on a machine without other
work."""

BAD_CABLE = 120.0 if CHAOS else 8.0
"""Seconds of delay and loss."""


@pytest.fixture
def job(cluster: UnirunOnHosts) -> Running:
    """Four ranks on h1 and h2; h3 is a spare."""
    job = cluster.over_ssh(LIVING, spares=1)
    starts(job, 4)
    cluster.warmed_up()
    return job


def ended_well(cluster: UnirunOnHosts, job: Running) -> Result:
    """Let all workers end, and the command with them."""
    cluster.enough()
    end = job.end()
    assert end.code == 0, end.err
    return end


def moved(cluster: UnirunOnHosts, job: Running, within: float) -> list[Start]:
    """The ranks of h2 have started on h3, all of them once more, within so many seconds."""
    after = starts(job, 4, 1, within)
    assert places(after) == ["h1", "h1", "h3", "h3"]
    return after


def nobody_ran_twice(cluster: UnirunOnHosts, before: list[Start], after: list[Start]) -> None:
    """Each rank was dead before its successor has started."""
    for one, other in zip(before, after, strict=True):
        assert cluster.last_moment(one) < other.began, (one, other)


@pytest.mark.timeout(300)
@pytest.mark.chaos
def test_a_bad_cable_and_one_that_is_out_for_three_seconds_restart_nothing(cluster: UnirunOnHosts) -> None:
    """
    1. Packets of all hosts are late by 20 ms, and one of a hundred is lost.
    2. Then the cable of one host is out for three seconds.
    3. No node is lost, and every rank has run all the time.
    """
    job = cluster.over_ssh(LIVING, actor="count: 6")
    before = starts(job, 6)
    for host in cluster.hosts:
        host.netem(delay_ms=20, loss=0.01)
    time.sleep(BAD_CABLE)
    assert cluster.events("silence") == []
    for host in cluster.hosts:
        host.netem()
    cluster.hosts[1].cable(up=False)
    time.sleep(3.0)
    cluster.hosts[1].cable(up=True)
    back = time.monotonic()
    # The latest beat was up to 1 s old, and a silent node is lost after 6.8 s.
    eventually(lambda: since(back) > 4.0, "whatever would follow has followed")
    assert cluster.events("agent_lost") == []
    for start in before:
        assert cluster.last_moment(start) > back
    end = ended_well(cluster, job)
    assert len(end.out.splitlines()) == 6


def test_ranks_of_a_host_without_a_cable_are_dead_before_they_start_on_the_spare(
    cluster: UnirunOnHosts, job: Running
) -> None:
    before = starts(job, 4)
    cluster.hosts[1].cable(up=False)
    out = time.monotonic()
    after = moved(cluster, job, WAIT_TIMEOUT)
    assert after[2].began - out < LOST
    nobody_ran_twice(cluster, before, after)
    assert agents_and_workers(cluster, "h2") == []
    told = time.monotonic()
    end = ended_well(cluster, job)
    assert since(told) < 5.0, "nobody waits for the logs of a host that is lost"
    assert "h2: node h2 has been silent for 4 s" in end.err
    assert "placement: actor:2-3 from h2 to h3" in end.err


@pytest.mark.chaos
def test_a_host_that_hangs_is_noticed_and_when_it_goes_on_its_workers_and_its_agent_end(
    cluster: UnirunOnHosts, job: Running
) -> None:
    before = starts(job, 4)
    cluster.hosts[1].freeze()
    frozen = time.monotonic()
    job.lines(r"h2: node h2 has been silent", within=WAIT_TIMEOUT)
    assert since(frozen) < NOTICED + 1.0
    after = moved(cluster, job, WAIT_TIMEOUT)
    nobody_ran_twice(cluster, before, after)
    cluster.hosts[1].thaw()
    thawed = time.monotonic()
    eventually(lambda: not agents_and_workers(cluster, "h2"), "agent and workers have ended")
    for start in before[2:]:
        assert cluster.last_moment(start) - thawed < 10.0, "it has not run on"
    ended_well(cluster, job)


def agents_and_workers(cluster: UnirunOnHosts, node: str) -> list[str]:
    """The titles of the job's processes on a host, without those that only send its files."""
    return [
        title
        for pid in cluster.host(node).pids()
        if (title := title_of(pid)).startswith(("unirun", "actor")) and not is_warm(pid)
    ]


@pytest.mark.parametrize("lost", ["agent", "processes", "power"] if CHAOS else ["processes"])
def test_ranks_of_a_host_that_is_killed_start_on_the_spare(
    cluster: UnirunOnHosts, job: Running, lost: str
) -> None:
    """Lost are the agent, all processes while the kernel closes their connections, or all without a word."""
    before = starts(job, 4)
    if lost == "agent":
        os.kill(cluster.pid_on("h2", "unirun-agent"), signal.SIGKILL)
    else:
        cluster.hosts[1].cable(up=lost != "power")
        cluster.hosts[1].kill_all(sshd=lost == "power")
    killed = time.monotonic()
    after = moved(cluster, job, WAIT_TIMEOUT)
    print(f"{after[2].began - killed:.2f} s")
    assert after[2].began - killed < (LOST if lost == "power" else AT_ONCE)
    nobody_ran_twice(cluster, before, after)
    ended_well(cluster, job)
