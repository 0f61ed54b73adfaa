"""The order of the samples of an epoch, which rank uses which, and those that are used.

A *position* is a place in the order of an epoch, from 0. A checkpoint has one `Consumed` for each dataset, which is an
epoch and a number of samples while ranks are in step. The positions that are left of it are divided over any number of
ranks, and each counts the steps of its `Share`. `merged` makes one `Consumed` of the shares of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from unirun.errors import UsageError
from unirun.values import Value

Numbers = npt.NDArray[np.int64]

WHOLE = -1
"""In place of a number of items: all of them."""


class Consumed(Value):
    """The part of one epoch of a dataset that was used: its first `samples` positions, and some `beyond` these.

    `beyond` has each of them with the number of its items that are used, or `WHOLE`. It is empty while ranks are in
    step. Else it has what some ranks have used and others have not come to; of files, which have many items each, also
    those that are begun.
    """

    epoch: int = 0
    samples: int = 0
    beyond: dict[int, int] = {}  # noqa: RUF012 (msgspec gives each value its own)

    def whole(self) -> list[int]:
        """The positions beyond that are used whole, in ascending order."""
        return sorted(at for at, items in self.beyond.items() if items == WHOLE)

    def left(self, size: int | None) -> int | None:
        """The number of positions that are left of `size`; None if that is unknown."""
        return None if size is None else size - self.samples - len(self.whole())

    def locator(self) -> Callable[[Numbers], Numbers]:
        """The positions that are left are numbered from 0; the function returns the positions of such numbers."""
        samples = self.samples
        if not self.beyond:
            return lambda numbers: numbers + samples
        gaps = np.array(self.whole(), np.int64) - samples
        # The number of positions that are left before each of them.
        gaps -= np.arange(len(gaps))
        return lambda numbers: numbers + samples + gaps.searchsorted(numbers, side="right")


class Share(Value):
    """The part of one epoch that `rank` of `world` uses, and its first `steps`, which it has used.

    The positions that were `left` after `begin` are numbered from 0, and cut into *cells* of consecutive numbers, of
    which each has `batch` at most. The rank uses the cell ``step * world + rank`` in each step, so that
    what all ranks have used after a step is a prefix. The number of steps is the smallest possible. The sizes of cells
    differ by at most 1, and the larger ones come first.

    All ranks have the same number of steps, with two exceptions where there are not enough positions. With fewer of
    them than ranks, only the first ranks have a step. With ``batch == 1`` the last step may have positions for the
    first ranks only. `left` is None where it is unknown: then each cell has one position, and there is no end.

    `beyond` has later steps with the number of items that are used, as in `Consumed`: processes that read files for the
    rank finish them out of order. `ended` says that the loop of the rank has come to the end of the epoch.
    """

    rank: int
    world: int
    left: int | None
    begin: Consumed = Consumed()
    batch: int = 1
    steps: int = 0
    beyond: dict[int, int] = {}  # noqa: RUF012
    ended: bool = False

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0 on."""
        return self.begin.epoch

    @property
    def begun(self) -> bool:
        """True if the rank has used some of it."""
        return bool(self.steps or self.beyond)

    def total(self) -> int | None:
        """The number of its steps; None if it is unknown."""
        if self.left is None:
            return None
        return (min(self._cells(self.left), self.left) - self.rank + self.world - 1) // self.world

    def items(self, step: int) -> int:
        """The number of positions that it has from `step` on, where their number is known."""
        assert self.left is not None
        size, larger = divmod(self.left, max(self._cells(self.left), 1))
        whole = size * ((self.total() or 0) - step)
        return whole + max((larger - self.rank + self.world - 1) // self.world - step, 0)

    def numbers(self, step: int) -> Numbers:
        """The numbers in the cell of a step."""
        cell = step * self.world + self.rank
        return np.arange(self.cut(cell), self.cut(cell + 1))

    def cut(self, cell: int) -> int:
        """The number with which a cell begins."""
        if not self.left:
            return cell
        size, larger = divmod(self.left, self._cells(self.left))
        return cell * size + min(cell, larger)

    def cells(self, worker: int = 0, workers: int = 1) -> Iterator[tuple[int, Numbers]]:
        """The cells that are left of a share with a known end, by their step, with the positions of each. Process
        `worker` of `workers` has each `workers`-th one, from its own number on."""
        total, locate = self.total(), self.begin.locator()
        assert total is not None
        for step in range(self.steps + (worker - self.steps) % workers, total, workers):
            if self.beyond.get(step) != WHOLE:
                yield step, locate(self.numbers(step))

    def _cells(self, left: int) -> int:
        return -(-left // (self.world * self.batch)) * self.world


def merged(shares: Sequence[Share]) -> Consumed:
    """The part of an epoch that all ranks together have used. A rank without a share here has used none of it.

    It takes as long as ranks differ in their number of steps: with equal numbers, the same for an epoch of any size.

    Raises `UsageError` if there is none, if ranks use batches of different sizes, or if they are in different epochs
    and one has not finished the earlier one.
    """
    if not shares:
        raise UsageError("merged(): there is no share", "pass the share of every rank")
    epoch = max(share.epoch for share in shares)
    for each in shares:
        if each.epoch < epoch and not (
            each.epoch == epoch - 1 and (each.ended or each.steps == each.total())
        ):
            raise UsageError(
                f"a rank is in epoch {epoch} of a dataset, another is still in epoch {each.epoch}",
                "save checkpoints when all ranks have done the same step",
            )
    if all(each.ended and each.epoch == epoch for each in shares):
        return Consumed(epoch + 1)
    current = [share for share in shares if share.epoch == epoch]
    return _union([share for share in current if share.begun] or current[:1])


def _union(shares: Sequence[Share]) -> Consumed:
    first = shares[0]
    if sizes := sorted({share.batch for share in shares} - {first.batch}):
        raise UsageError(
            f"ranks use batches of {first.batch} and of {sizes[0]} of one dataset",
            "every rank passes the same batch_size",
        )
    begin, locate = first.begin, first.begin.locator()
    # What all have done is a prefix; only the rest is looked at one by one.
    common = min(share.steps for share in shares) if len(shares) == first.world else 0
    samples = int(locate(np.array([first.cut(common * first.world)]))[0])
    beyond = {at: items for at, items in begin.beyond.items() if at >= samples}
    for share in shares:
        used = [(step, WHOLE) for step in range(common, share.steps)]
        for step, items in [*used, *share.beyond.items()]:
            beyond.update(dict.fromkeys(locate(share.numbers(step)).tolist(), items))
    while beyond.get(samples) == WHOLE:
        del beyond[samples]
        samples += 1
    return Consumed(begin.epoch, samples, beyond)


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
        slot = int(begins.searchsorted(start, side="right")) - 1
        while start < stop:
            begin, end = int(begins[slot]), int(begins[slot + 1])
            number = int(blocks[slot])
            within = _within(self.seed, self.epoch, number, end - begin)
            found.append(number * self.block + within[start - begin : stop - begin])
            start, slot = end, slot + 1
        if len(found) == 1:
            return found[0]
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
