"""The job that measures the processor time of a call: that of its caller and of its worker. And a page of the dashboard
that is open, without a browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.figure import BenchmarkError
from benchmarks.job import DEADLINE, environment, program
from unirun import BaseTrainer, BaseWorkload, trainer_invocation
from unirun.observe.spans import WRITE_INTERVAL, spans

CALLS, FIRST_CALLS = 5000, 500
"""Calls that are measured, and those before them."""

TURNS, TURN_CALLS = 2, 2000
"""The turns with spans, which are as many as those without, and the calls of each: so many that what two idle processes
use between turns is below a fiftieth of theirs."""

CALLS_WITH_SPANS = TURNS * TURN_CALLS
"""The calls of all turns with spans."""


class Worker(BaseWorkload):
    """The workload that is called."""

    @trainer_invocation()
    def step(self) -> None:
        """Report, as a training step does."""
        self.master_handle.report({"loss": 0.5})

    @trainer_invocation()
    def used(self) -> float:
        """The processor time of this process, in seconds."""
        return time.process_time()

    @trainer_invocation()
    def trace(self, on: bool) -> None:
        """Write spans from now on, or not."""
        spans().on = on


class Measure(BaseTrainer):
    """Writes the processor time of a call, in microseconds."""

    def init(self) -> None:
        """Make the first calls."""
        for _ in range(FIRST_CALLS):
            self.RG_WORKER[0].step()

    def fit(self) -> None:
        """Measure and write."""
        one = self.RG_WORKER[0]
        before = time.process_time() + one.used()
        for _ in range(CALLS):
            one.step()
        spent = time.process_time() + one.used() - before
        Path(self.config.result).write_text(json.dumps(spent / CALLS * 1e6))


class Compare(Measure):
    """Writes the processor times of a call with spans and without, in one job: two jobs differ by more than that."""

    def fit(self) -> None:
        """Measure in turns and write."""
        one = self.RG_WORKER[0]
        spent = {True: 0.0, False: 0.0}
        for turn in range(2 * TURNS):
            on = turn % 2 == 0
            one.trace(on)
            spans().on = on
            before = time.process_time() + one.used()
            for _ in range(TURN_CALLS):
                one.step()
            # What is kept belongs to these calls: it is written meanwhile.
            time.sleep(2 * WRITE_INTERVAL)
            spent[on] += time.process_time() + one.used() - before
        times = [spent[on] / CALLS_WITH_SPANS * 1e6 for on in (True, False)]
        Path(self.config.result).write_text(json.dumps(times))


class Page:
    """``unirun dashboard`` of the jobs in `home`, and a page of its only job that is open."""

    def __init__(self, home: Path) -> None:
        command = [program("unirun"), "dashboard"]
        self._process = subprocess.Popen(command, env=environment(home), stdout=subprocess.PIPE, text=True)
        self.server = psutil.Process(self._process.pid)
        assert self._process.stdout is not None
        link = self._process.stdout.readline().split()[-1].removeprefix("http://")
        host, _, path = link.partition("/")
        entry = http.client.HTTPConnection(host, timeout=DEADLINE)
        entry.request("GET", f"/{path}")
        cookie = (entry.getresponse().getheader("set-cookie") or "").partition(";")[0]
        self._connection = http.client.HTTPConnection(host, timeout=DEADLINE)
        (job,) = (home / "jobs").iterdir()
        self._connection.request("GET", f"/api/jobs/{job.name}/live", headers={"cookie": cookie})
        self._news = self._connection.getresponse()
        self.next()

    def next(self) -> dict[str, Any]:
        """The next thing that happens. Raises `BenchmarkError` at the end of the stream."""
        while line := self._news.readline():
            if line.startswith(b"data: "):
                found: dict[str, Any] = json.loads(line[6:])
                return found
        raise BenchmarkError("the dashboard has ended its stream")

    def stop(self) -> None:
        """End the server, and with it the news."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the server, and close the page."""
        self.stop()
        self._connection.close()


@contextlib.contextmanager
def opened(home: Path) -> Iterator[Page]:
    """A page that is open in this context."""
    page = Page(home)
    try:
        yield page
    finally:
        page.close()
