"""Batches of a rank's part of a dataset, which a `torch.utils.data.DataLoader` makes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch.utils.data._utils.worker as torch_worker
from msgspec.structs import replace
from torch import Generator
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    get_worker_info,
)

from unirun.errors import UsageError
from unirun.train.data.plan import BLOCK, Progress
from unirun.train.data.sources import (
    DataSource,
    Indexed,
    LoaderSlice,
    Mark,
    Marked,
    Streamed,
    check_number,
    source_of,
)

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


def _check_options(name: str, options: Mapping[str, Any], source: DataSource) -> None:
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

    def __init__(self, source: DataSource, batch_size: int, options: Mapping[str, Any]) -> None:
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

    def __init__(self, source: DataSource, batch_size: int) -> None:
        self._source, self._batch_size = source, batch_size

    def __iter__(self) -> Iterator[Marked]:
        info = get_worker_info()
        turn = LoaderSlice(batch=self._batch_size)
        if info is not None:
            turn = LoaderSlice(info.id, info.num_workers, self._batch_size)
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


# One rank's part of one dataset, and how far it has come.

BEGIN = Progress()
"""Nothing is consumed."""

Read = Callable[[Progress], Iterator[tuple[Sequence[Mark], Any]]]


class Shard:
    """The part of the dataset `name` that `rank` of `world` has.

    ::

        shard = Shard("train", dataset, rank, world, shuffle=True, progress=merged(saved))
        for epoch in range(shard.progress.epoch, 3):
            for item in shard:
                ...
                save(shard.progress)  # this item is consumed

    A ``for`` goes on where the last one was left, up to the end of the epoch; the one after that is the next epoch. An
    item, or a batch of a `Loader`, is consumed when it is handed out, so what is saved in the body of the loop has it.
    What a `DataLoader` has read ahead is not consumed.

    `dataset` is a map-style dataset, one that can only be iterated, or `Files`. All ranks pass the same one, with the
    same `shuffle`, `seed` and `block`, and pass them again when they resume: with others, the positions of `progress`
    would be other samples. With `shuffle`, blocks of `block` consecutive samples and the samples in each are in a new
    order in each epoch. `progress` is what all ranks had consumed (`merged`), or this rank's own. `waited` has the
    seconds, in all, for which loops over the shard and its loaders have waited for data by `clock`.

    Raises `UsageError` if an argument is wrong.
    """

    def __init__(
        self,
        name: str,
        dataset: Any,
        rank: int,
        world: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        block: int = BLOCK,
        progress: Progress = BEGIN,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        least = {"rank": 0, "world": 1, "seed": 0, "block": 1}
        for argument, value in (("rank", rank), ("world", world), ("seed", seed), ("block", block)):
            check_number(f"dataset {name!r}: {argument}", value, least[argument])
        if rank >= world:
            raise UsageError(f"dataset {name!r}: there is no rank {rank} of {world}", "ranks begin at 0")
        self.name, self.rank, self.world = name, rank, world
        self.source = source_of(name, dataset, shuffle=shuffle, seed=seed, block=block)
        self.waited = 0.0
        self._clock = clock
        # The number of the latest loop; an earlier one must not go on beside it.
        self._loop = 0
        # With how many steps consumed the loop that is under way has begun.
        self._first: int | None = None
        self.restore(progress)

    def __iter__(self) -> Iterator[Any]:
        """The items of this rank that are left of the epoch.

        Raises `UsageError` if a part of the epoch was consumed in batches, as these are split in another way.
        """
        return self.consume(1, self.source.read)

    def __len__(self) -> int:
        """The number of items of the next loop, or of the one that is under way. Raises TypeError if it is unknown."""
        share = self._share
        upcoming = self.upcoming(1 if share is None or self._ended else share.split.batch).share
        items = upcoming.split.items(self.rank, self.first(upcoming.count)) if upcoming is not None else None
        if items is None or not isinstance(self.source, Indexed):
            raise TypeError(f"dataset {self.name!r} has no length: how many items it has is known at its end")
        return items

    def to_torch(self, batch_size: int, **options: Any) -> Loader:
        """Batches of a `torch.utils.data.DataLoader` with these options (``num_workers``, ``collate_fn``, …).

        Batches have `batch_size` items at most. All ranks have the same number of batches (`Split`): where the samples
        do not fill them, some have one sample less. Of a dataset that can only be iterated, and of files, only the last
        ones are smaller, and ranks may have different numbers of batches.

        Raises `UsageError` for options that say which samples a batch has, as that is what the shard says.
        """
        return Loader(self, batch_size, options)

    @property
    def progress(self) -> Progress:
        """The consumed part of this rank's epoch, with its share."""
        return replace(self._base, partial=dict(self._partial), share=self._share, ended=self._ended)

    def restore(self, progress: Progress) -> None:
        """Go on from `progress`: of all ranks (`merged`), or of this rank of as many as there are now.

        A loop that is under way raises `UsageError` when it goes on. Raises `UsageError` if this is the progress of
        another rank, or of a dataset of another size.
        """
        if not isinstance(progress, Progress):
            raise UsageError(
                f"dataset {self.name!r}: the progress is a {type(progress).__name__}",
                "pass a Progress; msgspec.json.decode(data, type=Progress) reads one",
            )
        share, size = progress.share, self.source.size
        if share is not None and (share.rank, share.split.world) != (self.rank, self.world):
            raise UsageError(
                f"dataset {self.name!r}: rank {self.rank} of {self.world} got the progress of rank {share.rank} of "
                f"{share.split.world}",
                "pass merged() of the progress of all ranks",
            )
        consumed = progress.ahead[-1] + 1 if progress.ahead else progress.prefix
        if (size is not None and consumed > size) or (
            share is not None and share.split.left != progress.left(size)
        ):
            raise UsageError(
                f"dataset {self.name!r}: the progress is of a dataset of another size"
                + ("" if size is None else f" than {size}"),
                "pass the dataset with which the job began; or begin anew, with Progress(), in Trainer.run with a dict "
                "as the checkpoint",
            )
        self._set(Progress(progress.epoch + 1) if progress.ended else progress)

    def upcoming(self, batch: int) -> Progress:
        """The progress with which the next loop begins, with this rank's share in steps of `batch`. Changes nothing.

        Raises `UsageError` if a part of the epoch was consumed in steps of another size.
        """
        progress = Progress(self._base.epoch + 1) if self._ended else self.progress
        share = progress.share
        if share is None or not (share.count or share.apart):
            return progress.split(self.rank, self.world, batch, self.source.size)
        if share.split.batch != batch:
            raise UsageError(
                f"dataset {self.name!r}: batches of {batch} in an epoch that was begun with batches of "
                f"{share.split.batch}",
                "finish the epoch with these, or restore() what all ranks have consumed (merged)",
            )
        return progress

    def first(self, count: int) -> int:
        """With how many steps consumed the loop that is under way has begun; `count` without one."""
        return count if self._first is None else self._first

    def consume(self, batch: int, read: Read) -> Iterator[Any]:
        """Yield the rest of the epoch from `read`, in steps of `batch`; each is counted when it is handed out."""
        progress = self.upcoming(batch)
        self._set(progress)
        assert self._share is not None
        self._first = self._share.count
        loop, found = self._loop, read(progress)
        try:
            while True:
                since = self._clock()
                pair = next(found, None)
                self.waited += self._clock() - since
                if loop != self._loop:
                    raise UsageError(
                        f"dataset {self.name!r}: this loop goes on after another one began, or after restore()",
                        "leave it, and begin a new one",
                    )
                if pair is None:
                    self._ended = True
                    return
                marks, item = pair
                self._took(marks)
                yield item
        finally:
            if loop == self._loop:
                self._first = None

    def _set(self, progress: Progress) -> None:
        self._base = replace(progress, partial={}, share=None)
        self._partial, self._share = dict(progress.partial), progress.share
        self._ended, self._first = False, None
        self._loop += 1

    def _took(self, marks: Sequence[Mark]) -> None:
        for mark in marks:
            if mark.whole:
                self._partial.pop(mark.position, None)
            else:
                self._partial[mark.position] = mark.items
        assert self._share is not None
        self._share = self._share.took([mark.cell for mark in marks if mark.whole])


# A user's `DataLoader` as the loader of one rank's part.

_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def sharded(
    loader: DataLoader[Any], name: str, rank: int, world: int, *, seed: int = 0, progress: Progress = BEGIN
) -> Loader:
    """The part that `rank` of `world` has of the dataset of `loader`, in batches of its size, made as it makes them.

    It shuffles if `loader` does, in the order of `seed`, which is the same on all ranks. A `DistributedSampler` is
    replaced: its `shuffle` and its seed are kept, what it pads or drops is not. Of a loader with ``batch_size=None``
    each item is a batch.

    Raises `UsageError` for what cannot be split so that each sample is used once: another sampler or batch sampler, and
    ``drop_last``.
    """
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"dataset {name!r}: expected a DataLoader, found a {type(loader).__name__}", "use Shard"
        )
    options = {option: getattr(loader, option) for option in _KEPT}
    # `loader.batch_size` is None too when a batch sampler was passed.
    batches: Any = loader.batch_sampler
    if batches is None:
        batches = BatchSampler(loader.sampler, 1, drop_last=False)
        options["collate_fn"] = _Single(options["collate_fn"])
    if type(batches) is not BatchSampler:
        kind = type(batches).__name__
        raise _refused(name, f"the batch sampler {kind}", "pass batch_size to the DataLoader instead")
    if batches.drop_last:
        raise _refused(name, "drop_last=True", "leave it out: the sizes of batches differ by 1 at most")
    shuffle, seed = _order(name, loader.dataset, batches.sampler, seed)
    shard = Shard(name, loader.dataset, rank, world, shuffle=shuffle, seed=seed, progress=progress)
    return Loader(shard, batches.batch_size, options)


def _order(name: str, dataset: Any, sampler: Any, seed: int) -> tuple[bool, int]:
    """True if the sampler shuffles, and its seed."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return False, seed
    size = len(dataset)
    if type(sampler) is SequentialSampler and len(sampler) == size:
        return False, seed
    if type(sampler) is RandomSampler and len(sampler) == size and not sampler.replacement:
        return True, seed
    if type(sampler) is DistributedSampler and len(sampler.dataset) == size:  # type: ignore[arg-type]
        return sampler.shuffle, sampler.seed
    raise _refused(
        name,
        f"the sampler {type(sampler).__name__}, which may use a sample twice or not at all",
        "pass shuffle to the DataLoader instead, and torch.utils.data.Subset to use some of the samples",
    )


def _refused(name: str, what: str, remedy: str) -> UsageError:
    return UsageError(f"dataset {name!r}: the DataLoader has {what}", remedy)


class _Single:
    """The only item of a batch, as a `DataLoader` without batches gives it."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert

    def __call__(self, items: list[Any]) -> Any:
        (item,) = items
        return self._convert(item)
