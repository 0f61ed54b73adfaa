"""The same measurements with Ray or Monarch: ``python -m benchmarks.foreign ray``.

``ray`` and ``monarch`` print the median of a blocking call that does nothing, in µs; ``ray-weights`` that of 1 GiB from
one process into place in three others, in s; ``ray-queue`` the seconds for each item of 1 MB through a queue. These
systems are measured when they are installed (``pip install ray torchmonarch``).
"""

from __future__ import annotations

import importlib
import sys
import time
from statistics import median
from typing import Any

import numpy

from benchmarks.calls import p50

CALLS = 500
WARM_UP, ROUNDS, ITEMS = 3, 5, 300


def ray_call() -> float:
    """An actor of Ray on this host, ``ray.get(actor.nothing.remote())``."""
    ray: Any = importlib.import_module("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:

        class Worker:
            def nothing(self) -> None:
                """Does nothing."""

        actor = ray.remote(Worker).remote()
        ray.get(actor.nothing.remote())
        return p50(lambda: ray.get(actor.nothing.remote()), CALLS)
    finally:
        ray.shutdown()


def monarch_call() -> float:
    """An actor of Monarch in a process of this host, ``actor.nothing.call_one().get()``."""
    monarch: Any = importlib.import_module("monarch.actor")

    class Worker(monarch.Actor):  # type: ignore[misc]
        @monarch.endpoint  # type: ignore[untyped-decorator]
        async def nothing(self) -> None:
            """Does nothing."""

    procs = monarch.this_host().spawn_procs(per_host={"procs": 1})
    actor = procs.spawn("worker", Worker)
    actor.nothing.call_one().get()
    return p50(lambda: actor.nothing.call_one().get(), CALLS)


def ray_weights() -> float:
    """`ray.put` of 16 arrays of 64 MiB, and `ray.get` of them into place in three actors."""
    ray: Any = importlib.import_module("ray")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=5 << 30)
    try:

        class Receiver:
            def __init__(self) -> None:
                self.places = [numpy.ones(16 << 20, dtype=numpy.float32) for _ in range(16)]

            def receive(self, refs: list[Any]) -> None:
                """Copy the arrays into place."""
                for place, array in zip(self.places, ray.get(refs), strict=True):
                    numpy.copyto(place, array)

        receivers = [ray.remote(Receiver).remote() for _ in range(3)]
        arrays = [numpy.ones(16 << 20, dtype=numpy.float32) for _ in range(16)]
        times = []
        for _ in range(WARM_UP + ROUNDS):
            began = time.perf_counter()
            refs = [ray.put(array) for array in arrays]
            ray.get([receiver.receive.remote(refs) for receiver in receivers])
            times.append(time.perf_counter() - began)
            del refs
        return median(times[WARM_UP:])
    finally:
        ray.shutdown()


def ray_queue() -> float:
    """``ray.util.queue.Queue`` from one actor to this process."""
    ray: Any = importlib.import_module("ray")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        queue = importlib.import_module("ray.util.queue").Queue(maxsize=16)

        class Producer:
            def produce(self, queue: Any, count: int) -> None:
                """Put the items."""
                for _ in range(count):
                    queue.put(numpy.ones(250_000, dtype=numpy.float32))

        producer = ray.remote(Producer).remote()
        done = producer.produce.remote(queue, 50 + ITEMS)
        for _ in range(50):
            queue.get()
        began = time.perf_counter()
        for _ in range(ITEMS):
            queue.get()
        taken = (time.perf_counter() - began) / ITEMS
        ray.get(done)
        return taken
    finally:
        ray.shutdown()


SYSTEMS = {"ray": ray_call, "monarch": monarch_call, "ray-weights": ray_weights, "ray-queue": ray_queue}

if __name__ == "__main__":
    print(SYSTEMS[sys.argv[1]](), flush=True)
