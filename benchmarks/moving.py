"""The script that measures a channel of weights: one publisher and three receivers on one host, beside gloo.

    moving.py RESULT KIND ROUNDS

KIND is ``large`` (1 GiB in 16 tensors), ``between`` (256 MiB in 16, for roles on different hosts) or ``small`` (1 MB in
1 000 tensors). The publisher writes to RESULT, as JSON,
the seconds of each round: ``copied`` (received into place), ``mapped`` (``assign=True``), ``broadcast`` (gloo, tensor
by tensor) and ``memcpy`` (one copy of the same tensors by one thread); and ``memory``, what it shares with receivers
in one channel, in multiples of its weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

import unirun

SIZES = {"large": (16, 64 << 20), "small": (1000, 1000), "between": (16, 16 << 20)}
"""Tensors, and bytes of each."""

MEMFD = "memfd:unirun-weights"
"""How the kernel calls the memory of a channel."""

WARM_UP = 3
"""Rounds that are not counted: pages that are new take many times as long as others."""


def main(result: str, kind: str, rounds: int) -> None:
    """Measure, in each worker of both roles."""
    context = unirun.init()
    together = context.group("actor", "rollout", backend="gloo")
    count, size = SIZES[kind]
    tensors = {f"layer {number}": torch.ones(size // 4) for number in range(count)}
    channels = {
        name: unirun.WeightsChannel(name, publisher="actor", receivers=["rollout"])
        for name in ("copied", "mapped")
    }
    taken = {"copied": tensors, "mapped": dict(tensors)}
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
        measure("broadcast", broadcast)
        dist.barrier(group=together)
        if context.role == "actor":
            began = time.perf_counter()
            for target, source in zip(copies, tensors.values(), strict=True):
                numpy.copyto(target.numpy(), source.numpy())
            found.setdefault("memcpy", []).append(time.perf_counter() - began)
    if context.role == "actor":
        kept = {what: values[WARM_UP:] for what, values in found.items()}
        kept["memory"] = [shared_memory() / len(channels) / (count * size)]
        Path(result).write_text(json.dumps(kept))


def shared_memory() -> int:
    """The bytes that this process shares with receivers."""
    handles = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    ours = [each for each in handles if os.path.lexists(each) and MEMFD in os.readlink(each)]
    return sum(os.stat(each).st_size for each in ours)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
