"""A job whose disk is full for a while continues, and its decisions are carried out when there is space."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import WAIT_TIMEOUT, eventually

from .harness import EXEC, START_TIMEOUT, Script, Unirun, gone
from .masters import Masters
from .test_durability_faults import mounted


@pytest.fixture
def small(unirun: Unirun) -> Iterator[Path]:
    """The home of jobs, on a file system of 6 MB."""
    with mounted(unirun.home, "size=6m") as where:
        if where is None:
            pytest.skip("nothing can be mounted here")
        yield where


def fill(where: Path) -> Path:
    """Fill the file system."""
    ballast = where / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


def test_decisions_during_a_full_disk_are_carried_out_when_there_is_space(
    unirun: Unirun, small: Path, script: Script
) -> None:
    """
    1. Two workers run, and the disk of the job's directory is filled.
    2. A worker is killed: the command reports the full disk, and nothing restarts.
    3. The disk has space again: the role restarts, under the same master.
    4. SIGTERM ends the job.
    """
    train = script(
        "import os, signal; print('up', os.environ['UNIRUN_INCARNATION'], flush=True); signal.pause()"
    )
    logs = unirun.root / "logs"
    job = unirun.start("--roles", "a=2", "--max-restarts", 3, "--log-dir", logs, *EXEC, train)
    job.lines(r"up 0$", 2)
    eventually(lambda: all(worker["pid"] for worker in unirun.workers().values()), "both are known")
    victim = unirun.workers()["a:1"]["pid"]
    master = Masters(unirun).next()
    ballast = fill(small)
    os.kill(victim, signal.SIGKILL)
    job.lines(r"unirun: store: the disk of .* is full", within=START_TIMEOUT)
    ballast.unlink()
    job.lines(r"unirun: store: it is back", within=WAIT_TIMEOUT)
    job.lines(r"up 1$", 2, within=START_TIMEOUT)
    assert not gone(master.pid, 0.0), "it has led all the while"
    eventually(lambda: unirun.status()["roles"][0]["restarts"] == 1, "the restart is counted")
    job.signal(signal.SIGTERM)
    assert job.end(WAIT_TIMEOUT).code == 143


def test_a_job_can_be_stopped_though_the_disk_stays_full(unirun: Unirun, small: Path, script: Script) -> None:
    logs = unirun.root / "logs"
    train = script("import signal; print('up', flush=True); signal.pause()")
    job = unirun.start("--roles", "a=2", "--log-dir", logs, *EXEC, train)
    job.lines(r"up$", 2)
    fill(small)
    job.signal(signal.SIGTERM)
    end = job.end(WAIT_TIMEOUT)
    assert end.code == 143, end.err
    assert "Traceback" not in end.err


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_workers_that_print_on_a_full_disk_lose_their_output_and_go_on(
    unirun: Unirun, small: Path, script: Script, method: str
) -> None:
    train = script(
        """
        import os, sys, time, warnings
        def wait(name):
            while not os.path.exists(name):
                time.sleep(0.01)
        print("up", flush=True)
        wait("full")
        for _ in range(10):
            print("x" * 10_000, flush=True)
            warnings.warn("x" * 10_000)
        sys.stdout.buffer.write(b"x" * 10_000)
        open("printed", "w").close()
        wait("room")
        print("here again", flush=True)
        """
    )
    job = unirun.start("--start-method", method, train)
    job.lines(r"up$")
    ballast = fill(small)
    (unirun.root / "full").touch()
    eventually((unirun.root / "printed").exists, "all is printed", START_TIMEOUT)
    ballast.unlink()
    (unirun.root / "room").touch()
    end = job.end(START_TIMEOUT)
    assert (end.code, end.out.count("here again")) == (0, 1), end.err
    assert re.search(r"\[unirun: the disk was full, \d{5,} bytes are lost\]", end.out)
