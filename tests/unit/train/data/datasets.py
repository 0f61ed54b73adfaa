"""Datasets, and all ranks of one in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import fsspec
import msgspec
from torch.utils.data import IterableDataset, get_worker_info

from unirun.train.data import Consumed, Files, Share, merged
from unirun.train.data.loader import Shard
from unirun.train.data.sources import Marked


class NumberStream(IterableDataset[int]):
    """The first numbers. It gives each process of a `DataLoader` another part, as torch's documentation proposes."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.n) if info is None else range(info.id, self.n, info.num_workers))


class SkippingNumbers:
    """The first numbers, backwards in odd epochs. As one of Hugging Face, what it returns from `skip` knows no epoch."""

    def __init__(self, n: int) -> None:
        self.n, self.epoch, self.skipped = n, 0, list[int]()

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n)[:: -1 if self.epoch % 2 else 1])

    def skip(self, n: int) -> Sequence[int]:
        self.skipped.append(n)
        return range(n, self.n)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def in_files(lengths: Sequence[int], folder: str) -> Files:
    """Files with so many lines, which are numbered over all of them; in memory, below `folder`."""
    paths, number = [], 0
    for file, length in enumerate(lengths):
        paths.append(f"memory://{folder}/{file}.txt")
        with fsspec.open(paths[-1], "w") as out:
            out.write("".join(f"{each}\n" for each in range(number, number + length)))
        number += length
    return Files(paths)


def stored(shards: Sequence[Shard]) -> Consumed:
    """The part that these ranks have used, as a checkpoint gives it when it is read again."""
    written = [msgspec.json.encode(shard.progress) for shard in shards]
    found = merged([msgspec.json.decode(each, type=Share) for each in written])
    return msgspec.json.decode(msgspec.json.encode(found), type=Consumed)


def as_processes(shard: Shard, workers: int, batch: int) -> Iterator[Any]:
    """Items of what is not indexed, in the order in which so many processes of a `DataLoader` give batches of them."""

    def read(share: Share) -> Iterator[Marked]:
        turns = [shard.source.read(share, worker, workers, batch) for worker in range(workers)]
        while turns:
            for turn in [*turns]:
                batched = [*itertools.islice(turn, batch)]
                yield from batched
                if not batched:
                    turns.remove(turn)

    return shard.consume(1, read)


def numbers(got: Any) -> list[int]:
    """The samples in an item or in a batch, which are numbers or their text."""
    if isinstance(got, str):
        return [int(got)]
    return [got] if isinstance(got, int) else [int(each) for each in got]
