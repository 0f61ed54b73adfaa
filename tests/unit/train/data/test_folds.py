"""Datasets for cross-validation."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from unirun.errors import UsageError
from unirun.train.data import Files
from unirun.train.data.loader import Shard
from unirun.train.data.sources import Fold, kfold


def samples(fold: Fold) -> list[Any]:
    """All of them: it can be iterated, as it is indexed, though it has no ``__iter__``, which the types ask for."""
    return [*fold]  # type: ignore[misc]


@given(st.integers(2, 80), st.integers(2, 80), st.none() | st.integers(0, 9))
def test_each_sample_is_for_validation_once_and_else_for_training(n: int, k: int, seed: int | None) -> None:
    k = min(k, n)
    folds = kfold([*range(n)], k, seed=seed)
    assert sorted(sample for _, validation in folds for sample in samples(validation)) == [*range(n)]
    for train, validation in folds:
        assert sorted(samples(train) + samples(validation)) == [*range(n)]
    lengths = [len(validation) for _, validation in folds]
    assert max(lengths) - min(lengths) <= 1


def test_a_validation_set_is_spread_over_the_dataset() -> None:
    assert [samples(validation) for _, validation in kfold("abcdefg", 3)] == [
        ["a", "d", "g"],
        ["b", "e"],
        ["c", "f"],
    ]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_seed_gives_other_folds_and_the_same_ones_each_time(seed: int) -> None:
    some, same, other = (samples(kfold(range(40), 2, seed=each)[0][1]) for each in (seed, seed, seed + 1))
    assert some == same
    assert some not in (other, samples(kfold(range(40), 2)[0][1]))


def test_a_fold_is_indexed_as_a_list_is() -> None:
    train, _ = kfold(range(10), 5)[4]
    assert (train[0], train[-1], len(train)) == (0, 8, 8)
    with pytest.raises(IndexError):
        train[8]


def test_nothing_is_read_or_copied_before_it_is_needed() -> None:
    folds = kfold(range(10**12), 7)
    assert len(pickle.dumps(folds)) < 2000
    assert folds[3][1][10**11] == 7 * 10**11 + 3


def test_a_fold_is_a_dataset_for_a_shard() -> None:
    train, _ = kfold(range(9), 3)[0]
    assert [[*Shard("train", train, rank, 2)] for rank in range(2)] == [[1, 4, 7], [2, 5, 8]]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.parametrize(
    ("dataset", "k", "message"),
    [
        (range(3), 1, "k: found 1; pass a whole number from 2 on"),
        (range(3), "2", "k: found '2'; pass a whole number"),
        (range(3), 4, "4 folds of 3 samples; pass a smaller k"),
        (iter([1, 2]), 2, "list_iterator has no length"),
        (Endless(), 2, "Endless has no length"),
        (Files(["a", "b"]), 2, "Files has no length"),
    ],
)
def test_what_cannot_be_cut_is_refused(dataset: Any, k: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kfold(dataset, k)


def test_a_seed_that_is_no_number_is_refused() -> None:
    with pytest.raises(UsageError, match="seed: found -1"):
        kfold(range(4), 2, seed=-1)
