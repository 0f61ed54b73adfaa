"""The order of the samples of an epoch."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from unirun.values import Value

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
