"""The trajectories of an asynchronous trial's steps, whatever dies: each is used once, and a step has the same again."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from unirun.experiments import source
from unirun.experiments.buffer import Buffer, TakenFile
from unirun.experiments.config import GserverManager
from unirun.experiments.graph import ModelName
from unirun.experiments.sample import SequenceSample
from unirun.experiments.source import TrajectorySource


class Method:
    """A method of the worker, whose calls end at once, or when the test says so."""

    def __init__(self, run: Callable[..., Any], *, late: bool = False) -> None:
        self.call, self._late = run, late
        self.open: list[tuple[Future[Any], Callable[[], Any]]] = []

    def call_async(self, *args: Any) -> Future[Any]:
        ref: Future[Any] = Future()
        if self._late and args[-1]:
            self.open.append((ref, lambda: self.call(*args)))
        else:
            ref.set_result(self.call(*args))
        return ref

    def end(self) -> None:
        """End the open calls."""
        for ref, run in self.open:
            ref.set_result(run())
        self.open.clear()


class Worker:
    """The worker with the buffer, and the group that it is alone."""

    def __init__(self, folder: Path) -> None:
        self.buffer = Buffer(folder)
        self.versions: list[int] = []
        self.accepted = Method(lambda _, number, seconds: (*self.buffer.since(number), (0, 0)), late=True)
        self.release = Method(lambda _, ids, *, dropped: self.buffer.release(ids))
        self.receive = Method(lambda *_: None)
        self.published = Method(lambda _: [None])
        self.publish = Method(lambda _, version: self.versions.append(version))

    def __getitem__(self, rank: int) -> Worker:
        return self


def group(each: str) -> SequenceSample:
    """A trajectory."""
    return SequenceSample.of({"rewards": [[torch.tensor(1.0)]]}, [each])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes die here, and not the machine."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(source, "wait", lambda refs: None)


@examples(100, shrunk=False)
@given(st.integers(1, 3), st.integers(0, 2), st.integers(1, 3), st.data())
def test_each_is_used_once_and_a_step_that_is_made_again_has_the_same(
    count: int, eta: int, every: int, data: st.DataObject
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="source-"))
    try:
        check_history(folder, count, eta, every, data)
    finally:
        shutil.rmtree(folder)


def check_history(folder: Path, count: int, eta: int, every: int, data: st.DataObject) -> None:
    manager = GserverManager(ModelName("actor"), 0, "round_robin", eta, count, 1, 99)
    used: dict[int, Sequence[str]] = {}
    versions: dict[str, int] = {}
    checkpoints, step, furthest = [0], 0, 0
    worker = Worker(folder)
    there = TrajectorySource(worker, 1, TakenFile(folder), manager, 0)
    for _ in range(data.draw(st.integers(5, 25), "moves")):
        move = data.draw(st.sampled_from(("come", "step", "step", "ahead", "news", "die")))
        if move == "come":
            new = {
                f"t{len(versions) + at}": max(step - data.draw(st.integers(0, 2)), 0) for at in range(count)
            }
            versions |= new
            worker.buffer.add([(group(each), version) for each, version in new.items()])
        elif move == "ahead":
            # The step after it is read, and has changed nothing.
            if there.ids(step) is not None:
                there.ids(step + 1)
        elif move == "news":
            waits = there.news
            worker.accepted.end()
            if waits.done():
                there.look()
        elif move == "die":
            step = data.draw(st.sampled_from(checkpoints), "checkpoint")
            checkpoints = [each for each in checkpoints if each <= step]
            if data.draw(st.booleans(), "the worker, too"):
                worker = Worker(folder)
            there = TrajectorySource(worker, 1, TakenFile(folder), manager, step)
            there.release(min(checkpoints))
        elif (ids := there.ids(step)) is not None:
            there.begin(step, 0.0)
            assert used.setdefault(step, ids) == ids
            assert all(step - versions[each] <= eta for each in ids)
            assert worker.buffer.read(ids).ids == ids
            step += 1
            furthest = max(step, furthest)
            there.publish(step)
            if not step % every:
                checkpoints = [*checkpoints, step][-2:]
                there.release(min(checkpoints))
                lines = TakenFile(folder).read()
                assert [taken.step for taken in lines] == [*range(min(checkpoints), furthest)]
    # Versions that anybody has seen do not go back.
    assert worker.versions == sorted(worker.versions)
    every_one = [each for ids in used.values() for each in ids]
    assert len(every_one) == len({*every_one})


def test_a_call_that_is_late_tells_nothing_twice(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    manager = GserverManager(ModelName("actor"), 0, "round_robin", 0, 1, 1, 99)
    there = TrajectorySource(worker, 1, TakenFile(tmp_path), manager, 0)
    late = there.news
    worker.buffer.add([(group("a"), 0)])
    assert there.look()
    assert there.ids(0) == ("a",)
    there.begin(0, 0.0)
    there.release(1)
    worker.buffer.add([(group("b"), 0)])
    worker.accepted.end()
    assert late.done()
    assert not there.look()
    assert there.look()
    assert there.waiting == 1
