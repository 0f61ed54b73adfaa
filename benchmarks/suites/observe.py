"""Looking into a running job: stacks, the first frame of ``unirun top``, the status; and what a page of the dashboard
and a trace cost a job."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pty
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.figure import (
    Bar,
    BenchmarkError,
    Figure,
    compared,
    load_of_others,
    measured,
    ratio,
    say,
)
from benchmarks.job import DEADLINE, UNIRUN, environment, program, started, sweep, timed
from benchmarks.suites.launch import SETTLE, refuse_torch
from benchmarks.watched import CALLS_WITH_SPANS, opened
from unirun.observe.spans import SPANS, TRACE, Spans

STACKS = Bar("unirun stacks of 64 ranks", "s", 1.0)
TOP = Bar("unirun top: first frame", "s", 0.3)
STATUS = Bar("unirun status, of a job with 4 ranks", "s", 0.2)
SPAN = Bar("a span that is off", "µs", 2.0)

TRACED = Bar("processor time per call that reports a metric: trace on ÷ off", "ratio", 1.1)
WATCHED = Bar("processor time per call: dashboard open ÷ not", "ratio", 1.05)
SEEN = Bar("a rank is killed until the page is told", "s", 0.5)
PAGE_MEMORY = Bar("memory of the dashboard, 100 ranks, a page open", "MB", 120.0)
PAGE_CPU = Bar("processor time of the dashboard, 100 ranks, an idle page open", "%", 2.0)

RANKS, PAGE_RANKS = 64, 100
SPANS_THAT_ARE_OFF = 100_000

IDLE_SECONDS = 10.0
"""Seconds in which an idle page is measured."""


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
    rest = [
        measured(SPAN, runs, span_time),
        traced(runs),
        compared(WATCHED, "us", runs, lambda: call_time(watched=True), "no page", call_time),
        measured(SEEN, runs, seen_time),
    ]
    with started(UNIRUN, PAGE_RANKS, "sit") as job:
        job.points()
        time.sleep(SETTLE)
        with opened(job.home) as page:
            rest.append(measured(PAGE_CPU, runs, lambda: share_of(page.server)))
            rest.append(measured(PAGE_MEMORY, runs, lambda: page.server.memory_info().rss / 1e6))
    return [stacks, top, status, *rest]


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
    for _ in range(SPANS_THAT_ARE_OFF):
        spans.write("call", "actor.update", 0)
    return (time.perf_counter() - began) / SPANS_THAT_ARE_OFF * 1e6


def traced(runs: int) -> Figure:
    """The processor time of a call with a trace and without, which each job measures in turns."""
    say(TRACED.name)
    pairs: list[tuple[float, float]] = []
    busy: list[float] = []
    fault = ""
    try:
        while len(pairs) < runs:
            busy.append(load_of_others())
            on, off = run_calls("Compare", {TRACE: "1"})
            pairs.append((on, off))
    except BenchmarkError as error:
        fault = str(error)
    own, theirs = (tuple(pair[n] for pair in pairs) for n in (0, 1))
    value = ratio(own, theirs)
    return Figure(TRACED, value, runs, "us", own, "off", theirs, fault, median(busy))


def call_time(*, watched: bool = False) -> float:
    """Microseconds of processor time of a call whose worker reports, of its caller and its worker together; with a page
    open that shows the job, or without."""
    return float(run_calls("Measure", {}, watched=watched))


def run_calls(trainer: str, env: Mapping[str, str], *, watched: bool = False) -> Any:
    """The result of a job of calls, which its `trainer` writes."""
    with tempfile.TemporaryDirectory(prefix="unirun-bench-") as folder:
        home = Path(folder)
        job = {
            "roles": {"worker": {"count": 1, "workload": "benchmarks.watched:Worker"}},
            "trainer": f"benchmarks.watched:{trainer}",
            "config": {"result": str(home / "result.json")},
            "cwd": str(Path(__file__).parents[2]),
        }
        (home / "job.yaml").write_text(json.dumps(job))
        command = [program("unirun"), "--quiet", "--config", str(home / "job.yaml")]
        around = {**environment(home), "UNIRUN_WARM": "0", **env}
        process = subprocess.Popen(command, env=around, stderr=subprocess.PIPE, text=True)
        try:
            with opened_when_there(home) if watched else contextlib.nullcontext():
                _, said = process.communicate(timeout=DEADLINE)
            if process.returncode != 0:
                raise BenchmarkError(f"the job ended with {process.returncode}\n{said}")
            if TRACE in env:
                require_spans(home)
            return json.loads((home / "result.json").read_text())
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(f"the job did not end within {DEADLINE:g} s") from error
        finally:
            sweep(home, process.poll)


def require_spans(home: Path) -> None:
    """Raise `BenchmarkError` unless caller and worker have written a span of each call that was made with spans."""
    counts = [path.read_bytes().count(b"\n") for path in home.rglob(SPANS)]
    if len(counts) != 2 or min(counts) < CALLS_WITH_SPANS:
        raise BenchmarkError(f"caller and worker have to write {CALLS_WITH_SPANS} spans each, not {counts}")


@contextlib.contextmanager
def opened_when_there(home: Path) -> Iterator[None]:
    """A page that is open from the start of the job on, and reads all that it is told."""
    end = time.monotonic() + DEADLINE
    while not [*home.glob("jobs/*/state.json")]:
        if time.monotonic() > end:
            raise BenchmarkError("the job has not started")
        time.sleep(0.01)
    with opened(home) as page:

        def read() -> None:
            with contextlib.suppress(BenchmarkError, OSError, http.client.HTTPException):
                while True:
                    page.next()

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield
        finally:
            page.stop()
            reader.join()


def seen_time() -> float:
    """Seconds from SIGKILL of a rank until an open page is told of an event about it."""
    with started(UNIRUN, 4, "sit") as job:
        points = job.points()
        time.sleep(SETTLE)
        with opened(job.home) as page:
            began = time.monotonic()
            os.kill(points[1].pid, signal.SIGKILL)
            while not [each for each in page.next()["events"] if each["kind"] in ("exit", "failure")]:
                pass
            return time.monotonic() - began


def share_of(process: psutil.Process) -> float:
    """Percent of a core that a process uses."""
    process.cpu_percent()
    time.sleep(IDLE_SECONDS)
    return float(process.cpu_percent())
