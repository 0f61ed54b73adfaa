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


class Died(Exception):
    """The process of the master has ended."""


class Worker:
    """The worker with the buffer, and the group that it is alone."""

    def __init__(self, folder: Path) -> None:
        self.buffer = Buffer(folder)
        self.versions: list[int] = []
        self.counts = (0, 0)
        """The trajectories that it has accepted, and rejected."""
        self.room = (0, 0)
        """The version, and the trajectories that are kept for the steps after it."""
        self.dies = ""
        """The master dies ``before`` or ``after`` the next release of trajectories."""
        self.accepted = Method(
            lambda _, number, seconds: (*self.buffer.since(number), self.counts), late=True
        )
        self.release = Method(self._release)
        self.receive = Method(self._receive)
        self.published = Method(lambda _: [None])
        self.publish = Method(lambda _, version: self.versions.append(version))

    def _release(self, _attempt: int, ids: Sequence[str], *, dropped: bool) -> None:
        dies, self.dies = self.dies, ""
        if dies != "before":
            self.buffer.release(ids)
        if dies:
            raise Died

    def _receive(self, _attempt: int, version: int, kept: int) -> None:
        self.room = version, kept

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
@given(st.integers(1, 2), st.integers(0, 2), st.integers(1, 2), st.data())
def test_each_is_used_once_and_a_step_that_is_made_again_has_the_same(
    count: int, eta: int, every: int, data: st.DataObject
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="source-"))
    try:
        History(folder, count, eta, every, data).play()
    finally:
        shutil.rmtree(folder)


class History:
    """A trial, whose master and worker die. The reference is what was accepted, and what each step has taken."""

    def __init__(self, folder: Path, count: int, eta: int, every: int, data: st.DataObject) -> None:
        self.folder, self.count, self.eta, self.every, self.data = folder, count, eta, every, data
        self.manager = GserverManager(ModelName("actor"), 0, "round_robin", eta, count, 1, 99)
        self.versions: dict[str, int] = {}
        self.used: dict[int, Sequence[str]] = {}
        self.old: dict[int, Sequence[str]] = {}
        self.checkpoints, self.step = [0], 0
        self.worker = Worker(folder)
        self.begin()

    @property
    def furthest(self) -> int:
        """The number of steps that were begun."""
        return len(self.used)

    def begin(self) -> None:
        """A master begins after `step` steps."""
        self.worker.dies = ""
        self.take_down()
        self.there = TrajectorySource(self.worker, 1, TakenFile(self.folder), self.manager, self.step)
        version = max(self.step, self.furthest - 1)
        assert self.worker.room == (version, len(self.kept(version)))
        self.told, self.counted = [0, 0], self.worker.counts
        self.there.release(min(self.checkpoints))
        self.check()

    def take_down(self) -> None:
        """Note what the file says: it does not change."""
        for taken in TakenFile(self.folder).read():
            assert self.used.setdefault(taken.step, taken.ids) == taken.ids
            assert self.old.setdefault(taken.step, taken.old) == taken.old
        assert [*self.used] == [*range(self.furthest)]

    def kept(self, step: int) -> set[str]:
        """The trajectories that are there if no step before this one is made again."""
        used = {each for number, ids in self.used.items() if number < step for each in ids}
        return {*self.versions} - used - {each for ids in self.old.values() for each in ids}

    def check(self) -> None:
        """Check what is there, and what was published."""
        found = {meta.ids[0] for _, meta in self.worker.buffer.since(0)[1]}
        assert found == self.kept(min(self.checkpoints))
        dropped = [each for step, ids in self.old.items() if step >= min(self.checkpoints) for each in ids]
        assert self.there._ages.keys() <= {*found, *dropped}
        if self.step == self.furthest:
            assert self.worker.versions[-1] == self.step

    def play(self) -> None:
        for _ in range(self.data.draw(st.integers(10, 30), "moves")):
            move = self.data.draw(st.sampled_from(("come", "go_on", "go_on", "ahead", "news", "die")))
            getattr(self, move)()
        # Versions that anybody has seen do not go back.
        assert self.worker.versions == sorted(self.worker.versions)
        every_one = [each for ids in self.used.values() for each in ids]
        assert len(every_one) == len({*every_one})

    def come(self) -> None:
        new = {
            f"t{len(self.versions) + at}": max(self.step - self.data.draw(st.integers(0, 2)), 0)
            for at in range(self.count + 1)
        }
        self.versions |= new
        self.worker.buffer.add([(group(each), version) for each, version in new.items()])
        accepted, rejected = self.worker.counts
        self.worker.counts = accepted + len(new), rejected + self.data.draw(st.integers(0, 2), "rejected")

    def ahead(self) -> None:
        """The step after the next one is read, and has changed nothing."""
        if self.there.ids(self.step) is not None:
            self.there.ids(self.step + 1)

    def news(self) -> None:
        waits = self.there.news
        self.worker.accepted.end()
        if waits.done():
            self.there.look()

    def die(self) -> None:
        self.step = self.data.draw(st.sampled_from(self.checkpoints), "checkpoint")
        self.checkpoints = [each for each in self.checkpoints if each <= self.step]
        if self.data.draw(st.booleans(), "the worker, too"):
            self.worker = Worker(self.folder)
        self.begin()

    def go_on(self) -> None:
        """A step, if there is enough for it. The master may die in it."""
        ids = self.there.ids(self.step)
        if ids is None:
            return
        self.worker.dies = self.data.draw(st.sampled_from(("", "before", "after")), "dies")
        try:
            self.make(ids)
        except Died:
            self.die()
        self.worker.dies = ""

    def make(self, ids: Sequence[str]) -> None:
        figures = self.there.begin(self.step, 0.0)
        self.take_down()
        assert self.used[self.step] == ids
        assert all(self.step - self.versions[each] <= self.eta for each in ids)
        assert self.worker.buffer.read(ids).ids == ids
        for at, name in enumerate(("accepted", "rejected")):
            self.told[at] += int(figures[f"trajectories/{name}"])
            assert self.told[at] == self.worker.counts[at] - self.counted[at]
        assert figures["trajectories/too_old"] == len(self.old[self.step])
        ages = [figures[f"trajectories/staleness_{age}"] for age in range(self.eta + 1)]
        assert sum(ages) == self.count
        self.step += 1
        self.there.publish(self.step)
        if not self.step % self.every:
            self.checkpoints = [*self.checkpoints, self.step][-2:]
            self.there.release(min(self.checkpoints))
            lines = TakenFile(self.folder).read()
            assert [taken.step for taken in lines] == [*range(min(self.checkpoints), self.furthest)]
        self.check()


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
