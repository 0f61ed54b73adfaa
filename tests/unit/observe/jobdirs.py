"""Fixtures that create job directories in the test's home."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unirun.observe.jobdir import JobDir
from unirun.rendezvous.creation import create_job
from unirun.wire.handshake import new_token

Create = Callable[..., JobDir]


FRESH = {"events.jsonl", "alive.lock", "logs", "store", "token", "uid"}
"""Files in the directory of a new job."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def locks() -> Iterator[list[int]]:
    held: list[int] = []
    yield held
    for handle in held:
        os.close(handle)


@pytest.fixture
def create(locks: list[int]) -> Create:
    """Creates a job, which is alive until its lock is released."""

    def make(run_id: str = "run-1", *, running: bool = True, log_dir: str | None = None) -> JobDir:
        job, lock = create_job(run_id, new_token(), log_dir)
        if running:
            locks.append(lock)
        else:
            os.close(lock)
        return job

    return make
