"""The checkpoints that are kept, and the best of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import UsageError
from unirun.train.checkpoints import CheckpointStrategy, Info


def infos(*scores: float | None) -> list[Info]:
    return [Info(number, f"/there/{number:06}", score) for number, score in enumerate(scores, 1)]


def numbers(found: list[Info]) -> list[int]:
    return [info.number for info in found]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"num_to_keep": 0}, "num_to_keep=0"),
        ({"num_to_keep": 1.5}, "num_to_keep=1.5"),
        ({"checkpoint_score_order": "best"}, "checkpoint_score_order='best'"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, object], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        CheckpointStrategy(**arguments)  # type: ignore[arg-type]


def test_without_a_score_the_latest_is_the_best() -> None:
    strategy = CheckpointStrategy(num_to_keep=2)
    assert strategy.best(infos(None, None, None)) == infos(None, None, None)[2]
    assert numbers(strategy.surplus(infos(None, None, None))) == [1]
    assert strategy.best([]) is None


def test_the_best_are_kept_and_the_latest_though_it_is_bad() -> None:
    strategy = CheckpointStrategy(2, "accuracy", "max")
    assert numbers(strategy.surplus(infos(0.5, 0.9, 0.8, 0.1))) == [1, 3]
    best = strategy.best(infos(0.5, 0.9, 0.8, 0.1))
    assert best is not None
    assert best.number == 2


def test_the_least_is_the_best_when_that_is_asked_for() -> None:
    strategy = CheckpointStrategy(1, "loss", "min")
    best = strategy.best(infos(0.5, 0.2, 0.2, 0.3))
    assert best is not None
    assert best.number == 3, "of equal ones the latest"


def test_a_score_comes_from_the_report_before_the_state() -> None:
    strategy = CheckpointStrategy(None, "loss")
    assert strategy.score({"loss": 1}, {"loss": 2.0}) == 1.0
    assert strategy.score({"other": 1}, {"loss": 2.0}) == 2.0
    assert CheckpointStrategy().score({}, {}) is None


@pytest.mark.parametrize("value", ["high", None, [1, 2], 10**400])
def test_a_score_that_cannot_be_compared_is_told(value: object) -> None:
    with pytest.raises(UsageError, match="the score 'loss' of a checkpoint is"):
        CheckpointStrategy(None, "loss").score({"loss": value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), torch.tensor(float("nan"))])
@pytest.mark.parametrize("order", ["max", "min"])
def test_one_whose_score_is_not_finite_is_the_worst_and_goes_first(value: Any, order: str) -> None:
    strategy = CheckpointStrategy(2, "loss", order)
    scores = [strategy.score({"loss": each}) for each in (1.0, value, -1.0, value)]
    assert scores == [1.0, None, -1.0, None]
    found = infos(*scores)
    assert numbers(strategy.surplus(found[:3])) == [2]
    assert strategy.best(found) == (found[0] if order == "max" else found[2])
    assert strategy.best(found[1:2]) == found[1]


def test_a_score_that_nobody_reports_is_told() -> None:
    with pytest.raises(UsageError, match="neither the report after a checkpoint nor its state"):
        CheckpointStrategy(None, "loss").score({"accuracy": 1}, {"epoch": 3})


@given(
    st.lists(st.floats(allow_nan=False), min_size=1, max_size=12),
    st.integers(1, 5),
    st.sampled_from(["max", "min"]),
)
def test_as_many_are_kept_as_asked_with_the_best_of_the_others_and_the_latest(
    scores: list[float], keep: int, order: str
) -> None:
    strategy, found = CheckpointStrategy(keep, "score", order), infos(*scores)
    gone = numbers(strategy.surplus(found))
    kept = [info for info in found if info.number not in gone]
    assert len(kept) == min(keep, len(found))
    assert found[-1] in kept
    best = strategy.best(found)
    assert keep == 1 or best in kept
