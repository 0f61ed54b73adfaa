"""Nobody is given up without need: a busy machine, and agents and masters that are stopped for a second at a time.

It takes ten minutes; UNIRUN_SOAK_SECONDS=120 runs for so long.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.integration.hosts.ticking_job import TickingJob
from tests.testbed.fixtures import available
from tests.testbed.hosts import Hosts

SECONDS = float(os.environ.get("UNIRUN_SOAK_SECONDS", "600"))

LOAD = 4
"""Processes that compute all the time."""

STALL = 1.0

pytestmark = pytest.mark.timeout(240 + 2 * SECONDS)


def test_no_node_is_silent_while_agents_and_masters_are_stopped_for_a_second_at_a_time() -> None:
    """1. A job of four ranks on three hosts, with `LOAD` processes beside it.
    2. Each second or so an agent or the master is stopped for a second.
    3. Nobody is reported as silent or given up, and no worker has ended.
    """
    with available(), contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(3))
        job = TickingJob(hosts)
        stack.callback(job.kill)
        job.until_up(hosts[0], 0, 0, 1)
        job.until_up(hosts[1], 0, 2, 3)
        for _ in range(LOAD):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        rng, stalls = random.Random(1), 0
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            pid = rng.choice([*job.agents(), *job.masters()])
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STALL)
            os.kill(pid, signal.SIGCONT)
            stalls += 1
            time.sleep(rng.uniform(0.0, 1.0))
        alarms = [job.events(kind) for kind in ("silence", "agent_lost", "master")]
        print(f"\n{stalls} stalls in {SECONDS:g} s, alarms: {alarms}")
        assert alarms == [[], [], []]
        assert not job.ticks(hosts[1], 2, 1)
        job.ends()
