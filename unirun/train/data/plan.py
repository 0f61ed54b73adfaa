"""The order of the samples of an epoch, which rank consumes which, and those that are consumed.

A *position* is a place in the order of an epoch, from 0. What is left of an epoch when ranks begin is *split* over
them, and each counts what it has consumed of its *share*. `merged` makes one `Progress` of those of all ranks; from it
any number of ranks can go on, and each position is consumed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from unirun.errors import UsageError
from unirun.values import Value

Numbers = npt.NDArray[np.int64]

POSITIONS = 4096
"""Positions of a share that are computed at a time: numpy takes as long for one."""


class Split(Value):
    """The division of the `left` positions of an epoch over `world` ranks, `batch` of them per rank and step
    at most.

    The positions that are left are numbered from 0, and cut into *cells* of consecutive numbers. Rank `r` consumes the
    cell ``step * world + r`` in each step, so that what all ranks have consumed after a step is a prefix. The number of
    steps is the smallest possible. The sizes of cells differ by at most 1, and the larger ones come first.

    All ranks have the same number of steps, with two exceptions where there are not enough positions. With ``left <
    world`` only the first `left` ranks have a step. With ``batch == 1`` the last step may have positions for the first
    ranks only.

    `left` is None where it is unknown: then each cell has one position, and there is no end.
    """

    left: int | None
    world: int
    batch: int = 1

    def steps(self, rank: int) -> int | None:
        """The number of steps in which this rank has something; None if it is unknown."""
        if self.left is None:
            return None
        filled = min(self._cells(self.left), self.left)
        return (filled - rank + self.world - 1) // self.world

    def items(self, rank: int, begin: int) -> int | None:
        """The number of positions that this rank has from its step `begin` on; None if it is unknown."""
        steps = self.steps(rank)
        if self.left is None or steps is None:
            return None
        size, larger = divmod(self.left, max(self._cells(self.left), 1))
        return size * (steps - begin) + max((larger - rank + self.world - 1) // self.world - begin, 0)

    def cuts(self, cells: Numbers) -> Numbers:
        """The number with which each of `cells` begins, which is where the one before ends."""
        if not self.left:
            return cells
        size, larger = divmod(self.left, self._cells(self.left))
        return cells * size + np.minimum(cells, larger)

    def numbers(self, cells: Numbers) -> Numbers:
        """All numbers in `cells`, one cell after the other."""
        begins = self.cuts(cells)
        sizes = self.cuts(cells + 1) - begins
        before = np.cumsum(sizes) - sizes
        return np.repeat(begins - before, sizes) + np.arange(sizes.sum())

    def _cells(self, left: int) -> int:
        return -(-left // (self.world * self.batch)) * self.world


class Share(Value):
    """The positions that `rank` has consumed since the epoch was split: its first `count` cells, and those in
    `apart`, which ascend.

    Its cells are numbered by their step. Cells are apart when the processes that read files for a rank finish them out
    of order.
    """

    rank: int
    split: Split
    count: int = 0
    apart: tuple[int, ...] = ()

    def took(self, cells: Sequence[int]) -> Share:
        """The same share after `cells` of it."""
        if not cells:
            return self
        if not self.apart and len(cells) == 1 and cells[0] == self.count:
            return Share(self.rank, self.split, self.count + 1)
        return Share(self.rank, self.split, *_advance(self.count, [*self.apart, *cells]))

    @property
    def whole(self) -> bool:
        """All of it is consumed, and is known to be all."""
        return self.count == self.split.steps(self.rank)


class Progress(Value):
    """The consumed part of one epoch of a dataset. It is part of a checkpoint: `msgspec.json` writes and reads it.

    Consumed are the first `prefix` positions of the epoch, those in `ahead`, which ascend, and of the position of a
    file, which has many items, as many items as `partial` has for it. One rank's progress has its `share` too, which
    begins after these positions; it stays as small as it is, whatever the epoch's size. `ended` says that the rank has
    seen the end of the epoch, so the next one begins now.
    """

    epoch: int = 0
    prefix: int = 0
    ahead: tuple[int, ...] = ()
    partial: dict[int, int] = {}  # noqa: RUF012 (msgspec gives each value its own)
    share: Share | None = None
    ended: bool = False

    def left(self, size: int | None) -> int | None:
        """The number of positions that were left of `size` when the epoch was split; None if it is unknown."""
        return None if size is None else size - self.prefix - len(self.ahead)

    def consume(self, positions: Iterable[int]) -> Progress:
        """The same progress after these positions too. They may be in any order, and consumed already."""
        prefix, ahead = _advance(self.prefix, [*self.ahead, *positions])
        partial = _without(self.partial, prefix, ahead)
        return replace(self, prefix=prefix, ahead=ahead, partial=partial)

    def split(self, rank: int, world: int, batch: int, size: int | None) -> Progress:
        """The progress of `rank` of `world`, which has consumed nothing of its share yet."""
        return replace(self, share=Share(rank, Split(self.left(size), world, batch)))

    def positions(self, numbers: Numbers) -> Numbers:
        """The positions of the numbers that a `Split` gives to those that are left."""
        return _positions(self.prefix, _gaps(self.prefix, self.ahead), numbers)

    def cells(self) -> Iterator[tuple[int, Numbers]]:
        """The cells that are left of a share with a known end, by their step, with the positions of each."""
        assert self.share is not None
        rank, split = self.share.rank, self.share.split
        steps, apart = split.steps(rank), set(self.share.apart)
        assert steps is not None
        gaps = _gaps(self.prefix, self.ahead)
        at_once = max(POSITIONS // split.batch, 1)
        for first in range(self.share.count, steps, at_once):
            some = np.arange(first, min(first + at_once, steps))
            cells = some * split.world + rank
            positions = _positions(self.prefix, gaps, split.numbers(cells))
            ends = np.cumsum(split.cuts(cells + 1) - split.cuts(cells)).tolist()
            for step, begin, end in zip(some.tolist(), [0, *ends], ends, strict=False):
                if step not in apart:
                    yield step, positions[begin:end]


def merged(progresses: Iterable[Progress]) -> Progress:
    """The progress of all ranks together, from the progress of each: their union.

    Pass those that belong to one checkpoint, as each rank's has its own share only. It takes as long as ranks differ in
    their number of steps: with equal numbers, the same for an epoch of any size. What a missing rank has consumed is
    consumed again.

    Raises `UsageError` if there is none, or if ranks are in different epochs and one has not finished the earlier one.
    """
    found = tuple(progresses)
    if not found:
        raise UsageError("merged(): there is no progress", "pass the progress of every rank")
    latest = max(each.epoch for each in found)
    behind = [each for each in found if each.epoch < latest]
    for each in behind:
        if each.epoch < latest - 1 or not (each.ended or (each.share is not None and each.share.whole)):
            raise UsageError(
                f"merged(): a rank is in epoch {latest}, another is still in epoch {each.epoch}",
                "take the progress of all ranks after the same step",
            )
    if not behind and all(each.ended for each in found):
        return Progress(latest + 1)
    return _union(latest, [each for each in found if each.epoch == latest])


def _union(epoch: int, found: Sequence[Progress]) -> Progress:
    prefix = max(each.prefix for each in found)
    ahead = {position for each in found for position in each.ahead}
    shares: dict[tuple[int, tuple[int, ...], Split], list[Share]] = {}
    for each in found:
        if each.share is not None:
            shares.setdefault((each.prefix, each.ahead, each.share.split), []).append(each.share)
    for (base, skipped, split), some in shares.items():
        counts = dict.fromkeys(range(split.world), 0)
        for share in some:
            counts[share.rank] = max(counts[share.rank], share.count)
        # What all have done is a prefix; only the rest is looked at one by one.
        common = min(counts.values())
        steps = [np.arange(common, count) * split.world + rank for rank, count in counts.items()]
        steps += [np.array(share.apart, np.int64) * split.world + share.rank for share in some]
        gaps = _gaps(base, skipped)
        begin = split.cuts(np.array([common * split.world]))
        prefix = max(prefix, int(_positions(base, gaps, begin)[0]))
        ahead.update(_positions(base, gaps, split.numbers(np.concatenate(steps))).tolist())
    partial: dict[int, int] = {}
    for each in found:
        for position, items in each.partial.items():
            partial[position] = max(items, partial.get(position, 0))
    return Progress(epoch, prefix, (), partial).consume(ahead)


def _advance(prefix: int, ahead: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """The same numbers with the longest prefix, and those beyond it, sorted."""
    found = np.unique(np.array(ahead, np.int64))
    found = found[found >= prefix]
    joined = int(np.cumprod(found == prefix + np.arange(len(found))).sum())
    return prefix + joined, tuple(found[joined:].tolist())


def _without(partial: dict[int, int], prefix: int, ahead: tuple[int, ...]) -> dict[int, int]:
    """The positions that are begun, without those that are consumed whole."""
    whole = set(ahead) if partial else ()
    return {at: items for at, items in partial.items() if at >= prefix and at not in whole}


def _gaps(prefix: int, ahead: tuple[int, ...]) -> Numbers:
    """The number of positions that are left before each of `ahead`."""
    return np.array(ahead, np.int64) - prefix - np.arange(len(ahead))


def _positions(prefix: int, gaps: Numbers, numbers: Numbers) -> Numbers:
    return prefix + numbers + np.searchsorted(gaps, numbers, side="right")


# The order of the samples of an epoch.

BLOCK = 1024
"""Samples that follow each other in the dataset stay together in blocks of so many: reading is nearly sequential."""


class SampleOrder(Value):
    """A permutation of ``range(n)``, the identity without `shuffle`.

    Blocks of `block` consecutive samples are permuted, and within each block its samples, both by `seed` and `epoch`,
    which are not negative. The same arguments give the same order on every machine and with every version of numpy.
    It needs memory for two numbers per block, and for one block.
    """

    n: int
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True
    block: int = BLOCK

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The samples at the positions from `start` up to `stop`, which is not included and at most `n`."""
        if not self.shuffle:
            return np.arange(start, stop)
        blocks, begins = _blocks(self.n, self.seed, self.epoch, self.block)
        found = []
        slot = int(np.searchsorted(begins, start, side="right")) - 1
        while start < stop:
            begin, end = int(begins[slot]), int(begins[slot + 1])
            number = int(blocks[slot])
            within = _within(self.seed, self.epoch, number, end - begin)
            found.append(number * self.block + within[start - begin : stop - begin])
            start, slot = end, slot + 1
        return np.concatenate(found) if found else np.empty(0, np.int64)


# One for training and one for validation, each in the epoch that ends and the one that begins.
@lru_cache(maxsize=4)
def _blocks(n: int, seed: int, epoch: int, block: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The blocks as they follow each other, and the position at which each begins, with `n` as the last."""
    count = -(-n // block)
    blocks = _permutation(count, seed, epoch, 0)
    sizes = np.full(count, block)
    sizes[blocks == count - 1] = n - (count - 1) * block
    return blocks, np.concatenate([[0], np.cumsum(sizes)])


# Folds are read in an order of their own, so in more than one block at a time.
@lru_cache(maxsize=64)
def _within(seed: int, epoch: int, number: int, size: int) -> npt.NDArray[np.int64]:
    return _permutation(size, seed, epoch, number + 1)


def _permutation(size: int, seed: int, epoch: int, stream: int) -> npt.NDArray[np.int64]:
    # Not `Generator.permutation`: numpy keeps the bits of its bit generators for ever, but not what it draws from them
    # (NEP 19), and an epoch may be resumed with another version.
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch, stream))).random_raw(size)
    return np.argsort(bits, kind="stable")
