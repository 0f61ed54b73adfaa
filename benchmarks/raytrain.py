"""The same as `benchmarks.training`, with Ray Train.

    python -m benchmarks.raytrain start FOLDER       the first report of 4 ranks
    python -m benchmarks.raytrain recovery FOLDER    the time from SIGKILL to the first report after it

Each prints one JSON object. `ray.train` hands reports to its controller, where a callback notes the time of each: the
driver itself has them only when the training has ended.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.figure import BenchmarkError
from benchmarks.job import DEADLINE
from benchmarks.steps import KILLED, KILLED_AFTER, RANKS, Steps

VARIABLES = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
"""The environment of a process with Ray Train."""

MISSING = "Ray Train is not installed: pip install 'ray[train]'"


def installed() -> bool:
    """Return True if Ray Train can be imported here."""
    return all(importlib.util.find_spec(name) is not None for name in ("ray", "pandas", "pyarrow"))


def start(folder: Path) -> dict[str, float]:
    """Seconds until the first report of all ranks: from the start of `ray.init`, and from its end."""

    def function() -> None:
        train = importlib.import_module("ray.train")
        train.report({"rank": train.get_context().get_world_rank()})

    # Not part of the time, as `unirun.train` is imported before it begins, too.
    importlib.import_module("ray.train.torch")
    began = time.time()
    with cluster(folder):
        ready = time.time()
        fit(function, folder)
        first = heard(folder)[0]
    if sorted(each["rank"] for each in first["metrics"]) != [*range(RANKS)]:
        raise RuntimeError("the report of some rank is missing")
    return {"start": first["time"] - began, "without init": first["time"] - ready}


def recovery(folder: Path) -> dict[str, float]:
    """Seconds from SIGKILL of a rank to the first report of all ranks after they have loaded the checkpoint."""

    def function() -> None:
        train = importlib.import_module("ray.train")
        checkpoint = train.get_checkpoint()
        state = None
        if checkpoint is not None:
            with checkpoint.as_directory() as saved:
                state = torch.load(Path(saved, "state.pt"))
        steps = Steps(state)
        for step in range(steps.resumed + 1, steps.last + 1):
            loss = steps.make()
            metrics = {"step": step, "resumed": steps.resumed, "pid": os.getpid(), "loss": loss}
            with tempfile.TemporaryDirectory() as made:
                rank = metrics["rank"] = train.get_context().get_world_rank()
                if rank == 0:
                    torch.save(steps.state(step), Path(made, "state.pt"))
                train.report(metrics, checkpoint=train.Checkpoint.from_directory(made) if rank == 0 else None)

    importlib.import_module("ray.train.torch")
    with cluster(folder), ThreadPoolExecutor(1) as pool:
        kill = pool.submit(kill_one, folder)
        fit(function, folder)
        killed = kill.result()
    after = next(each for each in heard(folder) if each["metrics"][0]["resumed"])
    return {"recovery": after["time"] - killed}


@contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Start Ray on this host, with its files in `folder`."""
    ray: Any = importlib.import_module("ray")
    ray.init(num_cpus=2 * RANKS, include_dashboard=False, log_to_driver=False, _temp_dir=str(folder / "r"))
    try:
        yield
    finally:
        ray.shutdown()


def fit(function: Callable[[], None], folder: Path) -> None:
    """Run `function` in all ranks, over gloo. The reports go to the file `heard`."""
    train: Any = importlib.import_module("ray.train")
    parts: Any = importlib.import_module("ray.train.torch")
    file = folder / "heard"

    class Note(train.UserCallback):  # type: ignore[misc]
        def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
            """Called in the controller with the reports of all ranks."""
            with file.open("a") as out:
                out.write(json.dumps({"time": time.time(), "metrics": metrics}) + "\n")

    parts.TorchTrainer(
        function,
        torch_config=parts.TorchConfig(backend="gloo"),
        scaling_config=train.ScalingConfig(num_workers=RANKS),
        run_config=train.RunConfig(
            storage_path=str(folder / "storage"),
            failure_config=train.FailureConfig(max_failures=3),
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
            callbacks=[Note()],
        ),
    ).fit()


def heard(folder: Path) -> list[dict[str, Any]]:
    """The reports so far, with the time of each, without an incomplete last line."""
    path = folder / "heard"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def kill_one(folder: Path) -> float:
    """Kill one rank after its tenth step. Returns the time."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        for each in heard(folder):
            (rank,) = (metrics for metrics in each["metrics"] if metrics["rank"] == KILLED)
            if rank["step"] == KILLED_AFTER:
                os.kill(rank["pid"], signal.SIGKILL)
                return time.time()
        time.sleep(0.005)
    raise BenchmarkError("no rank came so far that it could be killed")


WORK: dict[str, Callable[[Path], dict[str, float]]] = {"start": start, "recovery": recovery}

if __name__ == "__main__":
    print(json.dumps(WORK[sys.argv[1]](Path(sys.argv[2]))), flush=True)
