"""Batches of a rank's part of a dataset, which a `torch.utils.data.DataLoader` makes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

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
)

from unirun.errors import UsageError
from unirun.train.data.plan import BLOCK, WHOLE, Consumed, Share
from unirun.train.data.sources import DataSource, Marked, check_number, source_of
from unirun.train.familiar import SHARDS, elsewhere

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
        # The samples of a dataset that is not indexed are not known beforehand, so they are split one by one.
        self._batch = batch_size if source.indexed else 1
        if source.indexed:
            # torch takes what can be iterated, though its types ask for a sampler.
            options = {**options, "batch_sampler": source}
            self._batches: DataLoader[Any] = DataLoader(source.dataset, **options)
        else:
            collate = partial(_collated, options.get("collate_fn") or default_collate)
            options = {**options, "collate_fn": collate}
            self._batches = DataLoader(source, batch_size, **options)

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
        return self.shard.consume(self._batch, self._read)

    def _read(self, share: Share) -> Iterator[Marked]:
        # A `DataLoader` cannot be given another dataset or sampler once it is made.
        self.shard.source.begin(share, self._size)
        if not self.shard.source.indexed:
            yield from self._batches
            return
        for step, batch in enumerate(self._batches, share.steps):
            yield ((step, WHOLE),), batch

    def close(self) -> None:
        """End its processes, which may have been kept from loop to loop (``persistent_workers``): they end with the
        loop that the `DataLoader` keeps."""
        self._batches._iterator = None

    def __len__(self) -> int:
        """The number of batches of the next loop, or of the one that goes on. Raises TypeError if it is unknown."""
        share = self.shard.upcoming(self._batch)
        steps = share.total()
        if steps is None or not self.shard.source.indexed:
            raise TypeError(
                f"dataset {self.shard.name!r} has no length: how many batches it has is known at its end"
            )
        return steps - self.shard.first(share.steps)


def _check_options(name: str, options: Mapping[str, Any], source: DataSource) -> None:
    for option in options.keys() & _OURS.keys():
        raise UsageError(f"dataset {name!r}: option {option!r} of a DataLoader", _OURS[option])
    if not options.get("in_order", True):
        raise UsageError(
            f"dataset {name!r}: in_order=False",
            "leave it out: batches are counted in their order, so that a job can be resumed",
        )
    if options.get("persistent_workers") and not source.indexed:
        raise UsageError(
            f"dataset {name!r}: persistent_workers=True, with a dataset that is not indexed",
            "leave it out: each epoch needs processes that begin at its position",
        )


def _collated(collate: Callable[[list[Any]], Any], found: list[Marked]) -> Marked:
    """Items with marks as a batch with the last mark of each step."""
    marks = dict(mark for some, _ in found for mark in some)
    return (*marks.items(),), collate([item for _, item in found])


# One rank's part of one dataset, and how far it has come.

BEGIN = Consumed()
"""Nothing is used."""


class Shard:
    """The part of the dataset `name` that `rank` of `world` has.

    ::

        shard = Shard("train", dataset, rank, world, shuffle=True, consumed=merged(saved))
        for epoch in range(shard.progress.epoch, 3):
            for item in shard:
                ...
                save(shard.progress)  # this item is consumed

    A ``for`` goes on where the last one was left, up to the end of the epoch; the one after that is the next epoch. An
    item, or a batch of a `Loader`, is consumed when it is handed out, so what is saved in the body of the loop has it.
    What a `DataLoader` has read ahead is not consumed.

    `dataset` is a map-style dataset, one that can only be iterated, or `Files`. All ranks pass the same one, with the
    same `shuffle`, `seed` and `block`, and pass them again when they resume: with others, the positions of `consumed`
    would be other samples. With `shuffle`, blocks of `block` consecutive samples and the samples in each are in a new
    order in each epoch. `consumed` is what all ranks had consumed (`merged`). `waited` has the seconds, in all, for
    which loops over the shard and its loaders have waited for data by `clock`.

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
        consumed: Consumed = BEGIN,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        least = {"rank": 0, "world": 1, "seed": 0, "block": 1}
        for argument, value in (("rank", rank), ("world", world), ("seed", seed), ("block", block)):
            check_number(f"dataset {name!r}: {argument}", value, least[argument])
        if rank >= world:
            raise UsageError(f"dataset {name!r}: there is no rank {rank} of {world}", "ranks begin at 0")
        self.name, self.rank, self.world = name, rank, world
        self.source = source_of(name, dataset, shuffle=shuffle, seed=seed, block=block)
        size = self.source.size
        if size is not None and max(consumed.samples, *(at + 1 for at in consumed.beyond), 0) > size:
            raise UsageError(
                f"dataset {name!r}: the progress is of a dataset of another size than {size}",
                "pass the dataset with which the job began; or begin anew, in Trainer.run with a dict as the "
                "checkpoint",
            )
        self.waited = 0.0
        self._clock = clock
        # The number of the latest loop; an earlier one must not go on beside it.
        self._loop = 0
        # With how many steps consumed the loop that is under way has begun.
        self._first: int | None = None
        self._begin(self._share_of(consumed))

    def _share_of(self, consumed: Consumed, batch: int = 1) -> Share:
        return Share(self.rank, self.world, consumed.left(self.source.size), consumed, batch)

    def _begin(self, share: Share) -> None:
        # What changes with each step is kept outside of it.
        self._share = share
        self._steps, self._beyond, self._ended = share.steps, dict(share.beyond), share.ended
        self._loop += 1

    def __iter__(self) -> Iterator[Any]:
        """The items of this rank that are left of the epoch.

        Raises `UsageError` if a part of the epoch was consumed in batches, as these are split in another way.
        """
        return self.consume(1, self.source.read)

    def __len__(self) -> int:
        """The number of items of the next loop, or of the one that is under way. Raises TypeError if it is unknown."""
        if not self.source.indexed:
            raise TypeError(f"dataset {self.name!r} has no length: how many items it has is known at its end")
        share = self.upcoming(1 if self._ended else self._share.batch)
        return share.items(self.first(share.steps))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(elsewhere("a shard", name, SHARDS))

    def to_torch(self, batch_size: int, **options: Any) -> Loader:
        """Batches of a `torch.utils.data.DataLoader` with these options (``num_workers``, ``collate_fn``, …).

        Batches have `batch_size` items at most. All ranks have the same number of batches (`Share`): where the samples
        do not fill them, some have one sample less. Of a dataset that can only be iterated, and of files, only the last
        ones are smaller, and ranks may have different numbers of batches.

        Raises `UsageError` for options that say which samples a batch has, as that is what the shard says.
        """
        return Loader(self, batch_size, options)

    @property
    def progress(self) -> Share:
        """The number of the epoch, and what of it this rank has consumed."""
        return replace(self._share, steps=self._steps, beyond=dict(self._beyond), ended=self._ended)

    def upcoming(self, batch: int) -> Share:
        """The share with which the next loop begins, in steps of `batch`. Changes nothing.

        Raises `UsageError` if a part of the epoch was consumed in steps of another size.
        """
        share = self.progress
        if share.ended:
            return self._share_of(Consumed(share.epoch + 1), batch)
        if share.batch != batch and share.begun:
            raise UsageError(
                f"dataset {self.name!r}: batches of {batch} in an epoch that was begun with batches of {share.batch}",
                "finish the epoch with these",
            )
        return replace(share, batch=batch)

    def first(self, count: int) -> int:
        """With how many steps consumed the loop that is under way has begun; `count` without one."""
        return count if self._first is None else self._first

    def consume(self, batch: int, read: Callable[[Share], Iterator[Marked]]) -> Iterator[Any]:
        """Yield the rest of the epoch from `read`, in steps of `batch`; each is counted when it is handed out."""
        share = self.upcoming(batch)
        self._begin(share)
        self._first = share.steps
        loop, found = self._loop, read(share)
        try:
            while True:
                since = self._clock()
                pair = next(found, None)
                self.waited += self._clock() - since
                if loop != self._loop:
                    raise UsageError(
                        f"dataset {self.name!r}: this loop goes on after another one began",
                        "leave it, and begin a new one",
                    )
                if pair is None:
                    self._ended = True
                    return
                marks, item = pair
                self._beyond.update(marks)
                while self._beyond.get(self._steps) == WHOLE:
                    del self._beyond[self._steps]
                    self._steps += 1
                yield item
        finally:
            if loop == self._loop:
                self._first = None


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
    loader: DataLoader[Any], name: str, rank: int, world: int, *, seed: int = 0, consumed: Consumed = BEGIN
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
        options["collate_fn"] = partial(_single, options["collate_fn"])
    if type(batches) is not BatchSampler:
        kind = type(batches).__name__
        raise _refused(name, f"the batch sampler {kind}", "pass batch_size to the DataLoader instead")
    if batches.drop_last:
        raise _refused(name, "drop_last=True", "leave it out: the sizes of batches differ by 1 at most")
    shuffle, seed = _order(name, loader.dataset, batches.sampler, seed)
    shard = Shard(name, loader.dataset, rank, world, shuffle=shuffle, seed=seed, consumed=consumed)
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


def _single(convert: Callable[[Any], Any], items: list[Any]) -> Any:
    """The only item of a batch, as a `DataLoader` without batches gives it."""
    (item,) = items
    return convert(item)
