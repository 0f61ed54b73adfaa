"""No worker or node is given up without need: a busy machine, agents and masters that are stopped for a second at a time, and ranks
that pause and save.

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

from tests.integration.conftest import script, unirun, warm
from tests.integration.harness import Script, Unirun
from tests.integration.hosts.ticking_job import TickingJob
from tests.testbed.fixtures import available
from tests.testbed.hosts import Hosts

__all__ = ["script", "unirun", "warm"]

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


TRAINING = """
    import ctypes, random, sys, time
    import torch, torch.distributed as dist, unirun

    dist.init_process_group("gloo")
    rank, rng, seconds = dist.get_rank(), random.Random(dist.get_rank()), float(sys.argv[1])
    began = saved = time.monotonic()
    goes_on, step = torch.ones(1), 0
    while goes_on:
        step += 1
        unirun.progress(step)
        time.sleep(rng.uniform(0, 0.1))
        if rng.random() < 0.02:
            # As a full collection of the garbage collector, with the GIL.
            ctypes.PyDLL(None).usleep(1_000_000)
        if step % int(sys.argv[2]) == 0 and rank == 0:
            with unirun.allowance(30):
                time.sleep(20)
        goes_on.fill_(time.monotonic() < began + seconds)
        dist.all_reduce(goes_on, dist.ReduceOp.MIN)
    print("done", step, flush=True)
"""


def trains_without_an_alarm(unirun: Unirun, script: Script, seconds: float, steps: int) -> None:
    """Train for so long, with a save after so many `steps`, and with `LOAD` processes beside it. Nobody is reported as
    late, and nobody is killed."""
    with contextlib.ExitStack() as stack:
        for _ in range(LOAD):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        options = ("--nproc-per-node", "4", "--hang-timeout", "10", "--first-step-timeout", "60")
        job = unirun.start(*options, script(TRAINING), str(seconds), str(steps))
        result = job.end(within=seconds + 200)
    assert (result.code, unirun.status()["failures"], unirun.events("late")) == (0, [], []), result.err
    print(f"\n{result.lines[0]}")


def test_no_rank_hangs_that_pauses_for_a_second_or_saves_for_longer_than_the_time_out(
    unirun: Unirun, script: Script
) -> None:
    """1. Four ranks with a time-out of ten seconds train, with `LOAD` processes beside them.
    2. Each pauses for a second now and then, with the GIL, and rank 0 saves for 20 seconds, with an allowance.
    3. Nobody is reported as late, and nobody is killed.
    """
    trains_without_an_alarm(unirun, script, SECONDS, 200)
