"""Datasets for cross-validation."""

from __future__ import annotations

from typing import Any

from unirun.errors import UsageError
from unirun.train.data.order import Order
from unirun.train.data.sources import check_number, is_indexed


class Fold:
    """Every `k`-th sample of `dataset` in `order`, beginning with number `fold`; or the others. A map-style dataset."""

    def __init__(self, dataset: Any, order: Order, k: int, fold: int, *, others: bool) -> None:
        self._dataset, self._order = dataset, order
        self._k, self._fold, self._others = k, fold, others
        every = (order.n - fold + k - 1) // k
        self._length = order.n - every if others else every

    def __len__(self) -> int:
        """The number of samples."""
        return self._length

    def __getitem__(self, index: int) -> Any:
        """One sample. Raises IndexError."""
        index = range(self._length)[index]
        if self._others:
            group, within = divmod(index, self._k - 1)
            position = group * self._k + within + (within >= self._fold)
        else:
            position = index * self._k + self._fold
        (sample,) = self._order.indices(position, position + 1).tolist()
        return self._dataset[sample]


def kfold(dataset: Any, k: int, *, seed: int | None = None) -> list[tuple[Fold, Fold]]:
    """`k` pairs of datasets, for training and for validation: each sample is in the validation set of one pair.

    The validation set of a pair is every `k`-th sample, so that it is spread over all of the dataset, also where that
    is sorted; with `seed`, in an order that it shuffles (`Order`). The sizes differ by at most 1. Nothing is copied:
    samples are read from `dataset`, which has a length and is indexed.

    Raises `UsageError` if it is not, and if `k` is less than 2 or more than the number of samples.
    """
    if not is_indexed(dataset):
        raise UsageError(
            f"kfold(): a {type(dataset).__name__} has no length, or is not indexed",
            "pass a dataset with __len__ and __getitem__",
        )
    check_number("kfold(): k", k, 2)
    if seed is not None:
        check_number("kfold(): seed", seed, 0)
    if k > len(dataset):
        raise UsageError(f"kfold(): {k} folds of {len(dataset)} samples", "pass a smaller k")
    order = Order(len(dataset), seed or 0, 0, seed is not None)
    return [
        (Fold(dataset, order, k, fold, others=True), Fold(dataset, order, k, fold, others=False))
        for fold in range(k)
    ]
