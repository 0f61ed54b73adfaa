"""``--duplicate-stdout-filters`` and ``--duplicate-stderr-filters``: copy lines with one of the words to a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from unirun.launcher.logs import LogFollower
from unirun.observe.jobdir import JobDir, open_log
from unirun.spec.job import LogSpec
from unirun.values import WorkerId


class LineFilters:
    """Copies matching lines of every worker, with their prefix, to ``<logs>/filtered_{stdout,stderr}.log``."""

    def __init__(self, job: JobDir, log: LogSpec) -> None:
        self._job = job
        words = {"stdout": log.duplicate_stdout_filters, "stderr": log.duplicate_stderr_filters}
        self._words = {name: tuple(w.encode() for w in found if w) for name, found in words.items()}
        self._files = {
            name: open_log(job.logs, Path(f"filtered_{name}.log"))
            for name, found in self._words.items()
            if found
        }
        self._follower = LogFollower() if self._files else None

    def follow(self, worker: WorkerId) -> None:
        """Follow the output of one worker, whose log files exist."""
        if self._follower is None:
            return
        logs = self._job.worker_logs(worker)
        for name, handle in self._files.items():
            if (before := worker.before) is not None:
                self._follower.release(self._job.worker_logs(before) / f"{name}.log")
            sink = _sink(handle, f"[{worker}] ".encode(), self._words[name])
            self._follower.follow(logs / f"{name}.log", sink)

    def finish(self) -> None:
        """Copy the remaining lines and close."""
        if self._follower is not None:
            self._follower.finish()
        for handle in self._files.values():
            os.close(handle)
        self._files = {}


def _sink(handle: int, prefix: bytes, words: tuple[bytes, ...]) -> Callable[[bytes], None]:
    def put(data: bytes) -> None:
        lines = [prefix + line for line in data.splitlines(keepends=True) if any(w in line for w in words)]
        # A full disk loses only copies of lines; the originals are in the worker's log.
        with contextlib.suppress(OSError):
            os.write(handle, b"".join(lines))

    return put
