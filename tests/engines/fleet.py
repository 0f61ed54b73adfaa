"""Two engines, and a job of an actor and a companion that brings its versions into them."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from tests.engines.llama import llama, save
from tests.engines.server import START, Server
from tests.integration.harness import START as JOB
from tests.integration.harness import Running, Unirun, eventually

JOB_OF_TWO = '''
import json
import os
import sys
import threading
import time

import torch
import unirun
from safetensors.torch import load_file
from unirun.weights.companion import Companion, Engine, EnginesInMemory

folder = sys.argv[1]
ctx = unirun.init()
channel = unirun.WeightsChannel("policy", publisher="actor", receivers=["companion"])


class Followed(EnginesInMemory):
    """The engines that the test writes into a file; what is told of them is printed, with the time."""

    def follow(self):
        before = ""
        while True:
            with open(f"{folder}/engines.json") as file:
                now = file.read()
            if now != before:
                before = now
                self.set(*(Engine(*each) for each in json.loads(now)))
            time.sleep(0.01)

    def up_to_date(self, rank, incarnation, version):
        print(f"engine {rank} {incarnation} has {version} at {time.monotonic():.4f}", flush=True)

    def broken(self, rank, incarnation, reason):
        print(f"engine {rank} {incarnation} is broken: {reason}", flush=True)


if ctx.role == "actor":
    version = 1
    while True:
        told = f"{folder}/publish-{version}"
        if os.path.exists(told):
            weights = load_file(open(told).read())
            began = time.monotonic()
            channel.publish(weights, version)
            print(f"published {version} at {began:.4f}", flush=True)
            version += 1
        time.sleep(0.005)
else:
    engines = Followed()
    threading.Thread(target=engines.follow, daemon=True).start()
    Companion(channel, engines, timeout=60.0).run()
'''


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


class Fleet:
    """`count` engines with the same model. Their incarnations are counted as an agent counts them."""

    def __init__(
        self, start: Callable[..., Server], models: Callable[[int], Path], unirun: Unirun, count: int = 2
    ) -> None:
        self._start, self._models, self._folder = start, models, unirun.root
        self.engines: list[Server] = [start() for _ in range(count)]
        self._incarnations = [0] * count
        self.version = 0
        script = self._folder / "companion.py"
        script.write_text(JOB_OF_TWO)
        self._tell()
        self.job: Running = unirun.start("--roles", "actor=1,companion=1", script, self._folder)
        for engine in self.engines:
            engine.wait()
        self._tell()

    def _tell(self) -> None:
        """Write the engines for the companion; those that do not answer yet are not alive."""
        rows = [
            (rank, incarnation, engine.url, engine.answers())
            for rank, (engine, incarnation) in enumerate(zip(self.engines, self._incarnations, strict=True))
        ]
        new = self._folder / "engines.new"
        new.write_text(json.dumps(rows))
        os.replace(new, self._folder / "engines.json")

    def publish(self, seed: int) -> int:
        """Have the actor publish the model of this seed. Returns its version."""
        self.version += 1
        new = self._folder / "publish.new"
        new.write_text(str(self._models(seed) / "model.safetensors"))
        os.replace(new, self._folder / f"publish-{self.version}")
        return self.version

    def have(self, version: int, ranks: Sequence[int] = ()) -> list[float]:
        """Wait until all engines, or these, have a version. Returns when each had it."""
        which = ranks or range(len(self.engines))
        return [
            float(
                self.job.lines(
                    rf"engine {rank} {self._incarnations[rank]} has {version} at ([\d.]+)", 1, JOB
                )[0]
            )
            for rank in which
        ]

    def published(self, version: int) -> float:
        """The moment when the actor began to publish a version."""
        return float(self.job.lines(rf"published {version} at ([\d.]+)", 1, JOB)[0])

    def broken(self, rank: int) -> str:
        """Wait until an engine is told to be broken. Returns the reason."""
        return self.job.lines(rf"engine {rank} {self._incarnations[rank]} is broken: (.*)", 1, JOB)[0]

    def versions(self, rank: int) -> list[str]:
        """The versions that the present process of a rank was told to have."""
        return re.findall(rf"engine {rank} {self._incarnations[rank]} has (\w+) at", self.job.text)

    def restart(self, rank: int) -> None:
        """Start an engine again, as its agent does when it has ended."""
        self._incarnations[rank] += 1
        self.engines[rank] = self._start(at=self.engines[rank].port)
        self._tell()
        self.engines[rank].wait()
        self._tell()

    def killed_in_an_update(self, rank: int) -> None:
        """Kill an engine when it has begun an update and not finished it."""
        engine = self.engines[rank]
        before = engine.log.read_bytes().count(b"POST /start_weight_update")
        eventually(
            lambda: engine.log.read_bytes().count(b"POST /start_weight_update") > before,
            "an update has begun",
            START,
        )
        engine.kill()
        text = engine.log.read_text()
        assert text.rindex("POST /start_weight_update") > text.rindex("POST /finish_weight_update"), (
            "it was too fast"
        )

    def close(self) -> None:
        """End the job. The engines end with what has started them."""
        self.job.signal(signal.SIGTERM)
        self.job.end()
