"""The script that measures a queue: items of 1 MB from one process to another.

    queueing.py unirun RESULT    in a job with a rank of ``rollout`` and one of ``actor``
    queueing.py torch RESULT     with ``torch.multiprocessing.Queue``, without a launcher

It writes to RESULT, as JSON, the seconds for each item. Both queues copy a tensor into shared memory when it is put.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
import torch.multiprocessing as mp

import unirun

ITEMS, WARM_UP, MOST = 1000, 50, 16
"""Counted items, items before these, and the maximum of items in the queue."""


def tensor() -> torch.Tensor:
    """1 MB."""
    return torch.ones(250_000)


def measured(get: Callable[[], object]) -> float:
    """Seconds for each item."""
    for _ in range(WARM_UP):
        get()
    began = time.perf_counter()
    for _ in range(ITEMS):
        get()
    return (time.perf_counter() - began) / ITEMS


def in_a_job(result: str) -> None:
    """Measure `unirun.Queue`."""
    context = unirun.init()
    queue = unirun.Queue("experience", producer="rollout", consumer="actor", maxsize=MOST)
    if context.role == "actor":
        Path(result).write_text(json.dumps(measured(queue.get)))
        queue.done()
    else:
        item = tensor()
        for _ in range(WARM_UP + ITEMS):
            queue.put(item)
        queue.join()


def produce(queue: mp.Queue[torch.Tensor], received: Event) -> None:
    """Put the items of the peer. Its queue shares the memory of a tensor, so each item is a new tensor."""
    item = tensor()
    for _ in range(WARM_UP + ITEMS):
        queue.put(item.clone())
    # Its tensors are gone when a producer ends.
    received.wait()


def with_torch(result: str) -> None:
    """Measure `torch.multiprocessing.Queue`."""
    context = mp.get_context("spawn")
    queue, received = context.Queue(MOST), context.Event()
    process = context.Process(target=produce, args=(queue, received), daemon=True)
    process.start()
    Path(result).write_text(json.dumps(measured(queue.get)))
    received.set()
    process.join()


if __name__ == "__main__":
    {"unirun": in_a_job, "torch": with_torch}[sys.argv[1]](sys.argv[2])
