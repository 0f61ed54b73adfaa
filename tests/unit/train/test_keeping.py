"""A checkpoint that is to be committed while the workers are stopped: the run has the cause."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from unirun.errors import TrainingFailed, WorkerLost
from unirun.train.callbacks import Callbacks
from unirun.train.checkpoints import CheckpointStrategy
from unirun.train.running import TrainingIterator
from unirun.train.worker import RunTask


class Answered:
    """In place of the ref of a call that is over."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer

    def done(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> Any:
        return self._answer()


class Committing:
    """In place of a group of which rank 0 answers `commit`."""

    def __init__(self, answer: Any) -> None:
        self._answer, self.commit = answer, self

    def __getitem__(self, rank: int) -> Committing:
        return self

    def call_async(self, attempt: int, number: int) -> Any:
        return Answered(lambda: self._answer)


def kept(answer: Any, run: Callable[[], Any]) -> TrainingIterator:
    """The iterator, after it had a checkpoint committed: rank 0 gave `answer`, and `run` is the end of the run."""
    unused: Any = SimpleNamespace(workers=None)
    iterator = TrainingIterator(
        unused,
        RunTask(print, [], False, {}, {}, "", CheckpointStrategy()),
        Callbacks(()),
        lambda data: data,
        checkpoint=None,
        logdir="",
        max_failures=0,
        retry=(),
        elastic=False,
        grow_every=60.0,
    )
    group: Any = Committing(answer)
    ref: Any = Answered(run)
    iterator._keep(group, ref, 1, 7)
    return iterator


def lost() -> Any:
    raise WorkerLost("worker:0 was lost", "see its log", worker="worker:0")


def test_the_loss_of_its_workers_is_the_error_of_a_checkpoint_that_was_given_up() -> None:
    with pytest.raises(WorkerLost, match="worker:0 was lost"):
        kept(None, lost)


def test_a_checkpoint_that_was_given_up_is_never_taken_for_one_that_counts() -> None:
    with pytest.raises(TrainingFailed, match="checkpoint 7 was given up"):
        kept(None, lambda: ["done"])


def test_a_run_may_keep_no_checkpoints() -> None:
    assert kept([], lost).checkpoints == []
