"""What interfaces return: data and figures that fit their call, and errors that name the call and the rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unirun.errors import UsageError
from unirun.experiments import SequenceSample
from unirun.experiments.results import data_of, figures_of

from .setups import TRAIN, call

CALL = call("score", ["prompt"], ["rewards", "mask"], output_key_remap={"scores": "rewards"})
STEP = call("train", ["prompt"], kind=TRAIN)
IDS = ("a", "b")


def sample(*keys: str, ids: tuple[str, ...] = IDS) -> SequenceSample:
    return SequenceSample.of({key: [torch.zeros(1) for _ in ids] for key in keys}, ids)


def test_data_has_the_names_of_the_graph_and_no_other_keys() -> None:
    assert data_of(CALL, sample("scores", "mask", "more"), IDS, 0).keys == ("rewards", "mask")


def test_ids_may_be_in_another_order() -> None:
    assert data_of(CALL, sample("scores", "mask", ids=("b", "a")), IDS, 0).ids == ("b", "a")


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
        data_of(CALL, found, IDS, 3)


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
