"""A user's `DataLoader` as the loader of one rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from tests.unit.train.data.datasets import NumberStream, in_files, numbers, stored
from unirun.errors import UsageError
from unirun.train.data.loader import Shard, sharded


def loader_of(dataset: Sequence[Any] | torch.Tensor, **options: Any) -> DataLoader[Any]:
    """As users make one: torch takes whatever is indexed and has a length, though its types ask for a `Dataset`."""
    return DataLoader(dataset, **options)  # type: ignore[arg-type]


def sampler_of(numbers: range, *where: int, **options: Any) -> DistributedSampler[Any]:
    """Likewise."""
    return DistributedSampler(numbers, *where, **options)  # type: ignore[arg-type]


def parts(loader: DataLoader[Any], world: int = 2, **options: Any) -> list[list[list[int]]]:
    ranks = [sharded(loader, "train", rank, world, **options) for rank in range(world)]
    return [[numbers(batch) for batch in rank] for rank in ranks]


def shards(dataset: Any, batch: int, **options: Any) -> list[list[list[int]]]:
    loaders = [Shard("train", dataset, rank, 2, **options).to_torch(batch) for rank in range(2)]
    return [[numbers(got) for got in loader] for loader in loaders]


def test_the_dataset_the_size_and_the_order_are_kept() -> None:
    assert parts(loader_of(range(10), batch_size=3)) == shards(range(10), 3)
    assert parts(loader_of(range(10), batch_size=3, shuffle=True), seed=4) == shards(
        range(10), 3, shuffle=True, seed=4
    )


@pytest.mark.parametrize(("options", "size"), [({"batch_size": 3}, 3), ({"batch_size": None}, 1)])
def test_the_dataset_and_the_size_are_named_as_by_the_users_loader(
    options: dict[str, Any], size: int
) -> None:
    data = range(10)
    found = sharded(loader_of(data, **options), "train", 1, 2)
    assert found.dataset is data
    assert found.batch_size == size


def test_a_stream_is_kept() -> None:
    assert parts(DataLoader(NumberStream(9), batch_size=2)) == shards(NumberStream(9), 2)


def test_files_may_be_in_a_dataloader() -> None:
    files: Any = in_files([2, 1, 3], "adopted")
    assert parts(DataLoader(files, batch_size=2, shuffle=True)) == shards(files, 2, shuffle=True)


def test_a_distributed_sampler_is_replaced() -> None:
    for shuffle in (True, False):
        sampler = sampler_of(range(9), num_replicas=4, rank=3, shuffle=shuffle, seed=5, drop_last=True)
        assert parts(loader_of(range(9), batch_size=2, sampler=sampler)) == shards(
            range(9), 2, shuffle=shuffle, seed=5
        )


def test_without_batches_each_item_is_one() -> None:
    found = [*sharded(loader_of([4, 5, 6], batch_size=None), "train", 0, 2)]
    assert found == [4, 6]
    (tensor, _) = sharded(loader_of(torch.eye(2), batch_size=None), "train", 0, 1)
    assert torch.equal(tensor, torch.tensor([1.0, 0.0]))


def test_its_options_are_kept() -> None:
    made: list[int] = []

    def collate(items: list[Any]) -> Any:
        made.append(len(items))
        return default_collate(items)

    loader = loader_of(
        range(5), batch_size=2, num_workers=2, collate_fn=collate, prefetch_factor=3, persistent_workers=True
    )
    kept = sharded(loader, "train", 0, 1)._batches
    for option in ("num_workers", "collate_fn", "prefetch_factor", "persistent_workers"):
        assert getattr(kept, option) == getattr(loader, option)
    assert len([*sharded(loader_of(range(5), batch_size=2, collate_fn=collate), "train", 0, 1)]) == 3
    assert made == [2, 2, 1]


def test_it_goes_on_from_what_all_ranks_have_used() -> None:
    loader = loader_of(range(10), batch_size=2)
    ranks = [sharded(loader, "train", rank, 2) for rank in range(2)]
    assert [numbers(next(iter(rank))) for rank in ranks] == [[0, 1], [2, 3]]
    consumed = stored([rank.shard for rank in ranks])
    assert parts(loader, world=1, consumed=consumed) == [[[4, 5], [6, 7], [8, 9]]]


def with_sampler(sampler: Any) -> DataLoader[Any]:
    return loader_of(range(4), batch_size=2, sampler=sampler)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (range(4), "expected a DataLoader, found a range; use Shard"),
        (loader_of(range(4), drop_last=True), "drop_last=True; leave it out"),
        (
            with_sampler(WeightedRandomSampler([1.0] * 4, 4)),
            "the sampler WeightedRandomSampler.*; pass shuffle",
        ),
        (
            with_sampler(SubsetRandomSampler([1, 2])),
            "the sampler SubsetRandomSampler.*torch.utils.data.Subset",
        ),
        (with_sampler(RandomSampler(range(4), replacement=True)), "the sampler RandomSampler"),
        (with_sampler(RandomSampler(range(4), num_samples=2)), "the sampler RandomSampler"),
        (with_sampler(SequentialSampler(range(3))), "the sampler SequentialSampler"),
        (with_sampler(sampler_of(range(3), 2, 0)), "the sampler DistributedSampler"),
        (
            loader_of(range(4), batch_sampler=[[0, 1], [2, 3]]),
            "the batch sampler list; pass batch_size",
        ),
        (DataLoader(NumberStream(4), num_workers=1, persistent_workers=True), "persistent_workers=True"),
        (loader_of(range(4), in_order=False), "in_order=False"),
    ],
)
def test_what_may_lose_or_repeat_samples_is_refused(loader: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"dataset 'train': .*{message}"):
        sharded(loader, "train", 0, 1)


def test_torchs_own_batch_sampler_is_what_a_size_is() -> None:
    def loader(drop_last: bool) -> DataLoader[Any]:
        batches = BatchSampler(RandomSampler(range(9)), 2, drop_last)
        return loader_of(range(9), batch_sampler=batches)

    assert parts(loader(False)) == shards(range(9), 2, shuffle=True)
    with pytest.raises(UsageError, match="drop_last=True"):
        sharded(loader(True), "train", 0, 1)
