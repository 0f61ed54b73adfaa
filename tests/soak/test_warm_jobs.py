"""A thousand jobs, one after the other, from one warm process: it grows in nothing, and nothing is left of them.

It takes ten minutes; UNIRUN_SOAK_JOBS=100 runs so many.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.warm import WarmUnirun, warm_in
from tests.waiting import eventually

JOBS = int(os.environ.get("UNIRUN_SOAK_JOBS", "1000"))

FIRST = 10
"""Number of jobs after which the process has reached its steady state."""

GROWTH = 1024
"""Allowed growth in KiB at the end."""

ENV = {"OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.timeout(120 + 5 * JOBS)


@dataclass(frozen=True)
class Held:
    """The resources that a process holds: KiB of memory that is no file's (its share, and its own), descriptors, children, files of its folder."""

    share: int
    own: int
    descriptors: int
    children: int
    files: int


def held(pid: int, run: Path) -> Held:
    """Usage of the warm process while no job runs."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    eventually(lambda: not children.read_text(), "the guards have ended")
    rows = dict(line.split()[:2] for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return Held(
        share=int(rows["Pss_Anon:"]),
        own=int(rows["Private_Dirty:"]),
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        children=len(children.read_text().split()),
        files=sum(1 for _ in run.rglob("*")),
    )


def test_a_warm_process_does_not_grow(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch; print(torch.ones(3).sum().item())")
    with warm_in(tmp_path / "warm", env=ENV) as warm:
        unirun = WarmUnirun(tmp_path, warm)
        (pid,) = warm.pids
        before, began = None, time.monotonic()
        for number in range(FIRST + JOBS):
            if number == FIRST:
                before, began = held(pid, warm.run), time.monotonic()
            result = unirun("-v", "--nproc-per-node", 1 + number % 2, script, env=ENV)
            assert (result.code, result.lines) == (0, ["3.0"] * (1 + number % 2)), result.err
            assert f"start: warm, from process {pid}" in result.err
            assert "declines" not in result.err
            unirun.started.clear()
            shutil.rmtree(unirun.home / "jobs")
        seconds = (time.monotonic() - began) / JOBS
        unirun.assert_nothing_left()
        after = held(pid, warm.run)
        print(f"\n{JOBS} jobs, {seconds:.2f} s each: {before}, then {after}")
        assert before is not None
        assert after.share - before.share < GROWTH
        assert after.own - before.own < GROWTH
        assert (after.descriptors, after.children, after.files) == (before.descriptors, 0, before.files)
