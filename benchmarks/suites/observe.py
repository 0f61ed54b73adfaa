"""Looking into a running job: stacks, the first frame of ``unirun top``, the status, and spans that are off."""

from __future__ import annotations

import os
import pty
import select
import time
from pathlib import Path

from benchmarks.figure import Bar, BenchmarkError, Figure, measured
from benchmarks.job import DEADLINE, UNIRUN, environment, program, started, timed
from benchmarks.suites.launch import SETTLE, refuse_torch
from unirun.observe.spans import Spans

STACKS = Bar("unirun stacks of 64 ranks", "s", 1.0)
TOP = Bar("unirun top: first frame", "s", 0.3)
STATUS = Bar("unirun status, of a job with 4 ranks", "s", 0.2)
SPAN = Bar("a span that is off", "µs", 2.0)

RANKS = 64
SPANS = 100_000


def figures(runs: int) -> list[Figure]:
    """All figures of this suite."""
    with started(UNIRUN, RANKS, "sit") as job:
        job.points()
        time.sleep(SETTLE)
        stacks = measured(STACKS, runs, lambda: stacks_time(job.home))
    with started(UNIRUN, 4, "sit") as job:
        job.points()
        time.sleep(SETTLE)
        env = environment(job.home)
        refuse_torch(["top", "--once"], env)
        top = measured(TOP, runs, lambda: first_frame(job.home))
        status = measured(STATUS, runs, lambda: timed([program("unirun"), "status"], env)[0])
    return [stacks, top, status, measured(SPAN, runs, span_time)]


def stacks_time(home: Path) -> float:
    """Seconds from exec of ``unirun stacks`` to its exit, with the stacks of all ranks."""
    (job,) = (home / "jobs").iterdir()
    seconds, text = timed([program("unirun"), "stacks", job.name], environment(home))
    if f": {RANKS} ranks," not in text or " is " in text:
        raise BenchmarkError(f"unirun stacks has not shown all ranks\n{text[:500]}")
    return seconds


def first_frame(home: Path) -> float:
    """Seconds from exec of ``unirun top`` in a terminal to its first frame."""
    began = time.monotonic()
    pid, terminal = pty.fork()
    if pid == 0:
        env = {**environment(home), "TERM": "xterm"}
        os.execve(program("unirun"), [program("unirun"), "top"], env)
    shown = b""
    while b"RANK" not in shown:
        if not select.select([terminal], [], [], DEADLINE)[0]:
            raise BenchmarkError("unirun top has shown nothing")
        shown += os.read(terminal, 1 << 16)
    seconds = time.monotonic() - began
    os.write(terminal, b"q")
    while select.select([terminal], [], [], DEADLINE)[0]:
        try:
            os.read(terminal, 1 << 16)
        except OSError:
            # Its end of the terminal is closed.
            break
    os.waitpid(pid, 0)
    os.close(terminal)
    return seconds


def span_time() -> float:
    """Microseconds of a call of `Spans.write` in a job that is not traced."""
    spans = Spans({})
    began = time.perf_counter()
    for _ in range(SPANS):
        spans.write("call", "actor.update", 0)
    return (time.perf_counter() - began) / SPANS * 1e6
