"""The job that measures calls: one worker, or eight, and a trainer that calls them through its role group or with plain
torch.distributed.rpc. The trainer writes what it measured as JSON.

torch's RPC agents poll without a pause, in every process that has one. So what is measured over sockets has a job of
its own, in which there is none; what is measured over torch is measured in turn with the raw calls.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.distributed import rpc

import unirun
from unirun import BaseTrainer, BaseWorkload, trainer_invocation

LARGE = 64 << 20
"""Bytes of the large argument."""

IN_FLIGHT = 1000


def nothing(value: Any = None) -> None:
    """Do nothing. This is the called function, over every transport."""


class Worker(BaseWorkload):
    """The workload whose methods do nothing."""

    @trainer_invocation()
    def blocking(self, value: Any = None) -> None:
        """The method of calls that wait."""

    @trainer_invocation(blocking=False)
    def flying(self, value: Any = None) -> None:
        """The method of calls that do not wait."""

    @trainer_invocation()
    def pid(self) -> int:
        """The pid of this process."""
        return os.getpid()


class Measure(BaseTrainer):
    """Measures each figure `rounds` times."""

    def init(self) -> None:
        """Let every worker be called once."""
        self.RG_WORKER.blocking()

    def fit(self) -> None:
        """Measure and write."""
        one, every = self.RG_WORKER[0], self.RG_WORKER
        names = [unirun.rpc_name("worker", n) for n in range(len(every))] if self.config.raw else []
        large = torch.ones(LARGE // 4)
        pairs: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
            "group": (
                lambda: p50(every.blocking, 100),
                lambda: p50(lambda: [f.wait() for f in [rpc.rpc_async(n, nothing) for n in names]], 100),
            ),
        }
        if len(every) == 1:
            pairs = {
                "blocking": (
                    lambda: p50(one.blocking, 500),
                    lambda: p50(lambda: rpc.rpc_sync(names[0], nothing), 500),
                ),
                "in flight": (
                    lambda: rate(lambda: one.flying(), lambda ref: ref.result()),
                    lambda: rate(lambda: rpc.rpc_async(names[0], nothing), lambda future: future.wait()),
                ),
                "large": (
                    lambda: p50(lambda: one.blocking(large), 7),
                    lambda: p50(lambda: rpc.rpc_sync(names[0], nothing, args=(large,)), 7),
                ),
            }
        found: dict[str, dict[str, list[float]]] = {}
        for name, (ours, raw) in pairs.items():
            sides = {"own": ours, **({"raw": raw} if names else {})}
            for side in sides.values():
                side()
            rounds = [{side: measure() for side, measure in sides.items()} for _ in range(self.config.rounds)]
            found[name] = {side: [each[side] for each in rounds] for side in sides}
        Path(self.config.result).write_text(json.dumps(found))


class Rest(BaseTrainer):
    """Calls every worker once, writes their pids, and then does nothing until it is ended."""

    def init(self) -> None:
        """Set up nothing."""

    def fit(self) -> None:
        """Call, write, sleep."""
        part = Path(f"{self.config.result}.part")
        part.write_text(json.dumps(self.RG_WORKER.pid()))
        part.rename(self.config.result)
        time.sleep(600)


def p50(call: Callable[[], Any], times: int) -> float:
    """The median time of a call in µs."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return median(found) * 1e6


def rate(start: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """Calls per second with `IN_FLIGHT` calls at a time."""
    began = time.perf_counter()
    for pending in [start() for _ in range(IN_FLIGHT)]:
        wait(pending)
    return IN_FLIGHT / (time.perf_counter() - began)
