"""The cost of a failure: the time until all ranks work again, beside torchrun with the same script in the same run.

Ranks are killed in the middle of their all_reduces, which come every 10 ms. They write the times themselves, and share
one clock with this process.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import quantiles

from benchmarks import surviving
from benchmarks.figure import Bar, BenchmarkError, Figure, compared, load_of_others, measured, say
from benchmarks.job import TORCHRUN_OWN_STORE, UNIRUN, Job, Point, running
from benchmarks.suites.launch import SETTLE, restart_time
from benchmarks.suites.nodes import trained, wait_for
from tests.testbed.hosts import Hosts
from tests.testbed.machine import Unavailable

OURS = replace(UNIRUN, env={**UNIRUN.env, "PYTHONPATH": str(Path(__file__).parents[2])})
"""The launcher, for scripts that import `benchmarks`."""

KILLS = 10
"""The kills of workers in each run: 50 in five runs."""

MEDIAN = Bar("SIGKILL of a workload → all 4 ranks past an all_reduce, p50", "s", 0.15)
TAIL = Bar("the same, p90", "s", 0.5)
FORGOTTEN = Bar("the same, with a survivor that waits for what gloo has forgotten: the longest", "s", 2.0)
HEAD = Bar("power of the head lost, store etcd, 3 hosts → all 4 ranks past an all_reduce", "s", 15.0)
RESILIENT = Bar("restart of a rank of 4 of a resilient script after SIGKILL ÷ torchrun", "ratio", 0.05)


def figures(runs: int) -> list[Figure]:
    """All figures of this suite, each from `runs` runs."""
    return [*of_workers(runs), scripts(runs), head(runs)]


# Workers that die.


def of_workers(runs: int) -> list[Figure]:
    """The figures of the workers that are killed, in `runs` jobs with `KILLS` kills each."""
    say(MEDIAN.name)
    plain: list[float] = []
    late: list[float] = []
    busy = load_of_others()
    fault = ""
    try:
        for _ in range(runs):
            for seconds, lost in kills(KILLS):
                (plain if lost == 1 else late).append(seconds)
    except BenchmarkError as error:
        fault = str(error)
    tail = quantiles(plain, n=10)[-1] if len(plain) > 1 else None
    middle = quantiles(plain, n=2)[0] if len(plain) > 1 else None
    note = f"{len(plain)} kills" + (f", and {len(late)} counted apart" if late else "")

    def figure(bar: Bar, value: float | None, own: list[float], note: str = "") -> Figure:
        return Figure(bar, value, runs, "s", tuple(own), fault=fault, busy=busy, note=note)

    found = [figure(MEDIAN, middle, plain, note), figure(TAIL, tail, plain)]
    return [*found, figure(FORGOTTEN, max(late), late)] if late else found


def kills(count: int) -> Iterator[tuple[float, int]]:
    """For each kill of a workload in one job: the seconds until all ranks are past an all_reduce, and how many of them
    had to be started again. A survivor that waits for a collective which gloo has forgotten is killed, too."""
    with workloads(max_restarts=count + 1) as job:
        before = job.points()
        for number in range(count):
            time.sleep(SETTLE)
            killed = time.time()
            os.kill(before[number % job.ranks].pid, signal.SIGKILL)
            after = job.points(number + 1)
            yield last(after) - killed, len({point.pid for point in after} - {point.pid for point in before})
            before = after


@contextmanager
def workloads(max_restarts: int) -> Iterator[Job]:
    """A job of four workloads, and a trainer that lets them step."""

    def arguments(home: Path) -> tuple[str, ...]:
        file = home / "job.yaml"
        file.write_text(json.dumps(surviving.job(home, max_restarts)))
        return ("--config", str(file))

    with running(OURS, 4, arguments) as job:
        yield job


def last(points: list[Point]) -> float:
    """The time of the last rank."""
    return max(point.time for point in points)


# Scripts.


def scripts(runs: int) -> Figure:
    """The restart of a rank of resilient scripts, and of all ranks by torchrun."""
    ours, theirs = resilient_restart_time, partial(restart_time, TORCHRUN_OWN_STORE)
    return compared(RESILIENT, "s", runs, ours, "torchrun", theirs)


def resilient_restart_time() -> float:
    """Seconds from SIGKILL of rank 1 of 4, amid all_reduces, until all 4 ranks are past one of the next generation."""
    with running(OURS, 4, partial(script, "resilient")) as job:
        victim = job.points()[1].pid
        time.sleep(SETTLE)
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        return last(job.points(1)) - killed


def script(how: str, home: Path) -> tuple[str, ...]:
    """The arguments of a launcher for the script."""
    options = ("--nproc-per-node=4", "--max-restarts=3")
    return (*options, surviving.__file__, str(home / "points"), how)


# The head, with its master and a member of the store.


def head(runs: int) -> Figure:
    """The loss of the head, where hosts can be made."""
    try:
        with Hosts(1):
            pass
    except Unavailable as error:
        return Figure(HEAD, None, runs, HEAD.unit, missing=str(error))
    return measured(HEAD, runs, after_head_loss)


def after_head_loss() -> float:
    """Seconds from the end of all processes and of the network of the head, on which two of the ranks run, until all
    ranks are past an all_reduce on the two other hosts."""
    with trained("--store", "etcd") as (hosts, points, process, _):
        # The hosts that are left have imported torch for the stores of roles.
        time.sleep(2.0)
        lost = time.time()
        hosts[0].cable(up=False)
        hosts[0].kill_all(sshd=True)
        return last(wait_for(points, 4, 1, [process])) - lost
