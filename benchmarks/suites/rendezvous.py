"""A rendezvous of two nodes of torchrun: through an etcd with the backend etcd-v3, compared with torch's own c10d.

From the word to two processes that have imported torch's rendezvous until both have their rank and have used both
stores: the agents', and the one that workers find at MASTER_ADDR. What a backend itself imports and connects is in it.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.etcd import etcd, free_port
from benchmarks.figure import Bar, BenchmarkError, Figure, ProgramMissing, compared
from benchmarks.job import DEADLINE, environment

MEETING = Bar("two-node rendezvous, etcd-v3 ÷ c10d", "ratio", 1.0)


def figures(runs: int) -> list[Figure]:
    """All figures of this suite, each from `runs` runs."""
    try:
        with etcd() as endpoint:
            own = partial(meeting_time, "etcd-v3", endpoint)
            return [compared(MEETING, "s", runs, own, "c10d", c10d_time)]
    except ProgramMissing as error:
        return [Figure(MEETING, None, runs, "s", peer="c10d", missing=str(error))]
    except BenchmarkError as error:
        return [Figure(MEETING, None, runs, "s", peer="c10d", fault=str(error))]


def c10d_time() -> float:
    """One rendezvous at an unused port."""
    return meeting_time("c10d", f"127.0.0.1:{free_port()}")


def meeting_time(backend: str, endpoint: str) -> float:
    """Seconds until the later of two nodes has its rank and both stores."""
    run = f"bench-{time.monotonic_ns()}"
    with contextlib.ExitStack() as nodes:
        pair = [nodes.enter_context(node(backend, endpoint, run)) for _ in range(2)]
        for process in pair:
            answer(process)  # "ready"
        began = time.monotonic()
        for process in pair:
            tell(process)
        ended = max(float(answer(process)) for process in pair)
        for process in pair:
            tell(process)
        for process in pair:
            process.wait(DEADLINE)
    return ended - began


@contextlib.contextmanager
def node(backend: str, endpoint: str, run: str) -> Iterator[subprocess.Popen[str]]:
    """A process of `benchmarks.meeting`, which is gone at the end."""
    home = Path(tempfile.mkdtemp(prefix="unirun-bench-"))
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.meeting", backend, endpoint, run],
        env=environment(home),
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    # Ends every wait for an answer, however the node hangs.
    watchdog = threading.Timer(DEADLINE, process.kill)
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()
        shutil.rmtree(home, ignore_errors=True)


def tell(process: subprocess.Popen[str]) -> None:
    """Start the next step of a node."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    """The next line of a node. Raises `BenchmarkError` when it has ended instead."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise BenchmarkError(f"a node ended with {process.wait()} before it had its rank and store")
    return line
