"""A model worker of an asynchronous trial: data of two steps, room for trajectories, and weights that are published."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.effort import examples
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import QueueTimeout, UnirunError, UsageError
from unirun.experiments import async_worker
from unirun.experiments.async_worker import AsyncModelWorkerProcess
from unirun.experiments.buffer import BUFFER_RANK, Buffer
from unirun.experiments.model_worker import DataStore, ModelWorkerProcess
from unirun.experiments.sample import SequenceSample
from unirun.weights.queue import Item


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


class Receivers:
    """A channel, as its receivers know it: a version is of one state of the weights."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.states: dict[int, object] = {}

    def publish(self, weights: object, version: int) -> None:
        assert self.states.setdefault(version, weights) is weights
        assert self.version is None or version > self.version
        self.version = version


class Room:
    """The queue of trajectories, which lets rollout workers begin others."""

    def __init__(self) -> None:
        self.kept, self.version = 0, 0
        self.opened, self.closed = 0, threading.Event()
        self.error: Exception | None = None

    def opens(self, manager: object) -> Room:
        self.opened += 1
        return self

    def get_some(self, count: int, timeout: float) -> list[Item]:
        assert self.closed.wait(WAIT_TIMEOUT)
        if self.error is not None:
            raise self.error
        raise QueueTimeout("none has come", "", queue="trajectories")

    def keep(self, count: int) -> None:
        self.kept += count

    def advance(self, version: int) -> None:
        self.version = version


class Histories:
    """A worker, and the reference: the trajectories of the steps in flight, the room, and the last version."""

    def __init__(self, folder: Path, data: st.DataObject) -> None:
        self.data = data
        self.channel, self.room, self.buffer = Receivers(), Room(), Buffer(folder)
        worker: Any = object.__new__(AsyncModelWorkerProcess)
        worker._publishing, worker._published = threading.Lock(), object
        worker._channel, worker._buffer = self.channel, self.buffer
        trained = SimpleNamespace(
            role="actor", interface_impl=SimpleNamespace(type_="decoupled_grpo", args={})
        )
        worker._resolved = SimpleNamespace(graph=SimpleNamespace(trained=[trained]))
        worker._manager = SimpleNamespace(model_name=SimpleNamespace(role="actor"))
        worker._master_handle = SimpleNamespace(context=SimpleNamespace(rank=BUFFER_RANK))
        nobody: Any = None
        self.worker, self.store = worker, DataStore(BUFFER_RANK, nobody)
        worker._store = self.store
        self.attempt = self.worker._attempt = 1
        self.step = data.draw(st.integers(0, 9), "steps of an earlier process")
        self.come = self.kept = 0
        self.waiting: list[str] = []
        self.there: list[str] = []
        """Those that are needed, also by steps that are made again."""
        self.flight: dict[int, list[str]] = {}

    def play(self) -> None:
        moves = (self.arrive, self.read, self.read, self.read, self.end, self.end, self.drop, self.restore)
        self.kept = self.receive()
        for _ in range(self.data.draw(st.integers(10, 30), "moves")):
            self.data.draw(st.sampled_from(moves), "move")()
            for step, ids in self.flight.items():
                found = self.store.data(step, "x", ids)
                assert found.tolist() == [float(each) for each in ids]
            assert self.room.kept == self.kept
            number, found, counts = self.worker.accepted(self.attempt, 0, 0.0)
            assert (number, [meta.ids[0] for _, meta in found], counts) == (self.come, self.there, (0, 0))
        if self.data.draw(st.booleans(), "trajectories cannot be taken any more"):
            self.room.error = UsageError("a trajectory was put without a version")
            self.room.closed.set()
            self.worker._intake._thread.join(WAIT_TIMEOUT)
            with pytest.raises(UsageError, match="put without a version"):
                self.worker.accepted(self.attempt, 0, 0.0)

    def receive(self) -> int:
        """The start of an attempt. Only the first one in this process finds trajectories of another."""
        kept = self.data.draw(st.integers(0, 9), "kept")
        self.worker.receive(self.attempt, self.step, kept)
        assert self.room.version == self.step
        assert self.room.opened == 1
        return kept

    def arrive(self) -> None:
        new = [str(self.come + at) for at in range(5)]
        self.come += len(new)
        self.buffer.add(
            [(SequenceSample.of({"x": [[torch.tensor(float(each))]]}, [each]), 0) for each in new]
        )
        self.waiting += new
        self.there += new

    def read(self) -> None:
        """The data of the next step, or of the one after it, is read."""
        step = self.step + len(self.flight)
        if len(self.flight) == 2 or not self.waiting:
            return
        self.flight[step], self.waiting = self.waiting[:2], self.waiting[2:]
        rank, meta = self.worker.take(self.attempt, step, self.step, self.flight[step])
        assert (rank, meta.ids) == (BUFFER_RANK, tuple(self.flight[step]))
        with pytest.raises(ValueError, match=f"data of step {self.step - 1}"):
            self.store.data(self.step - 1, "x", ["0"])

    def end(self) -> None:
        """The oldest step ends, and a checkpoint follows."""
        if ids := self.flight.pop(self.step, None):
            self.step += 1
            self.worker.publish(self.attempt, self.step)
            assert (self.channel.version, self.room.version) == (max(self.channel.states), self.step)
            self.worker.release(self.attempt, ids, dropped=False)
            self.there = [each for each in self.there if each not in ids]

    def drop(self) -> None:
        """The oldest trajectory is too old. It may have been dropped before."""
        if self.waiting:
            old = self.waiting.pop(0)
            self.there.remove(old)
            for _ in range(self.data.draw(st.integers(1, 2), "times")):
                self.worker.release(self.attempt, [old], dropped=True)
            self.kept -= 1

    def restore(self) -> None:
        """Another attempt begins after the step before the last one, or after the last one."""
        self.attempt += 1
        self.step -= self.data.draw(st.integers(0, min(self.step, 1)), "back")
        self.flight.clear()
        self.worker.restore(self.attempt, self.step, None)
        with pytest.raises(UnirunError, match="this call is of attempt"):
            self.worker.publish(self.attempt - 1, self.step)
        self.worker.publish(self.attempt, self.step)
        self.receive()


@examples(100)
@given(st.data())
def test_data_room_and_versions_are_those_of_the_steps_in_any_history(data: st.DataObject) -> None:
    def restore(self: Any, attempt: int, step: int | None, spec: object) -> dict[str, int]:
        self._attempt = attempt
        self._store.drop()
        return {}

    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(ModelWorkerProcess, "restore", restore)
        patch.setattr(os, "fsync", lambda handle: None)
        histories = Histories(Path(folder), data)
        patch.setattr(async_worker, "trajectories", histories.room.opens)
        try:
            histories.play()
        finally:
            histories.room.closed.set()
            histories.worker.teardown()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two data-parallel ranks, of which this process is the first."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield DeviceMesh("cpu", [0, 1], mesh_dim_names=("data",))
    dist.destroy_process_group()


@pytest.mark.parametrize("data", [0, 1])
def test_each_rank_publishes_its_parts_and_the_first_one_all_that_are_whole(
    mesh: DeviceMesh, data: int
) -> None:
    tensors = {
        "whole": torch.zeros(2),
        "cut": DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False),
    }
    worker: Any = object.__new__(AsyncModelWorkerProcess)
    worker._fetch = lambda shard: None
    worker._manager = SimpleNamespace(model_name=SimpleNamespace(role="actor"))
    worker._resolved = SimpleNamespace(
        graph=SimpleNamespace(trained=[SimpleNamespace(role="actor", model_name="actor@0")])
    )
    engine = SimpleNamespace(tensors=lambda: tensors)
    model = SimpleNamespace(running=lambda: engine, place=SimpleNamespace(data=data))
    worker._shards = {"actor@0": SimpleNamespace(model=model)}
    assert [*worker._published()] == (["cut"] if data else ["whole", "cut"])
    worker._shards = {}
    assert worker._published() == {}
