"""The kinds of datasets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.unit.train.data.datasets import NumberStream, SkippingNumbers, in_files, stored
from unirun.errors import UsageError
from unirun.train.data import Consumed, Files, Share
from unirun.train.data.loader import Shard
from unirun.train.data.plan import WHOLE


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        assert type(index) is int
        return index * index


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Sized(IterableDataset[int]):
    """It has a length, and inherits that it is indexed, which it is not."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter((7, 8, 9))


class Again:
    def __iter__(self) -> Iterator[str]:
        return iter("abc")


@pytest.mark.parametrize(
    ("dataset", "items"),
    [
        ([3, 1, 2], [3, 1, 2]),
        ((3, 1, 2), [3, 1, 2]),
        (range(4), [0, 1, 2, 3]),
        (np.array([3, 1]), [3, 1]),
        (torch.tensor([3, 1]), [3, 1]),
        (Squares(), [0, 1, 4, 9, 16]),
        (NumberStream(3), [0, 1, 2]),
        (Sized(), [7, 8, 9]),
        (Again(), ["a", "b", "c"]),
        ([], []),
        (NumberStream(0), []),
    ],
)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_each_item_is_for_one_rank_in_each_epoch(dataset: Any, items: list[Any], world: int) -> None:
    shards = [Shard("train", dataset, rank, world) for rank in range(world)]
    for _ in range(2):
        parts = [[*shard] for shard in shards]
        assert parts == [items[rank::world] for rank in range(world)]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("data.txt", "a str is text; read it first, or pass Files"),
        ({"train": [1]}, r"a dict has names instead of positions; .*dataset\['train'\]"),
        ({1, 2}, r"a set has no order .*; pass sorted\(...\) of it"),
        (iter([1]), "a list_iterator can be read only once; pass an object whose __iter__ begins anew"),
        ((n for n in range(3)), "a generator can be read only once"),
        (DataLoader(Squares()), r"a DataLoader makes batches already; pass it to sharded\(\)"),
        (Endless(), "Endless cannot be iterated, and is not indexed or has no length; give it __len__"),
        (None, "a NoneType cannot be iterated"),
    ],
)
def test_what_is_no_dataset_is_refused_by_name(dataset: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"dataset 'train': .*{message}"):
        Shard("train", dataset, 0, 1)


def test_a_dataset_without_a_length_cannot_be_shuffled() -> None:
    with pytest.raises(
        UsageError, match="dataset 'train': a NumberStream has no length.*; pass shuffle=False"
    ):
        Shard("train", NumberStream(3), 0, 1, shuffle=True)


def test_what_is_consumed_is_skipped_where_a_dataset_can_skip() -> None:
    dataset = SkippingNumbers(10)
    assert [*Shard("train", dataset, 1, 2, consumed=Consumed(samples=4, beyond={6: WHOLE}))] == [5, 8]
    assert dataset.skipped == [5]


def test_what_is_consumed_is_read_again_in_an_epoch_that_skipping_does_not_know() -> None:
    dataset = SkippingNumbers(10)
    assert [*Shard("train", dataset, 1, 2, consumed=Consumed(3, samples=4, beyond={6: WHOLE}))] == [4, 1]
    assert dataset.skipped == []


def test_items_are_read_in_the_order_of_the_epoch() -> None:
    shard = Shard("train", SkippingNumbers(3), 0, 1)
    assert [[*shard] for _ in range(3)] == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]


class Asking(Files):
    """Files whose items name the process that reads them."""

    def items(self, index: int, begin: int = 0) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        for item in super().items(index, begin):
            yield item, info.id if info is not None else None


def test_a_process_of_a_dataloader_has_its_turns_of_what_is_not_indexed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream that divides itself among processes gives all of its samples. A reader of files knows its process."""

    def read(dataset: Any, process: int) -> list[Any]:
        info = torch_worker.WorkerInfo(id=process, num_workers=2, seed=0, dataset=dataset)
        monkeypatch.setattr(torch_worker, "_worker_info", info)
        source = Shard("train", dataset, 0, 1).source
        source.begin(Share(0, 1, source.size), 3)
        return [item for _, item in source]

    assert [read(NumberStream(10), process) for process in range(2)] == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9]]
    lines = in_files([2, 1, 3], "turns of processes")
    files = Asking([lines.path(index) for index in range(3)])
    assert [read(files, process) for process in range(2)] == [
        [("0", 0), ("1", 0), ("3", 0), ("4", 0), ("5", 0)],
        [("2", 1)],
    ]


def test_one_rank_far_ahead_of_the_others_uses_no_item_twice() -> None:
    shards = [Shard("train", NumberStream(12), rank, 3) for rank in range(3)]
    loops = [iter(shard) for shard in shards]
    assert [next(loops[rank]) for rank in (1, 1, 1, 0)] == [1, 4, 7, 0]
    consumed = stored(shards)
    assert consumed == Consumed(samples=2, beyond={4: WHOLE, 7: WHOLE})
    again = [[*Shard("train", NumberStream(12), rank, 2, consumed=consumed)] for rank in range(2)]
    assert again == [[2, 5, 8, 10], [3, 6, 9, 11]]
