"""Weights from one process to another on one GPU, beside a copy within its memory."""

from __future__ import annotations

from statistics import median

import torch

from benchmarks.figure import Bar, BenchmarkError, Figure, load_of_others, ratio, say
from benchmarks.suites.weights import one_job

ON_DEVICE = Bar("4 GiB on a GPU, published → received ÷ copy within its memory", "ratio", 1.3)


def figures(runs: int) -> list[Figure]:
    """All figures of this suite."""
    own: list[float] = []
    theirs: list[float] = []
    busy, fault = load_of_others(), ""
    if not torch.cuda.is_available():
        return [Figure(ON_DEVICE, None, runs, "s", missing="there is no GPU")]
    for number in range(runs):
        say(f"weights on a GPU, run {number + 1} of {runs}")
        try:
            found = one_job("device", "actor=1,rollout=1")
            own.append(median(found["copied"]))
            theirs.append(median(found["memcpy"]))
        except BenchmarkError as error:
            fault = str(error)
    figure = Figure(
        ON_DEVICE, ratio(own, theirs), runs, "s", tuple(own), "memcpy", tuple(theirs), fault, busy
    )
    return [figure]
