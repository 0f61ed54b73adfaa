"""One rank's part of one dataset, and how far it has come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from unirun.errors import UsageError
from unirun.train.data.loader import Loader
from unirun.train.data.order import BLOCK
from unirun.train.data.plan import Progress
from unirun.train.data.sources import Indexed, Mark, check_number, source_of

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
