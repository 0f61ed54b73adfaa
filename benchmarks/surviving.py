"""The ranks of the jobs that lose some of them, for `benchmarks.suites.failover`.

    surviving.py POINTS resilient           a resilient script: an all_reduce every 10 ms, in each generation

`Member` and `Driver` are the same for workloads. As in `benchmarks.ranks`, each rank appends a line to the file POINTS
when it is past the first all_reduce of a generation.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

import unirun
from benchmarks.ranks import meet
from unirun import BaseTrainer, BaseWorkload, WorkerLost

STEP_SECONDS = 0.01
STEPS = 20
"""The all_reduces of one call."""


def note(points: str, generation: int) -> None:
    """Append one line with one write, so that lines of several processes stay whole."""
    line = f"{os.environ['RANK']} {generation} {os.getpid()} {time.time():.6f}\n"
    file = os.open(points, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, line.encode())
    os.close(file)


class Member(BaseWorkload):
    """A workload that is in an all_reduce most of the time."""

    def setup(self) -> None:
        """Form the group."""
        dist.init_process_group("gloo")

    def on_generation(self, generation: int) -> None:
        """Write a point."""
        meet()
        note(self.config.points, generation)

    def step(self) -> None:
        """Run as many all_reduces as a training loop does in 0.2 s."""
        for _ in range(STEPS):
            time.sleep(STEP_SECONDS)
            meet()


class Driver(BaseTrainer):
    """Lets the members step, whoever dies. It writes a point to a file of its own when its first call has come back."""

    def is_recoverable(self) -> bool:
        """Return True: there is no state to lose."""
        return True

    def init(self) -> None:
        """Set up nothing."""

    def fit(self) -> None:
        """Call for ever."""
        incarnation, told = int(os.environ["UNIRUN_INCARNATION"]), False
        while True:
            try:
                self.RG_MEMBER.step()
            except WorkerLost:
                continue
            if not told:
                note(self.config.fits, incarnation)
                told = True


def job(home: Path, max_restarts: int) -> dict[str, object]:
    """The job file of four members and a driver."""
    return {
        "roles": {
            "member": {"count": 4, "workload": "benchmarks.surviving:Member", "max_restarts": max_restarts}
        },
        "trainer": "benchmarks.surviving:Driver",
        "config": {"points": str(home / "points"), "fits": str(home / "fits")},
        "cwd": str(Path(__file__).parents[1]),
    }


@unirun.resilient
def train(state: unirun.ResilientState, points: str) -> None:
    """Form the group of this generation and train."""
    dist.init_process_group("gloo")
    meet()
    note(points, state.generation)
    while True:
        time.sleep(STEP_SECONDS)
        meet()


if __name__ == "__main__":
    train(sys.argv[1])
