"""Equal failures in a row."""

from __future__ import annotations

from unirun.train.losses import LIMIT, Repeats


def test_three_equal_failures_without_progress_are_hopeless() -> None:
    repeats = Repeats()
    for number in range(LIMIT):
        assert not repeats.hopeless, number
        repeats = repeats.after("exit code 3 in train", progress=False)
    assert repeats.hopeless
    assert repeats == Repeats("exit code 3 in train", 3, 3)


def test_progress_and_another_failure_each_begin_a_new_row() -> None:
    twice = Repeats("exit code 3 in train", 2, 5)
    assert twice.after("exit code 3 in train", progress=True) == Repeats("exit code 3 in train", 1, 1)
    assert twice.after("exit code 3 in evaluate", progress=False) == Repeats("exit code 3 in evaluate", 1, 6)
