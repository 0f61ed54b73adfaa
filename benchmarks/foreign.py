"""A blocking call that does nothing, to an actor of Ray or Monarch: ``python -m benchmarks.foreign ray``.

Prints the median in µs. These systems are measured when they are installed (``pip install ray torchmonarch``).
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from benchmarks.calls import p50

CALLS = 500


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


SYSTEMS = {"ray": ray_call, "monarch": monarch_call}

if __name__ == "__main__":
    print(SYSTEMS[sys.argv[1]](), flush=True)
