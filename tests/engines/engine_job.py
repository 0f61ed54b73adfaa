"""A job of an actor, which publishes what a test tells it to, and of two real vLLM that receive it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import yaml

from tests.engines.environment import binaries
from tests.engines.llama import llama, save
from tests.engines.server import ENVIRONMENT, OPTIONS, START_TIMEOUT, Engine, Server
from tests.integration.harness import Running, Unirun
from tests.waiting import eventually

ACTOR = """
import os
import sys
import time

import unirun
from safetensors.torch import load_file

folder, version, loaded = sys.argv[1], 1, {}
channel = unirun.WeightsChannel("policy")
while True:
    told = f"{folder}/publish-{version}"
    if os.path.exists(told):
        path = open(told).read()
        if path not in loaded:
            # In memory, as a trainer has them, and not in a file that is mapped.
            loaded[path] = {name: tensor.clone() for name, tensor in load_file(path).items()}
        began = time.time()
        channel.publish(loaded[path], version)
        print(f"published {version} at {began:.4f}", flush=True)
        version += 1
    time.sleep(0.005)
"""

COUNT = 2


def saved(root: Path, **sizes: int) -> Callable[[int], Path]:
    """Gives the folder of a Llama by its seed."""

    def folder(seed: int) -> Path:
        place = root / str(seed)
        return place if place.exists() else save(llama(seed, **sizes), place)

    return folder


@contextmanager
def started(model: Path, folder: Path) -> Iterator[Callable[..., Server]]:
    """Starts engines, which end with the block."""
    with ExitStack() as engines:

        def start(*options: str, at: int = 0) -> Server:
            return engines.enter_context(closing(Server(model, folder, *options, at=at)))

        yield start


class EngineJob:
    """The job. `engines` are the engines at their addresses, which stay."""

    def __init__(self, models: Callable[[int], Path], unirun: Unirun) -> None:
        self._models, self._unirun, self._folder = models, unirun, unirun.root
        self.version = 0
        (self._folder / "actor.py").write_text(ACTOR)
        engine = {
            "kind": "vllm",
            "model": str(models(0)),
            "python": str(binaries().parent),
            "count": COUNT,
            "args": [*OPTIONS],
            "env": ENVIRONMENT,
        }
        actor = {"script": str(self._folder / "actor.py"), "args": [str(self._folder)]}
        channels = {"policy": {"publisher": "actor", "receivers": ["engine"]}}
        file = self._folder / "job.yaml"
        file.write_text(yaml.safe_dump({"roles": {"actor": actor, "engine": engine}, "channels": channels}))
        self.job: Running = unirun.start("--config", file)
        self.job.lines(r"ranks of 3 roles up", within=START_TIMEOUT)
        self.engines = [Engine(f"http://{self._worker(rank)['address']}") for rank in range(COUNT)]

    def _worker(self, rank: int) -> dict[str, object]:
        return self._unirun.workers()[f"engine:{rank}"]

    def publish(self, seed: int) -> int:
        """Have the actor publish the model of this seed. Returns its version."""
        self.version += 1
        new = self._folder / "publish.new"
        new.write_text(str(self._models(seed) / "model.safetensors"))
        os.replace(new, self._folder / f"publish-{self.version}")
        return self.version

    def has(self, rank: int) -> int | None:
        """The version that an engine which is ready has; None: it has none, or is not ready."""
        worker = self._worker(rank)
        metrics = worker["metrics"]
        assert isinstance(metrics, dict)
        version = metrics.get("policy/version")
        return int(version) if worker["ready"] and version is not None else None

    def have(self, version: int, *ranks: int) -> None:
        """Wait until all engines, or these, have a version."""
        which = ranks or range(COUNT)
        eventually(
            lambda: all(self.has(rank) == version for rank in which), f"version {version}", START_TIMEOUT
        )

    def took(self, version: int) -> float:
        """Seconds from the publication of a version until all engines served with it."""
        began = float(self.job.lines(rf"published {version} at ([\d.]+)")[0])
        metrics = self._unirun.job_dir() / "metrics.jsonl"

        def served() -> list[float] | None:
            rows = map(json.loads, metrics.read_text().splitlines() if metrics.exists() else ())
            found = [
                row["time"]
                for row in rows
                if row["role"] == "engine" and row["values"].get("policy/version") == version
            ]
            return found if len(found) == COUNT else None

        return max(eventually(served, f"all engines have had version {version}", START_TIMEOUT)) - began

    def first(self, rank: int, incarnation: int) -> int | None:
        """The first version that this process of an engine has when it is ready."""

        def look() -> bool:
            worker = self._worker(rank)
            return bool(worker["ready"]) and worker["incarnation"] == incarnation

        eventually(look, f"engine:{rank} is up again", START_TIMEOUT)
        return self.has(rank)

    def kill(self, rank: int) -> None:
        """Kill the server of an engine. The job ends its other processes, and starts it again."""
        pid = self._worker(rank)["pid"]
        assert isinstance(pid, int)
        os.kill(pid, signal.SIGKILL)

    def kill_in_an_update(self, rank: int) -> None:
        """Kill an engine when it has begun an update and not finished it."""
        incarnation = self._worker(rank)["incarnation"]
        assert isinstance(incarnation, int)

        def log() -> bytes:
            return self._unirun.log("engine", rank, incarnation)

        before = log().count(b"POST /start_weight_update")
        eventually(
            lambda: log().count(b"POST /start_weight_update") > before, "an update has begun", START_TIMEOUT
        )
        self.kill(rank)
        text = log()
        assert text.rindex(b"POST /start_weight_update") > text.rindex(b"POST /finish_weight_update"), (
            "it was too fast"
        )

    def close(self) -> None:
        """End the job."""
        self.job.signal(signal.SIGTERM)
        self.job.end()
