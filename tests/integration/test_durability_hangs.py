"""A hanging master is replaced; when it continues, it finds that its term is over, and exits."""

from __future__ import annotations

import os
import signal

import pytest

from tests.waiting import WAIT_TIMEOUT, eventually

from .harness import SHORT_TERM, START_TIMEOUT, Unirun, gone
from .masters import Masters, SteadyJob, calm

pytestmark = pytest.mark.timeout(300)


def test_a_master_that_hangs_longer_than_its_lease_is_replaced_and_does_no_harm(
    unirun: Unirun, store: list[object]
) -> None:
    """
    1. The master is suspended, and a workload is killed.
    2. The lease expires: the next master restarts the workload.
    3. The first master continues, finds that its term is over, and exits without a decision.
    4. The job ends with one restart; all other processes are the same.
    """
    steady_job = SteadyJob(unirun, *store, "--max-restarts", 3, constants=SHORT_TERM)
    victim = steady_job.pids()[1]
    masters = Masters(unirun)
    hung = masters.suspend()
    # It has not yet heard of this death when it goes on: what it would decide then is not its business any more.
    os.kill(victim, signal.SIGKILL)
    heir = masters.next()
    eventually(lambda: masters.restarts()["adder"] == 1, "its heir has seen to it", START_TIMEOUT)
    steady_job.goes_on(START_TIMEOUT)
    os.kill(hung.pid, signal.SIGCONT)
    assert gone(hung.pid, WAIT_TIMEOUT), "it ends when it learns that its term is over"
    steady_job.goes_on()
    assert masters.leader() == heir
    row = steady_job.end()
    assert [incarnation for _, incarnation in row["after"]] == [1, 0, 0]
    assert row["before"][1:] == row["after"][1:]
    assert masters.restarts() == {"adder": 1, "thinker": 0, "trainer": 0}
    (decision,) = (text for text in unirun.events("decision") if "restart" in text)
    assert "adder:0 alone" in decision


def test_a_master_that_hangs_for_a_moment_keeps_leading(unirun: Unirun) -> None:
    steady_job = SteadyJob(unirun)
    steady_job.pids()
    masters = Masters(unirun)
    leader = masters.suspend()
    steady_job.goes_on()
    os.kill(leader.pid, signal.SIGCONT)
    assert calm(steady_job.end())
    assert masters.status()["epoch"] == leader.epoch
