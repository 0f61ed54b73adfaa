"""Loads of a version of the weights into two vLLM servers on one host: by the companion of a job, and by vLLM itself
from a file in memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.engines.engine_job import EngineJob, saved
from tests.engines.llama import LARGE
from tests.engines.server import Engine
from tests.integration.harness import command_in


class Pair:
    """Two engines and a job that publishes, with the same files for both measurements."""

    def __init__(self, engine_job: EngineJob, folders: tuple[Path, Path]) -> None:
        self._fleet, self._folders = engine_job, folders
        self._turn = itertools.count()
        # First times are slower on both sides.
        for _ in range(2):
            self.bring()
            self.load()

    def _busy(self) -> None:
        """Send a request to both engines, as vLLM's processes sleep after a second without work and wake up slowly."""
        with ThreadPoolExecutor(len(self._fleet.engines)) as pool:
            for answer in [pool.submit(each.generate, [5, 6, 7], 4) for each in self._fleet.engines]:
                answer.result()

    def bring(self) -> float:
        """Seconds from the publication of a version until requests go on in both engines."""
        self._busy()
        return self._fleet.took(self._fleet.publish(next(self._turn) % 2))

    def load(self) -> float:
        """Seconds in which both engines load a file again while they serve, by vLLM's own routes: a pause, and
        ``reload_weights``."""
        self._busy()
        folder = str(self._folders[next(self._turn) % 2])
        began = time.perf_counter()
        with ThreadPoolExecutor(len(self._fleet.engines)) as pool:
            answers = [pool.submit(reloaded, engine, folder) for engine in self._fleet.engines]
        for answer in answers:
            answer.result()
        return time.perf_counter() - began


def reloaded(engine: Engine, folder: str) -> None:
    """Load the model in `folder` into an engine."""
    engine.ask("/pause?mode=keep", {})
    engine.ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
    engine.ask("/resume", {})


@contextmanager
def pair(folder: Path) -> Iterator[Pair]:
    """Two engines, whose files are in `folder`."""
    models = saved(folder, **LARGE)
    job = folder / "job"
    job.mkdir()
    with command_in(job) as unirun:
        engine_job = EngineJob(models, unirun)
        try:
            yield Pair(engine_job, (models(0), models(1)))
        finally:
            engine_job.close()
