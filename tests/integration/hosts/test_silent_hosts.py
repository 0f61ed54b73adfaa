"""A host of several falls silent: for three seconds nothing happens; for longer its workers end before others take their place."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.testbed.hosts import Hosts

from .ticking_job import TickingJob

REPEATED = pytest.mark.chaos
"""With a command on each host, and workers that tell the time all the time."""


@pytest.fixture
def job(hosts: Hosts) -> Iterator[TickingJob]:
    ticking = TickingJob(hosts)
    try:
        ticking.until_up(hosts[0], 0, 0, 1)
        ticking.until_up(hosts[1], 0, 2, 3)
        yield ticking
    finally:
        ticking.kill()


@REPEATED
def test_a_cable_that_is_out_for_three_seconds_restarts_nothing(job: TickingJob) -> None:
    job.hosts[1].cable(up=False)
    time.sleep(3.0)
    job.hosts[1].cable(up=True)
    # As long as it would have taken to give the node up.
    time.sleep(6.0)
    assert job.events("agent_lost") == []
    job.ends()
    assert not job.ticks(job.hosts[1], 2, 1)


def goes_on_elsewhere(job: TickingJob, began: float) -> None:
    """The ranks of h2 run on h3 in time, and their workers on h2 had ended before."""
    job.until_up(job.hosts[2], 1, 2, 3)
    for rank in (2, 3):
        last, first = job.ticks(job.hosts[1], rank, 0)[-1], job.ticks(job.hosts[2], rank, 1)[0]
        assert last < first
        assert first - began < 60.0
    (silence, *_) = job.events("silence")
    assert silence.startswith("node h2 has been silent for 4 s")
    assert any("h2: it has been silent for more than 6.8 s" in text for text in job.events("agent_lost"))


@REPEATED
def test_the_ranks_of_a_host_whose_cable_is_out_run_elsewhere_when_it_has_ended_its_own(
    job: TickingJob,
) -> None:
    began = time.monotonic()
    job.hosts[1].cable(up=False)
    goes_on_elsewhere(job, began)
    job.hosts[1].cable(up=True)
    job.nothing_runs_on(job.hosts[1])
    job.ends()


@REPEATED
def test_the_ranks_of_a_host_that_hangs_run_elsewhere_and_its_workers_end_when_it_goes_on(
    job: TickingJob,
) -> None:
    began = time.monotonic()
    job.hosts[1].freeze()
    job.until_up(job.hosts[2], 1, 2, 3)
    assert job.ticks(job.hosts[2], 2, 1)[0] - began < 60.0
    thawed = time.monotonic()
    job.hosts[1].thaw()
    job.nothing_runs_on(job.hosts[1])
    # Its spawner and its workers go on in the same moment; the agent is dead by then.
    assert all(job.ticks(job.hosts[1], rank, 0)[-1] < thawed + 1.0 for rank in (2, 3))
    job.ends()


def test_a_master_that_hangs_on_the_head_costs_no_other_host_its_workers(job: TickingJob) -> None:
    """It is stopped for longer than an agent waits for an answer: another leads by then."""
    (pid,) = job.masters()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(9.0)
    os.kill(pid, signal.SIGCONT)
    job.ends()
    assert job.events("agent_lost") == []
    assert not job.ticks(job.hosts[1], 2, 1)


@REPEATED
def test_a_head_that_is_cut_off_costs_no_other_host_its_workers_when_the_store_is_etcd(hosts: Hosts) -> None:
    """Nobody answers the other agents for a while; they see in etcd that their nodes have not been given up."""
    job = TickingJob(hosts, by_hand=True, store=hosts.etcd().url())
    try:
        job.until_up(hosts[0], 0, 0, 1)
        job.until_up(hosts[1], 0, 2, 3)
        hosts[0].cable(up=False)
        job.until_up(hosts[2], 1, 0, 1)
        assert job.ticks(hosts[0], 0, 0)[-1] < job.ticks(hosts[2], 0, 1)[0]
        job.until_up(hosts[1], 1, 2, 3)
        job.ends()
    finally:
        hosts[0].cable(up=True)
        job.kill()
