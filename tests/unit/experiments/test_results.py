"""The values that interfaces return: data and figures that fit their call, and errors that name the call and the rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from unirun.errors import UsageError
from unirun.experiments import SequenceSample
from unirun.experiments.orders import REDUCTIONS, data_of, figures_of, means, reduced

from .sample_configs import GENERATE, TRAIN, call

CALL = call("score", ["prompt"], ["rewards", "mask"], output_key_remap={"scores": "rewards"})
STEP = call("train", ["prompt"], kind=TRAIN)
IDS = ("a", "b")
GIVEN = SequenceSample.of({"prompt": [torch.ones(1, dtype=torch.long)] * 2}, IDS)


def sample(*keys: str, ids: tuple[str, ...] = IDS) -> SequenceSample:
    return SequenceSample.of({key: [torch.zeros(1) for _ in ids] for key in keys}, ids)


def test_data_has_the_names_of_the_graph_and_no_other_keys() -> None:
    assert data_of(CALL, sample("scores", "mask", "more"), GIVEN, 0).keys == ("rewards", "mask")


def test_ids_may_be_in_another_order() -> None:
    assert data_of(CALL, sample("scores", "mask", ids=("b", "a")), GIVEN, 0).ids == ("b", "a")


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (None, "returned a NoneType in rank 3 of actor@0; return a SequenceSample in all ranks"),
        ({"rewards": 1}, "returned a dict in rank 3"),
        (sample("scores"), "a sample without mask in rank 3 of actor@0; it has rewards"),
        (sample("scores", "mask", ids=("a",)), r"data of 1 ids \(a\), and got 2 ids \(a, b\) in rank 3"),
    ],
)
def test_what_is_no_such_data_is_told_with_the_call_and_the_rank(found: Any, told: str) -> None:
    with pytest.raises(UsageError, match=rf"score: inference\(\) of interface 'tests-interface' .*{told}"):
        data_of(CALL, found, GIVEN, 3)


def of_counts(key: str, *counts: int) -> SequenceSample:
    """Ids with so many sequences."""
    return SequenceSample.of({key: [[torch.zeros(2)] * count for count in counts]}, IDS)


SCORE = call("score", ["answers"], ["rewards"])


@pytest.mark.parametrize("counts", [(4, 3), (1, 1), (2, 1), (8, 6)])
def test_each_id_has_as_many_results_as_sequences_or_one_for_a_group_of_them(counts: tuple[int, int]) -> None:
    assert data_of(SCORE, of_counts("rewards", *counts), of_counts("answers", 4, 3), 0).keys == ("rewards",)


@pytest.mark.parametrize("counts", [(3, 3), (4, 2), (0, 3), (5, 3)])
def test_another_number_of_results_is_told_with_the_call_the_key_and_both_numbers(
    counts: tuple[int, int],
) -> None:
    at = 0 if counts[0] != 4 else 1
    found, passed = counts[at], (4, 3)[at]
    told = (
        rf"score: inference\(\) .* returned {found} sequences of 'rewards' for id '{IDS[at]}' in rank 0 of actor@0; "
        rf"return as many as were passed: answers has {passed}"
    )
    with pytest.raises(UsageError, match=told):
        data_of(SCORE, of_counts("rewards", *counts), of_counts("answers", 4, 3), 0)


def test_generation_makes_as_many_sequences_as_it_likes() -> None:
    made = call("gen", ["prompt"], ["answers"], kind=GENERATE)
    assert data_of(made, of_counts("answers", 5, 7), of_counts("prompt", 2, 3), 0).keys == ("answers",)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_data_that_is_not_finite_is_told_with_the_call_the_key_and_the_ids(value: float) -> None:
    found = SequenceSample.of({"rewards": [torch.tensor(0.5), torch.tensor(value)]}, IDS)
    told = r"score: .* returned values of 'rewards' that are not finite, for 1 ids \(b\) in rank 2 of actor@0"
    with pytest.raises(UsageError, match=told):
        data_of(SCORE, found, of_counts("answers", 1, 1), 2)
    passed_on = data_of(replace(SCORE, error_if_nonfinite=False), found, of_counts("answers", 1, 1), 2)
    assert not bool(passed_on["rewards"].isfinite().all())


def test_figures_are_numbers() -> None:
    found = figures_of(STEP, {"loss": torch.tensor(2.0), "steps": 3, "rate": 0.5}, 0)
    assert found == {"loss": 2.0, "steps": 3.0, "rate": 0.5}
    assert figures_of(STEP, None, 0) == {}


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (1.5, "returned a float in rank 1 of actor@0; return a dict of numbers, or None"),
        ({"loss": "low"}, "returned the figure 'loss', a str in rank 1"),
        ({"loss": torch.zeros(2)}, "the figure 'loss', a Tensor"),
        ({"loss": {}}, "the figure 'loss', a dict"),
    ],
)
def test_what_are_no_figures_is_told_with_the_call_and_the_rank(found: Any, told: str) -> None:
    with pytest.raises(UsageError, match=rf"train: train_step\(\) of interface 'tests-interface' .*{told}"):
        figures_of(STEP, found, 1)


def test_sums_of_ranks_are_divided_by_their_counts() -> None:
    assert means([{"loss": 6.0, "count": 1.0}, {"loss": 2.0, "right": 3.0, "count": 3.0}]) == {
        "loss": 2.0,
        "right": 0.75,
    }
    assert means([{"loss": 2.0}]) == {"loss": 2.0}
    assert means([{"loss": 0.0, "count": 0.0}]) == {"loss": 0.0}
    assert means([]) == {}


def test_an_evaluation_may_name_other_reductions_than_the_mean() -> None:
    found = [
        {"right": 3.0, "longest": 7.0, "tokens": 5.0, "count": 4.0},
        {"right": 1.0, "longest": 9.0, "count": 1.0},
    ]
    assert means(found, {"longest": "max", "tokens": "sum"}) == {"right": 0.8, "longest": 9.0, "tokens": 5.0}


def test_figures_of_data_parallel_ranks_are_weighted_by_their_samples() -> None:
    told = [({"reward": 0.5, "only": 2.0}, 6.0), ({"reward": 0.1}, 2.0)]
    assert reduced(told, {}) == {"reward": pytest.approx(0.4), "only": 2.0}
    assert reduced([], {}) == {}


def test_figures_that_are_the_same_in_all_ranks_stay_the_same_to_the_bit() -> None:
    assert reduced([({"loss": 0.1}, 3.0), ({"loss": 0.1}, 7.0), ({"loss": 0.1}, 1.0)], {}) == {"loss": 0.1}


def test_a_reduction_is_named_for_each_figure() -> None:
    told = [({"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}, 3.0), ({"a": 2.0, "b": 2.0, "c": 2.0, "d": 2.0}, 1.0)]
    reductions = {"a": "sum", "b": "max", "c": "min", "d": "mean"}
    assert reduced(told, reductions) == {"a": 3.0, "b": 2.0, "c": 1.0, "d": 1.25}


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_a_figure_of_which_one_rank_has_nan_is_nan(kind: str) -> None:
    told = [({"a": 1.0}, 1.0), ({"a": math.nan}, 1.0), ({"a": 2.0}, 1.0)]
    assert math.isnan(reduced(told, {"a": kind})["a"])
