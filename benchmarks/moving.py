"""The script that measures a channel of weights: one publisher and three receivers on one host, beside gloo.

    moving.py RESULT KIND ROUNDS

KIND is ``large`` (1 GiB in 16 tensors), ``between`` (256 MiB in 16, for roles on different hosts), ``small`` (1 MB in
1 000 tensors), ``slow`` (32 MiB in 8, for a network that is slow; ``copied`` only) or ``device`` (4 GiB in 16, on a GPU
that all have in common; ``copied`` and ``memcpy`` only).

The publisher writes to RESULT, as JSON, the seconds of each round: ``copied`` (received into place), ``mapped``
(``assign=True``), ``linked`` (received into place, over gloo), ``broadcast`` (gloo, tensor by tensor), ``memcpy`` (one
copy of the same tensors by one thread) and ``copies`` (as many copies as there are processes, by a thread for each
processor: what no channel can do in less where each receiver has a copy of its own); and ``memory``, what it shares
with receivers in each channel, in multiples of its weights.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

import unirun

SIZES = {
    "large": (16, 64 << 20),
    "small": (1000, 1000),
    "between": (16, 16 << 20),
    "slow": (8, 4 << 20),
    "device": (16, 256 << 20),
}
"""Tensors, and bytes of each."""

MEMFD = "memfd:unirun-weights"
"""The kernel's name for the memory of a channel."""

WARM_UP = 5
"""Rounds that are not counted: pages that are new take many times as long as others."""


def main(result: str, kind: str, rounds: int) -> None:
    """Measure, in each worker of both roles."""
    context = unirun.init()
    together = context.group("actor", "rollout", backend="gloo")
    count, size = SIZES[kind]
    device = "cuda" if kind == "device" else "cpu"
    tensors = {f"layer {number}": torch.ones(size // 4, device=device) for number in range(count)}
    backends = {"copied": ""} | {"between": {"linked": "gloo"}, "slow": {}, "device": {}}.get(
        kind, {"mapped": ""}
    )
    channels = {
        name: unirun.WeightsChannel(name, publisher="actor", receivers=["rollout"], backend=backend)
        for name, backend in backends.items()
    }
    taken = {name: dict(tensors) if name == "mapped" else tensors for name in channels}
    copies = [torch.empty_like(tensor) for tensor in tensors.values()] if context.role == "actor" else []
    found: dict[str, list[float]] = {}

    def measure(what: str, action: Callable[[], None]) -> None:
        dist.barrier(group=together)
        began = time.perf_counter()
        action()
        dist.barrier(group=together)
        found.setdefault(what, []).append(time.perf_counter() - began)

    def broadcast() -> None:
        for tensor in tensors.values():
            dist.broadcast(tensor, src=0, group=together)

    for version in range(WARM_UP + rounds):
        for name, channel in channels.items():

            def move(
                name: str = name, channel: unirun.WeightsChannel = channel, version: int = version
            ) -> None:
                if context.role == "actor":
                    channel.publish(tensors, version)
                else:
                    channel.receive(taken[name], min_version=version, assign=name == "mapped")

            measure(name, move)
        if kind == "device":
            if context.role == "actor":
                found.setdefault("memcpy", []).append(copy_on_device(copies, [*tensors.values()]))
            continue
        if kind == "slow":
            continue
        measure("broadcast", broadcast)
        dist.barrier(group=together)
        if context.role == "actor":
            pairs = [(t.numpy(), s.numpy()) for t, s in zip(copies, tensors.values(), strict=True)]
            for what, count_of, threads in (
                ("memcpy", 1, 1),
                ("copies", together.size(), os.cpu_count() or 1),
            ):
                began = time.perf_counter()
                copy(pairs * count_of, threads)
                found.setdefault(what, []).append(time.perf_counter() - began)
    if context.role == "actor":
        kept = {what: values[WARM_UP:] for what, values in found.items()}
        kept["memory"] = [shared_memory() / len(channels) / (count * size)]
        Path(result).write_text(json.dumps(kept))


def copy(pairs: list[tuple[Any, Any]], threads: int) -> None:
    """Copy arrays, each from the second of a pair to the first."""
    left = iter(pairs)

    def some() -> None:
        for target, source in left:
            numpy.copyto(target, source)

    helpers = [threading.Thread(target=some) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    some()
    for helper in helpers:
        helper.join()


def copy_on_device(into: list[torch.Tensor], from_: list[torch.Tensor]) -> float:
    """Seconds of one copy within the memory of a device."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch._foreach_copy_(into, from_)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def shared_memory() -> int:
    """The bytes that this process shares with receivers."""
    handles = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    ours = [each for each in handles if os.path.lexists(each) and MEMFD in os.readlink(each)]
    return sum(os.stat(each).st_size for each in ours)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
