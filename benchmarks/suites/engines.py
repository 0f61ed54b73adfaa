"""Programs beside ranks that serve, and requests to them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.figure import Bar, BenchmarkError, Figure, compared
from benchmarks.job import environment, timed

ROOT = Path(__file__).parents[2]
STUB = ROOT / "tests" / "testbed" / "engine.py"
ASKING = ROOT / "benchmarks" / "asking.py"

ASKED = Bar("a request to two engines, processor time ÷ plain httpx", "ratio", 1.15)

SERVERS = 2


def figures(runs: int) -> list[Figure]:
    """All figures of this suite."""
    return [asked(runs)]


def asked(runs: int) -> Figure:
    """Requests for tokens by `unirun.EngineClient`, beside httpx alone."""
    with tempfile.TemporaryDirectory() as folder, stubs(SERVERS) as urls:
        env = environment(Path(folder))

        def once(side: str) -> float:
            _, out = timed([sys.executable, str(ASKING), side, *urls], env)
            return float(out)

        return compared(ASKED, "us", runs, lambda: once("unirun"), "httpx", lambda: once("httpx"))


@contextmanager
def stubs(count: int) -> Iterator[list[str]]:
    """The URLs of so many servers with vLLM's routes, which answer at once."""
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
