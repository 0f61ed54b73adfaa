"""The work whose files the suite `house` counts, as jobs. Each is done once before it is counted, so that connections
are open, modules are imported and workers are warm.

    python -m benchmarks.journeys train RESULT      the driver of a training run
    unirun … -m benchmarks.journeys weights RESULT  a worker of the role actor or rollout

A third, with `Caller` and `Called`, is a job file. Each writes to RESULT, as JSON, the files of unirun that each kind
of its processes has entered. Only public names of unirun are used: modules may move.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unirun
from benchmarks.entered import Entered
from unirun import BaseTrainer, BaseWorkload, train, trainer_invocation

RANKS = 2

VERSIONS = 5
"""Versions of weights; the last one counts. They follow each other quickly, as a channel reports once a second."""


class Called(BaseWorkload):
    """The workload that is called."""

    @trainer_invocation()
    def update(self, value: int) -> int:
        """Take an argument. Returns the pid of this process."""
        return os.getpid()


class Caller(BaseTrainer):
    """The trainer that makes the calls."""

    def init(self) -> None:
        """Open the connections."""
        self.RG_CALLED.update(1)

    def fit(self) -> None:
        """Call once more."""
        entered = Entered.inherited()
        with entered.marked():
            pids = self.RG_CALLED.update(1)
        write(self.config.result, entered, {"caller": {os.getpid()}, "called": {*pids}})


class Ending(train.TrainingCallback):
    """Ends the record at the first report."""

    def __init__(self, entered: Entered) -> None:
        self._entered = entered

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        """All ranks have reported."""
        self._entered.end()


def run_trainer(result: str) -> None:
    """Run a function that reports once, on running workers."""

    def function() -> int:
        train.report(loss=1.0)
        return os.getpid()

    entered = Entered.inherited()
    with train.Trainer(RANKS) as trainer:
        trainer.run(function, callbacks=[train.TrainingCallback()])
        entered.begin()
        pids = trainer.run(function, callbacks=[Ending(entered)])
    write(result, entered, {"driver": {os.getpid()}, "worker": pids})


def move_weights(result: str) -> None:
    """Publish and receive, from the call of `publish` until the receiver has its tensors."""
    context = unirun.init()
    together = context.group("actor", "rollout", backend="gloo")
    pids: list[int] = [0] * together.size()
    dist.all_gather_object(pids, os.getpid(), group=together)
    tensors = {"layer": torch.ones(1 << 20)}
    channel = unirun.WeightsChannel("policy", publisher="actor", receivers=["rollout"])
    entered = Entered.inherited()
    for version in range(1, VERSIONS + 1):
        last = version == VERSIONS
        # Not while files are recorded, as unirun has wrapped it.
        dist.barrier(group=together)
        if last:
            if context.role == "actor":
                entered.begin()
            else:
                entered.await_begin()
        if context.role == "actor":
            channel.publish(tensors, version)
            if last:
                entered.await_end()
        else:
            channel.receive(tensors, min_version=version)
            if last:
                entered.end()
    dist.barrier(group=together)
    if context.role == "actor":
        write(result, entered, {"publisher": {os.getpid()}, "receiver": {*pids} - {os.getpid()}})


def write(result: str, entered: Entered, sides: Mapping[str, Collection[int]]) -> None:
    """Write the files of each side; a side is a set of processes."""
    Path(result).write_text(json.dumps({side: entered.files(pids) for side, pids in sides.items()}))


if __name__ == "__main__":
    {"train": run_trainer, "weights": move_weights}[sys.argv[1]](sys.argv[2])
