"""The kinds of datasets, and the way to read the share of a rank from each.

============  ======================================================================  ================
kind          which datasets                                                          a position is
============  ======================================================================  ================
`Indexed`     have a length and are indexed: lists, arrays, torch's and Hugging       a sample
              Face's map-style datasets
`Streamed`    can only be iterated: torch's and Hugging Face's `IterableDataset`,     an item
              any object whose ``__iter__`` begins anew
`FromFiles`   `Files`                                                                 a file
============  ======================================================================  ================
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace
from torch.utils.data import DataLoader, IterableDataset

from unirun.errors import UsageError
from unirun.train.data.files import Files
from unirun.train.data.order import Order
from unirun.train.data.plan import Numbers, Progress
from unirun.values import Value


class Mark(Value):
    """The part of a cell that is consumed once an item is: `items` of its position, which is `whole` or begun."""

    cell: int
    position: int
    items: int = 0
    whole: bool = True


class Turn(Value):
    """The part that process `worker` of `workers` reads: each `workers`-th batch, or file, from its own number on."""

    worker: int = 0
    workers: int = 1
    batch: int = 1


ALL = Turn()

SPAN = 4096
"""Positions of which the order is found at once."""

Marked = tuple[tuple[Mark, ...], Any]
"""An item, and the marks of the cells that it ends or goes on with."""


class Source(Protocol):
    """A `dataset`, as the share of a rank is read from it. `size` is its number of positions, None if it is unknown."""

    dataset: Any
    size: int | None

    def read(self, progress: Progress, turn: Turn = ALL) -> Iterator[Marked]:
        """Yield the rest of the share of `progress`; of that, what `turn` has."""
        ...


class Indexed:
    """A dataset that has a length and is indexed."""

    def __init__(self, dataset: Any, order: Order) -> None:
        self.dataset, self._order = dataset, order
        self.size: int | None = order.n

    def batches(self, progress: Progress) -> Iterator[tuple[Mark, list[int]]]:
        """The cells that are left of the share, each with the indices of its samples."""
        order = replace(self._order, epoch=progress.epoch)
        for cells in _neighbours(progress.cells()):
            first, last = int(cells[0][1][0]), int(cells[-1][1][-1])
            indices = order.indices(first, last + 1)
            for cell, positions in cells:
                # Not every dataset takes numpy's integers.
                yield Mark(cell, int(positions[0])), indices[positions - first].tolist()

    def read(self, progress: Progress, turn: Turn = ALL) -> Iterator[Marked]:
        """Yield the rest of the share, whose cells have one sample each. A `DataLoader` gives turns itself."""
        for mark, (index,) in self.batches(progress):
            yield (mark,), self.dataset[index]


def _neighbours(cells: Iterator[tuple[int, Numbers]]) -> Iterator[list[tuple[int, Numbers]]]:
    """Consecutive cells, as many as lie within `SPAN` positions: their order is found at once."""
    some: list[tuple[int, Numbers]] = []
    for cell in cells:
        if some and cell[1][-1] - some[0][1][0] >= SPAN:
            yield some
            some = []
        some.append(cell)
    if some:
        yield some


class Streamed:
    """A dataset that can only be iterated, and gives the same items in each iteration of one epoch.

    ``dataset.set_epoch(n)``, if it has that, is called before each iteration. What is consumed is skipped with
    ``dataset.skip(n)`` where that leaves the rest of the same order, and otherwise read again and dropped.
    """

    size: int | None = None

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def read(self, progress: Progress, turn: Turn = ALL) -> Iterator[Marked]:
        """Yield the rest of the share. Whole batches go to the turns, one after the other."""
        assert progress.share is not None
        rank, split, count = progress.share.rank, progress.share.split, progress.share.count
        number = count * split.world + rank
        at = int(progress.positions(np.array([number]))[0])
        consumed = set(progress.ahead)
        for item in self._from(at, progress.epoch):
            if at not in consumed:
                step = number // split.world
                mine = number % split.world == rank
                if mine and (step - count) // turn.batch % turn.workers == turn.worker:
                    yield (Mark(step, at),), item
                number += 1
            at += 1

    def _from(self, at: int, epoch: int) -> Iterator[Any]:
        by_epoch = hasattr(self.dataset, "set_epoch")
        if by_epoch:
            self.dataset.set_epoch(epoch)
        # What Hugging Face's `skip` returns begins at epoch 0 again, and keeps the order of its files in every epoch.
        if at and hasattr(self.dataset, "skip") and not (by_epoch and epoch):
            return iter(self.dataset.skip(at))
        return itertools.islice(self.dataset, at, None)


class FromFiles:
    """Files, of which each has items. A file is consumed when its last item is."""

    def __init__(self, files: Files, order: Order) -> None:
        self.dataset, self._order = files, order
        self.size: int | None = order.n

    def read(self, progress: Progress, turn: Turn = ALL) -> Iterator[Marked]:
        """Yield the rest of the share. Whole files go to the turns, one after the other."""
        order = replace(self._order, epoch=progress.epoch)
        # Files without items; the next item marks them, so that they are not looked at again.
        passed: tuple[Mark, ...] = ()
        for cell, (position,) in progress.cells():
            if cell % turn.workers != turn.worker:
                continue
            at = int(position)
            (index,) = order.indices(at, at + 1).tolist()
            count = progress.partial.get(at, 0)
            for item, last in _with_last(self.dataset.items(index, count)):
                count += 1
                yield (*passed, Mark(cell, at, count, last)), item
                passed = ()
                if last:
                    break
            else:
                passed = (*passed, Mark(cell, at))


def _with_last(items: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item, and whether it is the last one."""
    for item in items:
        for following in items:
            yield item, False
            item = following
        yield item, True


def source_of(name: str, dataset: Any, *, shuffle: bool, seed: int, block: int) -> Source:
    """The source of the dataset `name`. Raises `UsageError` if it is none."""
    _refuse(name, dataset)
    if isinstance(dataset, Files):
        return FromFiles(dataset, Order(len(dataset), seed, 0, shuffle, block))
    if is_indexed(dataset):
        return Indexed(dataset, Order(len(dataset), seed, 0, shuffle, block))
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
    return Streamed(dataset)


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
