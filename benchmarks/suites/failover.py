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
from statistics import median, quantiles

from benchmarks import surviving
from benchmarks.figure import Bar, BenchmarkError, Figure, compared, load_of_others, measured, say
from benchmarks.job import TORCHRUN_OWN_STORE, UNIRUN, Job, Launcher, Point, parse_points, running
from benchmarks.suites.launch import SETTLE, events, restart_time
from benchmarks.suites.nodes import trained, wait_for
from tests.testbed.hosts import Hosts
from tests.testbed.machine import Unavailable

OURS, THEIRS = (
    replace(launcher, env={**launcher.env, "PYTHONPATH": str(Path(__file__).parents[2])})
    for launcher in (UNIRUN, TORCHRUN_OWN_STORE)
)
"""The launchers, for scripts that import `benchmarks`."""

HANG_TIMEOUT = 2.0

KILLS = 50
"""The kills of workers in all runs together, however many these are."""

MEDIAN = Bar("SIGKILL of a workload → all 4 ranks past an all_reduce, p50", "s", 0.15)
TAIL = Bar("the same, p90", "s", 0.5)
FORGOTTEN = Bar("the same, with a survivor that waits for what gloo has forgotten: the longest", "s", 2.0)
WORK = Bar("work thrown away by a failure: steps of 50 ms, a checkpoint every 100 ÷ torchrun", "ratio", 0.05)
NAMED = Bar("hang in a collective → its culprit is named, after the time-out", "s", 0.5)
RUNNING = Bar("the same → all 4 ranks past an all_reduce", "s", 1.5)
TRAINER = Bar("SIGKILL of a trainer → fit goes on", "s", 0.5)
REPORT = Bar("processor time of a report of progress", "us", 10.0)
HEAD = Bar("power of the head lost, store etcd, 3 hosts → all 4 ranks past an all_reduce", "s", 15.0)
RESILIENT = Bar("restart of a rank of 4 of a resilient script after SIGKILL ÷ torchrun", "ratio", 0.05)


def figures(runs: int) -> list[Figure]:
    """All figures of this suite, each from `runs` runs."""
    return [
        *of_workers(runs),
        scripts(runs),
        work(runs),
        *hangs(runs),
        measured(TRAINER, runs, trainer_time),
        measured(REPORT, runs, report_time),
        head(runs),
    ]


# Workers that die.


def of_workers(runs: int) -> list[Figure]:
    """The figures of the workers that are killed, `KILLS` of them or a few more in `runs` jobs."""
    say(MEDIAN.name)
    plain: list[float] = []
    late: list[float] = []
    busy = load_of_others()
    fault = ""
    try:
        for _ in range(runs):
            for seconds, lost in kills(-(-KILLS // runs)):
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


def work(runs: int) -> Figure:
    """The work that is thrown away when a rank is killed in the middle between two checkpoints."""
    ours, theirs = partial(thrown_away, OURS, "steps"), partial(thrown_away, THEIRS, "checkpoints")
    return compared(WORK, "s", runs, ours, "torchrun", theirs)


def thrown_away(launcher: Launcher, how: str) -> float:
    """Seconds before the SIGKILL whose steps are run again."""
    with running(launcher, 4, partial(script, how)) as job:
        done = 3 * surviving.CHECKPOINT_STEPS // 2
        job.wait(lambda: (0, done) in steps(job) or None, f"{done} steps")
        killed = time.time()
        os.kill(job.points()[1].pid, signal.SIGKILL)
        resumed = job.wait(lambda: next((step for step in steps(job) if step[0] > 0), None), "a step again")
        return max(0.0, killed - steps(job)[0, resumed[1]])


def steps(job: Job) -> dict[tuple[float, float], float]:
    """The times at which rank 0 has begun its steps, by generation and number, in their order."""
    rows = [map(float, line.split()) for line in lines(job.home / "steps")]
    return {(generation, done): when for generation, done, when in rows}


def lines(path: Path) -> list[str]:
    """The complete lines of a file, which may not be there yet."""
    try:
        return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    except FileNotFoundError:
        return []


# Ranks that hang.


def hangs(runs: int) -> list[Figure]:
    """The figures of a rank that does not come to a collective."""
    found: list[tuple[float, float]] = []

    def named() -> float:
        found.append(hang_times())
        return found[-1][0]

    first = measured(NAMED, runs, named)
    own = tuple(seconds for _, seconds in found)
    value = median(own) if own else None
    return [first, Figure(RUNNING, value, runs, "s", own, fault=first.fault, busy=first.busy)]


def hang_times() -> tuple[float, float]:
    """Seconds after the time-out of a hang until the record of its failure names the culprit, and until all ranks are
    past an all_reduce of the next generation."""
    options = (f"--hang-timeout={HANG_TIMEOUT:g}", "--first-step-timeout=0")
    with running(OURS, 4, lambda home: (*options, *script("hang", home))) as job:
        again = job.points(1)
        (began,) = lines(job.home / "points.hangs")
        over = float(began) + HANG_TIMEOUT
        failures = [
            event for event in map(json.loads, events(job).splitlines()) if event["kind"] == "failure"
        ]
        culprits = [
            event["time"]
            for event in failures
            if event["text"].startswith("default:1 ") and "hangs" in event["text"]
        ]
        if not culprits:
            raise BenchmarkError(f"the culprit was not named: {[event['text'] for event in failures]}")
        return culprits[0] - over, last(again) - over


# The trainer, and reports.


def trainer_time() -> float:
    """Seconds from SIGKILL of a trainer until its `fit` is called again."""

    def fit(job: Job, incarnation: int) -> Point:
        def begun() -> Point | None:
            points = parse_points("".join(lines(job.home / "fits")))
            return next((point for point in points if point.restarts == incarnation), None)

        return job.wait(begun, "fit")

    with workloads(max_restarts=3) as job:
        job.points()
        first = fit(job, 0)
        time.sleep(SETTLE)
        killed = time.time()
        os.kill(first.pid, signal.SIGKILL)
        return fit(job, 1).time - killed


def report_time() -> float:
    """The µs of processor time of a report of progress, in a rank of a job."""
    with running(OURS, 1, lambda home: (surviving.__file__, str(home / "points"), "reports")) as job:
        job.succeed()
        return float(lines(job.home / "points")[0])


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
