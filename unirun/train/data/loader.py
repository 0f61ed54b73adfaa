"""Batches of a rank's part of a dataset, which a `torch.utils.data.DataLoader` makes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch.utils.data._utils.worker as torch_worker
from torch import Generator
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from unirun.errors import UsageError
from unirun.train.data.plan import Progress
from unirun.train.data.sources import Indexed, Mark, Marked, Source, Streamed, Turn, check_number

if TYPE_CHECKING:
    from unirun.train.data.shard import Shard

_OURS: Mapping[str, str] = {
    "batch_size": "pass it as the first argument",
    "shuffle": "pass it to the shard, which shuffles in the same way on all ranks",
    "sampler": "leave it out: the shard says which samples this rank has",
    "batch_sampler": "leave it out: the shard says which samples a batch has",
    "drop_last": "leave it out: each sample is used once, and the sizes of batches differ by 1 at most",
}


class Loader:
    """The batches of a `shard`: a loop goes on where the last one was left, and ends with the epoch.

    It makes one `DataLoader` with `options`. A batch is consumed when the loop gets it.
    """

    def __init__(self, shard: Shard, batch_size: int, options: Mapping[str, Any]) -> None:
        check_number(f"dataset {shard.name!r}: batch_size", batch_size, 1)
        source = shard.source
        _check_options(shard.name, options, source)
        # A DataLoader draws a seed when a loop begins: not from the numbers of the program, which a run that goes on
        # from a checkpoint would have drawn at another moment.
        options = {**options, "generator": options.get("generator") or Generator()}
        self.shard, self._size = shard, batch_size
        self._feed: _Feed
        if isinstance(source, Indexed):
            self._feed, self._batch = _Batches(source, options), batch_size
        else:
            # Its samples are not known beforehand, so they are split one by one.
            self._feed, self._batch = _Items(source, batch_size, options), 1

    @property
    def dataset(self) -> Any:
        """The dataset, of which this rank has a part."""
        return self.shard.source.dataset

    @property
    def batch_size(self) -> int:
        """The largest number of samples in a batch; 1 where a `DataLoader` has made none."""
        return self._size

    def __iter__(self) -> Iterator[Any]:
        """The batches of this rank that are left of the epoch.

        Raises `UsageError` if a part of the epoch was consumed in batches of another size.
        """
        return self.shard.consume(self._batch, self._feed.read)

    def close(self) -> None:
        """End its processes, which may have been kept from loop to loop (``persistent_workers``)."""
        self._feed.close()

    def __len__(self) -> int:
        """The number of batches of the next loop, or of the one that goes on. Raises TypeError if it is unknown."""
        share = self.shard.upcoming(self._batch).share
        steps = share.split.steps(share.rank) if share is not None else None
        if share is None or steps is None or not isinstance(self._feed, _Batches):
            raise TypeError(
                f"dataset {self.shard.name!r} has no length: how many batches it has is known at its end"
            )
        return steps - self.shard.first(share.count)


def _check_options(name: str, options: Mapping[str, Any], source: Source) -> None:
    for option in options.keys() & _OURS.keys():
        raise UsageError(f"dataset {name!r}: option {option!r} of a DataLoader", _OURS[option])
    if not options.get("in_order", True):
        raise UsageError(
            f"dataset {name!r}: in_order=False",
            "leave it out: batches are counted in their order, so that a job can be resumed",
        )
    if options.get("persistent_workers") and not isinstance(source, Indexed):
        raise UsageError(
            f"dataset {name!r}: persistent_workers=True, with a dataset that is not indexed",
            "leave it out: each epoch needs processes that begin at its position",
        )


class _Feed(Protocol):
    """The source of batches."""

    def read(self, progress: Progress) -> Iterator[tuple[Sequence[Mark], Any]]:
        """Yield the rest of the share, in batches, each with the marks of its samples."""
        ...

    def close(self) -> None:
        """End its processes."""


class _Closing:
    """Base of feeds with a `DataLoader`."""

    _batches: DataLoader[Any]

    def close(self) -> None:
        """End its processes: they end with the loop that it keeps."""
        self._batches._iterator = None


class _Batches(_Closing):
    """Batches of a dataset that is indexed."""

    def __init__(self, source: Indexed, options: Mapping[str, Any]) -> None:
        self._sampler = _Sampler(source)
        self._batches: DataLoader[Any] = DataLoader(source.dataset, batch_sampler=self._sampler, **options)

    def read(self, progress: Progress) -> Iterator[tuple[Sequence[Mark], Any]]:
        """Yield the rest of the share, in batches."""
        self._sampler.progress, self._sampler.marks = progress, deque()
        marks = self._sampler.marks
        for batch in self._batches:
            yield (marks.popleft(),), batch


class _Sampler:
    """The samples of each batch, for a `DataLoader`, which cannot be given another sampler once it is made.

    `marks` are those of the batches that it was asked for and that the loop has not got yet.
    """

    progress = Progress()
    marks: deque[Mark]

    def __init__(self, source: Indexed) -> None:
        self._source = source

    def __iter__(self) -> Iterator[list[int]]:
        marks = self.marks
        for mark, indices in self._source.batches(self.progress):
            marks.append(mark)
            yield indices


class _Items(_Closing):
    """Batches of a dataset that is not indexed."""

    def __init__(self, source: Source, batch_size: int, options: Mapping[str, Any]) -> None:
        self._reader = _Reader(source, batch_size)
        collate = _Collate(options.get("collate_fn") or default_collate)
        self._batches: DataLoader[Any] = DataLoader(
            self._reader, batch_size=batch_size, **{**options, "collate_fn": collate}
        )

    def read(self, progress: Progress) -> Iterator[tuple[Sequence[Mark], Any]]:
        """Yield the rest of the share, in batches."""
        self._reader.progress = progress
        return iter(self._batches)


class _Reader(IterableDataset[Marked]):
    """The items of the share for one process of a `DataLoader`, or for all of them."""

    progress = Progress()

    def __init__(self, source: Source, batch_size: int) -> None:
        self._source, self._batch_size = source, batch_size

    def __iter__(self) -> Iterator[Marked]:
        info = get_worker_info()
        turn = Turn(batch=self._batch_size)
        if info is not None:
            turn = Turn(info.id, info.num_workers, self._batch_size)
            if isinstance(self._source, Streamed):
                # Some datasets give each process another part. Here every process gets all, and takes its batches.
                torch_worker._worker_info = None
        return self._source.read(self.progress, turn)


class _Collate:
    """Items with marks into a batch with marks, of which each cell has its last one."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, found: list[Marked]) -> tuple[tuple[Mark, ...], Any]:
        marks = {mark.cell: mark for some, _ in found for mark in some}
        return tuple(marks.values()), self._collate([item for _, item in found])
