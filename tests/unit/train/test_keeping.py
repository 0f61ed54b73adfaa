"""A checkpoint that is to be committed while the workers are stopped: the run has the cause."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from unirun.errors import TrainingFailed, WorkerLost
from unirun.train import running
from unirun.train.callbacks import Callbacks
from unirun.train.checkpoints import CheckpointStrategy, Info
from unirun.train.running import TrainingIterator
from unirun.train.task import RunTask


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


class Going(Answered):
    """In place of the ref of a call that is over when it was waited for so often."""

    def __init__(self, waits: int, answer: Callable[[], Any]) -> None:
        super().__init__(answer)
        self._left = waits

    def done(self) -> bool:
        return self._left <= 0

    def exception(self) -> BaseException | None:
        assert self.done()
        try:
            self._answer()
        except (WorkerLost, ValueError) as error:
            return error
        return None

    def wake_with(self, wake: Callable[[Any], None]) -> None:
        self._left -= 1

    def forget_wake(self, wake: Callable[[Any], None]) -> None: ...


class Committing:
    """In place of a group of which rank 0 answers `commit`."""

    def __init__(self, ref: Answered) -> None:
        self._ref, self.commit = ref, self

    def __getitem__(self, rank: int) -> Committing:
        return self

    def call_async(self, attempt: int, number: int) -> Any:
        return self._ref


def kept(answer: Any, run: Callable[[], Any]) -> TrainingIterator:
    """The iterator, after it had a checkpoint committed: rank 0 gave `answer`, and `run` is the end of the run."""
    return kept_by(Answered(lambda: answer), Answered(run))


def kept_by(commit: Answered, run: Answered) -> TrainingIterator:
    """The same with the calls of `commit` and of the run."""
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
    group: Any = Committing(commit)
    ref: Any = run
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


def fail() -> Any:
    raise ValueError("of the function")


def test_the_error_of_a_rank_is_told_and_not_that_its_part_of_a_checkpoint_has_not_come() -> None:
    def incomplete() -> Any:
        raise ValueError("ranks 1 have not saved checkpoint 7")

    with pytest.raises(ValueError, match="of the function"):
        kept_by(Going(0, incomplete), Going(0, fail))
    with pytest.raises(ValueError, match="ranks 1 have not saved"):
        kept_by(Going(0, incomplete), Going(1, fail))


@pytest.mark.parametrize("end", [lost, fail, lambda: ["done"]])
@pytest.mark.parametrize("ended", [1, 2, 3])
@pytest.mark.parametrize("written", [1, 2, 3])
def test_a_checkpoint_is_waited_for_until_it_is_written_or_a_rank_is_lost_that_may_not_have_written_its_part(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[], Any], ended: int, written: int
) -> None:
    monkeypatch.setattr(running, "INTERRUPT_POLL_INTERVAL", 0.0)
    info = Info(7, "/there/000007")
    commit, run = Going(written, lambda: [info]), Going(ended, end)
    if end is lost and ended < written:
        with pytest.raises(WorkerLost, match="worker:0 was lost"):
            kept_by(commit, run)
    else:
        assert kept_by(commit, run).checkpoints == [info]
