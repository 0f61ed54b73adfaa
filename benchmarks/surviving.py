"""The ranks of the jobs that lose some of them, for `benchmarks.suites.failover`.

    surviving.py POINTS resilient     a resilient function: an all_reduce every 10 ms, in each generation
    surviving.py POINTS steps         the same with steps of 50 ms, each of which it saves
    surviving.py POINTS checkpoints   a plain script with such steps, and a checkpoint after each hundredth
    surviving.py POINTS hang          a plain script; at its fiftieth step, rank 1 does not come to the all_reduce
    surviving.py POINTS reports       the µs of processor time that a report of progress takes, as the only line

`Member` and `Driver` are the first for workloads. As in `benchmarks.ranks`, each rank appends a line to the file POINTS
when it is past the first all_reduce of a generation. With steps, rank 0 appends a line for each to the file ``steps``
beside it: the generation, the number of steps that are done, and the time.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

import unirun
from benchmarks.ranks import meet
from unirun import BaseTrainer, BaseWorkload, WorkerLost

STEP_SECONDS = 0.01
STEPS = 20
"""The all_reduces of one call."""


LONG_STEP_SECONDS, CHECKPOINT_STEPS = 0.05, 100

HANGS_AT = 50
"""The step at which a rank hangs: it has run for half a second."""

REPORTS = 100_000


def note(points: str, generation: int) -> None:
    """Append a point."""
    write(points, os.environ["RANK"], generation, os.getpid())


def write(path: str, *values: object) -> None:
    """Append one line with the time, with one write, so that lines of several processes stay whole."""
    line = " ".join([*map(str, values), f"{time.time():.6f}"]) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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
    """Calls the members step by step, through their restarts. Writes a point to a file of its own when `fit` begins."""

    def is_recoverable(self) -> bool:
        """Return True: there is no state to lose."""
        return True

    def init(self) -> None:
        """Set up nothing."""

    def fit(self) -> None:
        """Call for ever."""
        note(self.config.fits, int(os.environ["UNIRUN_INCARNATION"]))
        while True:
            with suppress(WorkerLost):
                self.RG_MEMBER.step()


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


def resilient(state: unirun.ResilientState, points: str) -> None:
    """Form the group of this generation and train."""
    dist.init_process_group("gloo")
    meet()
    note(points, state.generation)
    while True:
        time.sleep(STEP_SECONDS)
        meet()


def steps(state: unirun.ResilientState, points: str) -> None:
    """Train from the step that was saved last."""
    dist.init_process_group("gloo")
    meet()
    note(points, state.generation)
    done = state.load().get("done", 0)
    while True:
        step(points, state.generation, done)
        done += 1
        state.save(done=done)


def checkpoints(points: str) -> None:
    """Train from the step of the last checkpoint."""
    dist.init_process_group("gloo")
    meet()
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    note(points, generation)
    checkpoint = Path(points).with_name("checkpoint.pt")
    done = torch.load(checkpoint)["done"] if checkpoint.exists() else 0
    while True:
        step(points, generation, done)
        done += 1
        if done % CHECKPOINT_STEPS == 0 and dist.get_rank() == 0:
            torch.save({"done": done}, checkpoint)


def step(points: str, generation: int, done: int) -> None:
    """Run the step that follows `done` ones."""
    if dist.get_rank() == 0:
        write(str(Path(points).with_name("steps")), generation, done)
    time.sleep(LONG_STEP_SECONDS)
    meet()


def hang(points: str) -> None:
    """Train until rank 1 hangs; after the restart, for ever."""
    dist.init_process_group("gloo")
    meet()
    generation, done = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), 0
    note(points, generation)
    while True:
        unirun.progress(done)
        if (generation, dist.get_rank(), done) == (0, 1, HANGS_AT):
            write(f"{points}.hangs")
            time.sleep(600)
        time.sleep(STEP_SECONDS)
        meet()
        done += 1


def reports(points: str) -> None:
    """Measure `unirun.progress`."""
    began = time.thread_time()
    for number in range(REPORTS):
        unirun.progress(number)
    Path(points).write_text(f"{(time.thread_time() - began) / REPORTS * 1e6}\n")


PLAIN = {"checkpoints": checkpoints, "hang": hang, "reports": reports}
RESILIENT = {"resilient": resilient, "steps": steps}

if __name__ == "__main__":
    if sys.argv[2] in PLAIN:
        PLAIN[sys.argv[2]](sys.argv[1])
    else:
        unirun.resilient(RESILIENT[sys.argv[2]])(sys.argv[1])
