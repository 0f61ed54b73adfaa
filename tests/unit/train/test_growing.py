"""The times at which a run asks for more ranks: right after a checkpoint, and not too often."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from unirun.train.callbacks import Callbacks
from unirun.train.checkpoints import CheckpointStrategy
from unirun.train.running import TrainingIterator
from unirun.train.task import RunTask

EVERY = 60.0


class FakeClock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


class FakeWorkers:
    """In place of workers that are asked for more: remembers when."""

    def __init__(self, clock: FakeClock) -> None:
        self.workers, self._clock, self.times = self, clock, list[float]()

    def grow(self) -> None:
        self.times.append(self._clock.time)


def run(
    clock: FakeClock, asked: FakeWorkers, *, elastic: bool = True, every: float = EVERY
) -> TrainingIterator:
    task = RunTask(print, [], False, {}, {}, "", CheckpointStrategy())
    attempts: Any = asked
    return TrainingIterator(
        attempts,
        task,
        Callbacks(()),
        lambda data: data,
        checkpoint=None,
        logdir="",
        max_failures=0,
        retry=(),
        elastic=elastic,
        grow_every=every,
        now=clock,
    )


def asks(
    rounds: list[tuple[float, int | None]], *, elastic: bool = True, every: float = EVERY
) -> tuple[list[float], list[float]]:
    """The times at which more ranks are asked for, and those at which a checkpoint is committed: the `rounds`
    of a run each have the seconds since the last one, and the number of a checkpoint or None."""
    clock = FakeClock()
    asked, saved = FakeWorkers(clock), list[float]()
    iterator = run(clock, asked, elastic=elastic, every=every)
    for seconds, number in rounds:
        clock.time += seconds
        iterator._grow(number)
        if number is not None:
            saved.append(clock.time)
    return asked.times, saved


steps = st.lists(st.tuples(st.floats(0.0, 100.0), st.none() | st.integers(1, 9)), max_size=30)


@given(steps)
def test_more_ranks_are_asked_for_after_checkpoints_only_and_never_sooner_than_the_interval(
    rounds: list[tuple[float, int | None]],
) -> None:
    times, saved = asks(rounds)
    assert {*times} <= {*saved}
    assert all(later >= before + EVERY for before, later in pairwise([1000.0, *times]))


@given(steps)
def test_they_are_asked_for_with_the_first_checkpoint_after_it(
    rounds: list[tuple[float, int | None]],
) -> None:
    times, saved = asks(rounds)
    due = 1000.0 + EVERY
    for moment in saved:
        if moment >= due:
            assert moment in times
            due = moment + EVERY


@given(steps)
def test_a_fixed_number_of_ranks_stays_as_it_is(rounds: list[tuple[float, int | None]]) -> None:
    assert asks(rounds, elastic=False)[0] == []


def test_without_an_interval_every_checkpoint_is_a_chance() -> None:
    assert asks([(0.0, 1), (1.0, None), (1.0, 2)], every=0.0)[0] == [1000.0, 1002.0]
