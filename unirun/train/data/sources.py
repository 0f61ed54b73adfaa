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
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import IO, Any, Protocol, Self

import fsspec
import numpy as np
from msgspec.structs import replace
from torch.utils.data import DataLoader, IterableDataset

from unirun.errors import UsageError
from unirun.train.data.plan import Numbers, Progress, SampleOrder
from unirun.values import Value

# Datasets of many files, whose names may be too many for the memory.

CHUNK = 1 << 20
"""Bytes of a list that are looked through at a time."""

LINES = 1024
"""Lines of a list that are read at a time."""

Read = Callable[[IO[bytes]], Iterable[Any]]


def lines(file: IO[bytes]) -> Iterator[str]:
    """The lines of a file, as text without their ends."""
    for line in file:
        yield _text(line)


class Files:
    """A dataset in files: paths, or URLs that fsspec knows (``s3://…``). `read` gets each file, open for reading bytes,
    and returns its items; by default they are its lines.

    Whole files go to the ranks. `paths` is a sequence of them, one path, or a pattern as ``"data/*.jsonl"``, whose
    files are sorted by name. `Files.listed_in` takes a list of any length. `read` gives the same items each time, and
    goes to the processes of a `DataLoader`, so it is a function at the top level of a module.

    Raises `UsageError` if a pattern matches nothing, or if `paths` is none of these.
    """

    def __init__(
        self, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], read: Read = lines
    ) -> None:
        self._paths: _Paths = _paths_of(paths)
        self._read = read

    @classmethod
    def listed_in(cls, url: str | os.PathLike[str], read: Read = lines) -> Self:
        """The files whose paths or URLs are the lines of the file `url`, which is never in memory as a whole.

        It is read through once now, and a block of lines when one of them is needed. Empty lines name no file. The list
        must not change while it is used. Raises `UsageError` when it has, and OSError.
        """
        files = cls((), read)
        files._paths = _Listed(os.fspath(url))
        return files

    def __len__(self) -> int:
        """The number of files."""
        return len(self._paths)

    def path(self, index: int) -> str:
        """The path or URL of a file; empty for an empty line."""
        return self._paths[index]

    def items(self, index: int, begin: int = 0) -> Iterator[Any]:
        """The items of a file without the first `begin`, which are read and dropped. Raises OSError."""
        path = self.path(index)
        if path:
            with fsspec.open(path, "rb") as file:
                yield from itertools.islice(self._read(file), begin, None)


class _Paths(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> str: ...


def _paths_of(paths: Any) -> Sequence[str]:
    if isinstance(paths, str | os.PathLike):
        return _matching(os.fspath(paths))
    if not isinstance(paths, Sequence) or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise UsageError(
            f"Files(): expected paths, found a {type(paths).__name__}",
            "pass a list of paths, a pattern as 'data/*.jsonl', or use Files.listed_in(url)",
        )
    return tuple(os.fspath(path) for path in paths)


def _matching(pattern: str) -> Sequence[str]:
    if "*" not in pattern:
        return (pattern,)
    files, path = fsspec.url_to_fs(pattern)
    found = tuple(files.unstrip_protocol(each) for each in sorted(files.glob(path)))
    if not found:
        raise UsageError(
            f"Files(): no file matches {pattern!r}", "check the pattern, from this working directory"
        )
    return found


class _Listed:
    """The lines of a file: where each `LINES`-th begins, and the block of lines that was used last."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._count, self._begins = _scan(url)
        self._block, self._held = -1, list[str]()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> str:
        block, line = divmod(index, LINES)
        if block != self._block:
            self._held, self._block = self._lines(block), block
        return self._held[line]

    def _lines(self, block: int) -> list[str]:
        begin, end = self._begins[block : block + 2].tolist()
        with fsspec.open(self._url, "rb") as file:
            file.seek(begin)
            data = file.read(end - begin)
        found = data.removesuffix(b"\n").split(b"\n")
        if len(data) != end - begin or len(found) != min(LINES, self._count - block * LINES):
            raise UsageError(
                f"{self._url} has changed since it was read first", "leave it as it is until the job ends"
            )
        return [_text(line) for line in found]


def _scan(url: str) -> tuple[int, np.ndarray[Any, np.dtype[np.int64]]]:
    """The number of lines, and where each `LINES`-th begins, with the end of the last one."""
    begins = [np.zeros(1, np.int64)]
    count, at, ends_at = 0, 0, 0
    with fsspec.open(url, "rb") as file:
        while chunk := file.read(CHUNK):
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + 1 + at
            # The end of line number n, from 1, is where a block begins if n is a multiple.
            # A copy, as a slice would keep the ends of all lines in memory.
            begins.append(ends[(LINES - 1 - count) % LINES :: LINES].copy())
            count += len(ends)
            at += len(chunk)
            ends_at = int(ends[-1]) if len(ends) else ends_at
    if ends_at < at:
        count += 1
    found = np.concatenate(begins)
    return count, found if found[-1] == at else np.append(found, at)


def _text(line: bytes) -> str:
    return line.decode().removesuffix("\n").removesuffix("\r")


class Mark(Value):
    """The part of a cell that is consumed once an item is: `items` of its position, which is `whole` or begun."""

    cell: int
    position: int
    items: int = 0
    whole: bool = True


class LoaderSlice(Value):
    """The part that process `worker` of `workers` reads: each `workers`-th batch, or file, from its own number on."""

    worker: int = 0
    workers: int = 1
    batch: int = 1


ALL = LoaderSlice()

SPAN = 4096
"""Positions of which the order is found at once."""

Marked = tuple[tuple[Mark, ...], Any]
"""An item, and the marks of the cells that it ends or goes on with."""


class DataSource(Protocol):
    """A `dataset`, as the share of a rank is read from it. `size` is its number of positions, None if it is unknown."""

    dataset: Any
    size: int | None

    def read(self, progress: Progress, turn: LoaderSlice = ALL) -> Iterator[Marked]:
        """Yield the rest of the share of `progress`; of that, what `turn` has."""
        ...


class Indexed:
    """A dataset that has a length and is indexed."""

    def __init__(self, dataset: Any, order: SampleOrder) -> None:
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

    def read(self, progress: Progress, turn: LoaderSlice = ALL) -> Iterator[Marked]:
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

    def read(self, progress: Progress, turn: LoaderSlice = ALL) -> Iterator[Marked]:
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

    def __init__(self, files: Files, order: SampleOrder) -> None:
        self.dataset, self._order = files, order
        self.size: int | None = order.n

    def read(self, progress: Progress, turn: LoaderSlice = ALL) -> Iterator[Marked]:
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


def source_of(name: str, dataset: Any, *, shuffle: bool, seed: int, block: int) -> DataSource:
    """The source of the dataset `name`. Raises `UsageError` if it is none."""
    _refuse(name, dataset)
    if isinstance(dataset, Files):
        return FromFiles(dataset, SampleOrder(len(dataset), seed, 0, shuffle, block))
    if is_indexed(dataset):
        return Indexed(dataset, SampleOrder(len(dataset), seed, 0, shuffle, block))
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
