"""The functions that the suite of training runs with `unirun.train.Trainer`, each in a process of its own.

    python -m benchmarks.training start          the first report of 4 ranks, and that of a second run
    python -m benchmarks.training recovery       the time from SIGKILL to the first report after it
    python -m benchmarks.training reports        what calls of `report` take
    python -m benchmarks.training listed LIST    the share of each rank of a long list of files

Each prints one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.steps import KILLED, KILLED_AFTER, RANKS, Steps
from unirun import train

METRICS = 10
REPORTS, WARM_UP = 3000, 300
"""Calls of `report` in each rank, and those that are not counted."""

FOLLOWING = 2000
"""The number of files that are read after the first one."""


def start() -> dict[str, float]:
    """Seconds until the driver has the first report of all ranks: of a new trainer, and of its second run."""

    def function() -> None:
        train.report(rank=train.world_rank())

    def first(trainer: train.Trainer) -> None:
        run = trainer.run_iterator(function)
        if [each["rank"] for each in next(run)] != [*range(RANKS)]:
            raise RuntimeError("the report of some rank is missing")

    began = time.perf_counter()
    with train.Trainer(RANKS) as trainer:
        first(trainer)
        started = time.perf_counter() - began
        trainer.run(function)
        began = time.perf_counter()
        first(trainer)
        return {"start": started, "second": time.perf_counter() - began}


def recovery() -> dict[str, float]:
    """Seconds from SIGKILL of a rank to the first report of all ranks that have gone on from the checkpoint."""

    def function() -> None:
        steps = Steps(train.load_checkpoint())
        for step in range(steps.resumed + 1, steps.last + 1):
            loss = steps.make()
            train.save_checkpoint(step=step, model=steps.model, optimizer=steps.optimizer)
            train.report(step=step, resumed=steps.resumed, pid=os.getpid(), loss=loss)

    killed = found = 0.0
    strategy = train.CheckpointStrategy(num_to_keep=2)
    with train.Trainer(RANKS) as trainer:
        for results in trainer.run_iterator(function, checkpoint_strategy=strategy):
            if not killed and results[KILLED]["step"] == KILLED_AFTER:
                os.kill(results[KILLED]["pid"], signal.SIGKILL)
                killed = time.perf_counter()
            if not found and results[0]["resumed"]:
                found = time.perf_counter() - killed
    return {"recovery": found}


def reports() -> dict[str, float]:
    """The time of a call of `report` in ms, without work between calls, and the rounds that the driver gets."""

    def function() -> list[float]:
        times = []
        for step in range(REPORTS):
            metrics = {f"metric {number}": number / (step + 1) for number in range(METRICS)}
            began = time.perf_counter()
            train.report(**metrics)
            times.append(time.perf_counter() - began)
        return times[WARM_UP:]

    with train.Trainer(RANKS) as trainer:
        run = trainer.run_iterator(function)
        arrivals = [time.perf_counter() for _ in run]
        times = [seconds * 1e3 for rank in run.get_final_results() for seconds in rank]
    took = arrivals[-1] - arrivals[WARM_UP]
    return {"p50": median(times), "p99": quantiles(times, n=100)[-1], "rate": (REPORTS - 1 - WARM_UP) / took}


def listed(path: str) -> dict[str, float]:
    """The time until each rank has its first file of a list that it reads itself, all at the same time: the
    seconds and the MB (2**20 bytes) of the rank that needs most. And the µs for each file after that."""

    def memory(what: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))

    def function() -> tuple[str, float, float, float]:
        # The peak is measured anew from here on.
        Path("/proc/self/clear_refs").write_text("5")
        before, began = memory("VmRSS"), time.perf_counter()
        items = iter(train.get_dataset_shard(otherwise=train.Files.listed_in(path), shuffle=True))
        first = next(items)
        seconds, began = time.perf_counter() - began, time.perf_counter()
        for _ in islice(items, FOLLOWING):
            continue
        each = (time.perf_counter() - began) / FOLLOWING
        return first, seconds, (memory("VmHWM") - before) / 1024, each * 1e6

    with train.Trainer(RANKS) as trainer:
        firsts, seconds, megabytes, following = zip(*trainer.run(function), strict=True)
    if len({*firsts}) != RANKS:
        raise RuntimeError(f"some ranks have got the same file: {firsts}")
    return {"seconds": max(seconds), "megabytes": max(megabytes), "following": median(following)}


WORK: dict[str, Callable[..., Any]] = {
    "start": start,
    "recovery": recovery,
    "reports": reports,
    "listed": listed,
}

if __name__ == "__main__":
    print(json.dumps(WORK[sys.argv[1]](*sys.argv[2:])), flush=True)
