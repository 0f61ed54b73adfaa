"""Servers beside ranks, and requests to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.bringing import pair
from benchmarks.figure import Bar, BenchmarkError, Figure, compared, measured
from benchmarks.job import environment, timed
from benchmarks.serving import served
from tests.engines.environment import complete

ROOT = Path(__file__).parents[2]
STUB = ROOT / "tests" / "testbed" / "engine.py"
ASKING = ROOT / "benchmarks" / "asking.py"

ASKED = Bar("a request to two engines, processor time ÷ plain httpx", "ratio", 1.15)

BROUGHT = Bar(
    "100 MB into two vLLM, publish → resumed ÷ its own load of the file from /dev/shm", "ratio", 1.3
)

SERVERS = 2

SERVED = 4
"""Programs of the measured job, besides the one that starts after them."""


DEPENDENTS = Bar("server ready → dependents started", "s", 0.1)
CAUSE = Bar("server killed → cause on the console", "s", 0.2)
RESTART = Bar("server killed → its successor listens", "s", 0.3)
END = Bar("primary ends → everything gone", "s", 0.5)
START = Bar("job of 4 programs: command → all running", "s", 0.4)


def figures(runs: int) -> list[Figure]:
    """All figures of this suite."""
    return [*lives(runs), asked(runs), brought(runs)]


def lives(runs: int) -> list[Figure]:
    """Figures of a job of programs from start to end, with a server that is killed. One job is a run of each."""
    found: dict[Bar, list[float]] = {each: [] for each in (DEPENDENTS, CAUSE, RESTART, END, START)}
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder, served(Path(folder), SERVED) as job:
            ready = max(job.up(f"engine{number}")[0] for number in range(SERVED))
            began = float(job.await_file("began"))
            found[DEPENDENTS].append(began - ready)
            found[START].append(ready - job.began)
            killed = time.time()
            os.kill(job.up("engine0")[1], signal.SIGKILL)
            found[RESTART].append(job.up("engine0", 1)[0] - killed)
            found[CAUSE].append(job.said("was killed by SIGKILL") - killed)
            found[END].append(job.end())
    return [measured(each, runs, iter(values).__next__) for each, values in found.items()]


def asked(runs: int) -> Figure:
    """Requests for tokens by `unirun.EngineClient`, beside httpx alone."""
    with tempfile.TemporaryDirectory() as folder, stubs(SERVERS) as urls:
        env = environment(Path(folder))

        def once(side: str) -> float:
            _, out = timed([sys.executable, str(ASKING), side, *urls], env)
            return float(out)

        return compared(ASKED, "us", runs, lambda: once("unirun"), "httpx", lambda: once("httpx"))


def brought(runs: int) -> Figure:
    """Load a version into two real vLLM servers on this host, compared with their own loads of the same file."""
    if not complete():
        return Figure(BROUGHT, None, runs, "s", peer="vLLM", missing="vLLM is not installed: make engines")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, pair(Path(folder)) as engines:
        return compared(BROUGHT, "s", runs, engines.bring, "vLLM", engines.load)


@contextmanager
def stubs(count: int) -> Iterator[list[str]]:
    """The URLs of this number of servers with vLLM's routes, which answer at once."""
    processes: list[subprocess.Popen[str]] = []
    try:
        urls = []
        for _ in range(count):
            process = subprocess.Popen(
                [sys.executable, str(STUB), "--enable-scale-out"], stdout=subprocess.PIPE, text=True
            )
            processes.append(process)
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line:
                raise BenchmarkError("a stub of an engine does not start")
            urls.append(line.split()[-1])
        yield urls
    finally:
        for process in processes:
            process.kill()
            process.communicate()
