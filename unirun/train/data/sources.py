"""The kinds of datasets, and the way to read the share of a rank from each.

======================================================================================  ================
which datasets                                                                          a position is
======================================================================================  ================
those that have a length and are indexed: lists, arrays, torch's and Hugging Face's     a sample
map-style datasets
those that can only be iterated: torch's and Hugging Face's `IterableDataset`, any      an item
object whose ``__iter__`` begins anew
`Files`                                                                                 a file
======================================================================================  ================
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch.utils.data._utils.worker as torch_worker
from msgspec.structs import replace
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from unirun.errors import UsageError
from unirun.train.data.files import Files
from unirun.train.data.plan import WHOLE, Numbers, SampleOrder, Share

Mark = tuple[int, int]
"""A step, and the number of its items that are used, or `WHOLE`."""

Marked = tuple[Sequence[Mark], Any]
"""An item or a batch, and the marks of the steps that it ends or goes on with."""


class DataSource(IterableDataset[Any]):
    """A dataset, and the order of its positions in an epoch: None for one that can only be iterated. That one gives the
    same items in each iteration of one epoch. ``dataset.set_epoch(n)``, if it has that, is called before each. What is
    used is skipped with ``dataset.skip(n)`` where that leaves the rest of the same order, and otherwise read again and
    dropped. A file is used whole when its last item is.

    Its own iterator, for a `DataLoader`, has the rest of a share: of a dataset that is indexed the samples of each
    batch, of others the items for this process of the `DataLoader`.
    """

    def __init__(self, dataset: Any, order: SampleOrder | None) -> None:
        self.dataset, self._order = dataset, order

    def begin(self, share: Share, batch: int) -> None:
        """Iterators have the rest of `share` from now on, in batches of this size."""
        self._share, self._batch = share, batch

    def __iter__(self) -> Iterator[Any]:
        if self.indexed:
            return self._batches(self._share)
        info = get_worker_info()
        if info is None:
            return self.read(self._share)
        if self.size is None:
            # Some datasets give each process another part. Here every process gets all, and takes its batches.
            torch_worker._worker_info = None
        return self.read(self._share, info.id, info.num_workers, self._batch)

    @property
    def size(self) -> int | None:
        """The number of positions; None if it is unknown."""
        return None if self._order is None else self._order.n

    @property
    def indexed(self) -> bool:
        """True if each position is a sample that can be read by itself."""
        return self._order is not None and not isinstance(self.dataset, Files)

    def _batches(self, share: Share) -> Iterator[list[int]]:
        indices = self._indices(share)
        for _, positions in share.cells():
            yield indices(positions)

    def read(self, share: Share, worker: int = 0, workers: int = 1, batch: int = 1) -> Iterator[Marked]:
        """Yield the items that are left of `share`, whose cells have one position each.

        Process `worker` of `workers` has each `workers`-th file, or each `workers`-th `batch` of what can only be
        iterated.
        """
        if self._order is None:
            return self._streamed(share, worker, workers, batch)
        return self._samples(share) if self.indexed else self._from_files(share, worker, workers)

    def _indices(self, share: Share) -> Callable[[Numbers], list[int]]:
        """A function that returns the samples, or files, at ascending positions. Not every dataset takes numpy's
        integers."""
        assert self._order is not None
        order = replace(self._order, epoch=share.epoch)

        def indices(positions: Numbers) -> list[int]:
            first, end = int(positions[0]), int(positions[-1]) + 1
            span = order.indices(first, end)
            found: list[int] = (span if len(span) == len(positions) else span[positions - first]).tolist()
            return found

        return indices

    def _samples(self, share: Share) -> Iterator[Marked]:
        indices = self._indices(share)
        for step, positions in share.cells():
            yield ((step, WHOLE),), self.dataset[indices(positions)[0]]

    def _from_files(self, share: Share, worker: int, workers: int) -> Iterator[Marked]:
        indices = self._indices(share)
        # Files without items; the next item marks them, so that they are not looked at again.
        passed: tuple[Mark, ...] = ()
        for step, positions in share.cells(worker, workers):
            count = share.beyond.get(step, share.begin.beyond.get(int(positions[0]), 0))
            for item, last in _with_last(self.dataset.items(indices(positions)[0], count)):
                count += 1
                yield (*passed, (step, WHOLE if last else count)), item
                passed = ()
                if last:
                    break
            else:
                passed = (*passed, (step, WHOLE))

    def _streamed(self, share: Share, worker: int, workers: int, batch: int) -> Iterator[Marked]:
        number = share.steps * share.world + share.rank
        (at,) = share.begin.locator()(np.array([number])).tolist()
        used = {*share.begin.whole()}
        for item in self._iterated(at, share.epoch):
            if at not in used:
                step, rank = divmod(number, share.world)
                if rank == share.rank and (step - share.steps) // batch % workers == worker:
                    yield ((step, WHOLE),), item
                number += 1
            at += 1

    def _iterated(self, at: int, epoch: int) -> Iterator[Any]:
        by_epoch = hasattr(self.dataset, "set_epoch")
        if by_epoch:
            self.dataset.set_epoch(epoch)
        # What Hugging Face's `skip` returns begins at epoch 0 again, and keeps the order of its files in every epoch.
        if at and hasattr(self.dataset, "skip") and not (by_epoch and epoch):
            return iter(self.dataset.skip(at))
        return itertools.islice(self.dataset, at, None)


def _with_last(items: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item, and whether it is the last one."""
    for item in items:
        for following in items:
            yield item, False
            item = following
        yield item, True


def source_of(name: str, dataset: Any, *, shuffle: bool, seed: int, block: int) -> DataSource:
    """The source of the dataset `name`. Raises `UsageError` if it is none."""
    _refuse(name, dataset)
    if isinstance(dataset, Files):
        return DataSource(dataset, SampleOrder(len(dataset), seed, 0, shuffle, block))
    if is_indexed(dataset):
        return DataSource(dataset, SampleOrder(len(dataset), seed, 0, shuffle, block))
    if not hasattr(dataset, "__iter__"):
        raise UsageError(
            f"dataset {name!r}: a {type(dataset).__name__} cannot be iterated, and is not indexed or has no length",
            "give it __len__ and __getitem__, or __iter__",
        )
    if shuffle:
        raise UsageError(
            f"dataset {name!r}: a {type(dataset).__name__} has no length, so its order cannot be changed",
            "pass shuffle=False, and shuffle it where its items are made",
        )
    return DataSource(dataset, None)


def is_indexed(dataset: Any) -> bool:
    """A dataset has a length and is indexed. torch's `IterableDataset` inherits ``__getitem__`` and is not."""
    return (
        hasattr(dataset, "__len__")
        and hasattr(dataset, "__getitem__")
        and not isinstance(dataset, IterableDataset)
    )


# What looks like a dataset and is none: its kind, and what is meant.
_REFUSED: Sequence[tuple[Any, str, str]] = (
    ((str, bytes), "is text", "read it first, or pass Files(path)"),
    (Mapping, "has names instead of positions", "pass one of its values, as in dataset['train']"),
    (Set, "has no order that is the same in every process", "pass sorted(...) of it"),
    (DataLoader, "makes batches already", "pass it to sharded(), or its dataset here"),
    (Iterator, "can be read only once", "pass an object whose __iter__ begins anew, or a list"),
)


def _refuse(name: str, dataset: Any) -> None:
    for kind, problem, remedy in _REFUSED:
        if isinstance(dataset, kind):
            raise UsageError(f"dataset {name!r}: a {type(dataset).__name__} {problem}", remedy)


def check_number(place: str, value: object, least: int) -> None:
    """Raises `UsageError` if an argument is no whole number from `least` on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{place}: found {value!r}", f"pass a whole number from {least} on")


# Datasets for cross-validation.


class Fold:
    """Every `k`-th sample of `dataset` in `order`, beginning with number `fold`; or the others. A map-style dataset."""

    def __init__(self, dataset: Any, order: SampleOrder, k: int, fold: int, *, others: bool) -> None:
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
    is sorted; with `seed`, in an order that it shuffles (`SampleOrder`). The sizes differ by at most 1. Nothing is
    copied: samples are read from `dataset`, which has a length and is indexed.

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
    order = SampleOrder(len(dataset), seed or 0, 0, seed is not None)
    return [
        (Fold(dataset, order, k, fold, others=True), Fold(dataset, order, k, fold, others=False))
        for fold in range(k)
    ]


def to_cv(dataset: Any, splits: int = 5, seed: int | None = None) -> list[tuple[Fold, Fold]]:
    """`kfold`, as RaySGD spells it."""
    return kfold(dataset, splits, seed=seed)
