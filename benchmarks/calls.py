"""The job that measures calls: eight workers, and a trainer that calls them through its role group and, in the same
process and in turn, with plain torch.distributed.rpc. The trainer writes what it measured as JSON."""

from __future__ import annotations

import json
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
    """What is called, over every transport."""


class Worker(BaseWorkload):
    """Does nothing."""

    @trainer_invocation()
    def blocking(self, value: Any = None) -> None:
        """Waited for."""

    @trainer_invocation(blocking=False)
    def flying(self, value: Any = None) -> None:
        """Not waited for."""

    @trainer_invocation(blocking=False)
    def join(self, file: str, world: int) -> None:
        """Make this worker a member of a plain RPC group."""
        join(f"worker{self.rank}", self.rank + 1, file, world)


def join(name: str, rank: int, file: str, world: int) -> None:
    """``init_rpc``, as its documentation shows it."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file}", rpc_timeout=60)
    rpc.init_rpc(name, rank=rank, world_size=world, rpc_backend_options=options)


class Measure(BaseTrainer):
    """Measures each figure `rounds` times, ours and raw in turn."""

    def init(self) -> None:
        """Name the peers of the raw calls."""
        workers = self.RG_WORKER
        workers.blocking()
        if self.config.raw == "init_rpc":
            # The job's own calls go over sockets, so plain torch RPC can be set up beside them.
            ref = workers.join(self.config.file, len(workers) + 1)
            join("trainer", 0, self.config.file, len(workers) + 1)
            ref.result()
            self.names = [f"worker{rank}" for rank in range(len(workers))]
        else:
            self.names = [unirun.rpc_name("worker", rank) for rank in range(len(workers))]

    def fit(self) -> None:
        """Measure and write."""
        one, every, names = self.RG_WORKER[0], self.RG_WORKER, self.names
        large = torch.ones(LARGE // 4)
        pairs: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
            "blocking": (
                lambda: p50(one.blocking, 1000),
                lambda: p50(lambda: rpc.rpc_sync(names[0], nothing), 1000),
            ),
            "group": (
                lambda: p50(every.blocking, 200),
                lambda: p50(lambda: [f.wait() for f in [rpc.rpc_async(n, nothing) for n in names]], 200),
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
            ours(), raw()
            rounds = [(ours(), raw()) for _ in range(self.config.rounds)]
            found[name] = {"own": [own for own, _ in rounds], "raw": [their for _, their in rounds]}
        Path(self.config.result).write_text(json.dumps(found))


def p50(call: Callable[[], Any], times: int) -> float:
    """The median time of a call in µs."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return median(found) * 1e6


def rate(start: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """Calls per second when `IN_FLIGHT` are started before the first is waited for."""
    began = time.perf_counter()
    for pending in [start() for _ in range(IN_FLIGHT)]:
        wait(pending)
    return IN_FLIGHT / (time.perf_counter() - began)
