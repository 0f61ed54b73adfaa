"""Masters that are killed repeatedly at random moments: nothing else is affected."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.effort import CHAOS

from .harness import EVEN_DELAY, START_TIMEOUT, Unirun
from .masters import Masters, SteadyJob, calm, said

pytestmark = pytest.mark.timeout(300)


KILLS = 50 if CHAOS else 8
WHILE_IT_STARTS, WHILE_IT_ENDS = 3, 2
MOMENT = 0.3
"""Maximum seconds that a master leads before it is killed."""


@pytest.fixture
def chance() -> random.Random:
    """A random generator; its seed is printed when the test fails."""
    seed = random.randrange(1_000_000)
    print("seed", seed)
    return random.Random(seed)


def test_repeated_deaths_of_the_master_cost_no_worker_call_or_result(
    unirun: Unirun, store: list[object], chance: random.Random
) -> None:
    """
    1. Masters are killed at random moments while the job starts.
    2. Masters are killed at random moments while the trainer makes calls.
    3. Masters are killed while the job ends.
    4. The job has succeeded: no restart, no lost call, no decision, and no open socket in its directory.
    """
    steady_job = SteadyJob(unirun, *store, constants=EVEN_DELAY)
    masters = Masters(unirun)
    for _ in range(WHILE_IT_STARTS):
        masters.next()
        time.sleep(chance.random() * MOMENT)
        masters.kill()
    pids = steady_job.pids()
    for _ in range(KILLS - WHILE_IT_STARTS - WHILE_IT_ENDS):
        masters.next()
        time.sleep(chance.random() * MOMENT)
        masters.kill()
    steady_job.goes_on(START_TIMEOUT)
    steady_job.finish()
    for _ in range(WHILE_IT_ENDS):
        masters.kill(unless_over=steady_job.job)
    row = said(steady_job.job.end())
    assert calm(row), row
    assert pids[1:] == [pid for pid, _ in row["after"]]
    status = masters.status()
    assert (status["phase"], status["code"]) == ("succeeded", 0)
    assert not any(role["restarts"] or role["generation"] for role in status["roles"])
    assert not in_use(masters.job.path), "no socket has anybody who listens"
    assert unirun.events("decision") == [], "nothing had to be decided"
    print("seconds without a master:", *(f"{each:.2f}" for each in sorted(masters.times)))


def in_use(folder: Path) -> list[str]:
    """The open sockets in `folder`."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line for line in lines if line.partition("/")[2].startswith(str(folder)[1:])]
