"""A model worker that publishes beside what its main thread computes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import UnirunError
from unirun.experiments.async_worker import AsyncModelWorkerProcess
from unirun.experiments.model_worker import ModelWorkerProcess


class Channel:
    """A channel whose publications take until they are let go."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.begun, self.let_go = threading.Event(), threading.Event()

    def publish(self, weights: object, version: int) -> None:
        self.begun.set()
        assert self.let_go.wait(WAIT_TIMEOUT)
        self.version = version


def test_models_are_made_anew_when_nothing_of_the_attempt_before_is_being_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker: Any = object.__new__(AsyncModelWorkerProcess)
    channel = Channel()
    worker._publishing, worker._channel, worker._queue = threading.Lock(), channel, None
    worker._attempt, worker._published = 1, dict

    def restore(self: Any, attempt: int, step: int | None, spec: object) -> dict[str, int]:
        self._attempt = attempt
        return {"version": -1 if channel.version is None else channel.version}

    monkeypatch.setattr(ModelWorkerProcess, "restore", restore)
    with ThreadPoolExecutor(2) as threads:
        publishes = threads.submit(worker.publish, 1, 5)
        assert channel.begun.wait(WAIT_TIMEOUT)
        restores = threads.submit(worker.restore, 2, None, None)
        with pytest.raises(TimeoutError):
            restores.result(0.1)
        channel.let_go.set()
        assert publishes.result(WAIT_TIMEOUT) is None
        assert restores.result(WAIT_TIMEOUT) == {"version": 5}
    with pytest.raises(UnirunError, match="this call is of attempt 1"):
        worker.publish(1, 6)
    worker.publish(2, 5)
    assert channel.version == 5
