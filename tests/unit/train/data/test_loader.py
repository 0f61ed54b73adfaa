"""Batches that a `DataLoader` makes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler, default_collate

from tests.unit.train.data.datasets import NumberStream, in_files, numbers, stored
from unirun.errors import UsageError
from unirun.train.data import Consumed
from unirun.train.data.loader import Shard
from unirun.train.data.plan import WHOLE


def batches(loader: Any) -> list[list[int]]:
    return [numbers(batch) for batch in loader]


@given(n=st.integers(0, 60), world=st.integers(1, 5), batch=st.integers(2, 7), shuffle=st.booleans())
def test_all_ranks_have_equally_many_batches_of_nearly_one_size(
    n: int, world: int, batch: int, shuffle: bool
) -> None:
    shards = [Shard("train", range(n), rank, world, shuffle=shuffle) for rank in range(world)]
    for _ in range(2):
        found = [batches(shard.to_torch(batch)) for shard in shards]
        assert sorted(number for rank in found for some in rank for number in some) == [*range(n)]
        if n >= world:
            assert {len(rank) for rank in found} == {-(-n // (world * batch))}
        lengths = {len(some) for rank in found for some in rank}
        assert max(lengths, default=0) - min(lengths, default=0) <= 1


def test_batches_are_tensors_as_those_of_torch() -> None:
    (batch,) = Shard("train", [(1, 2.0), (3, 4.0)], 0, 1).to_torch(8)
    assert torch.equal(batch[0], torch.tensor([1, 3]))
    assert torch.equal(batch[1], torch.tensor([2.0, 4.0], dtype=torch.float64))


@pytest.mark.parametrize("dataset", [[1, 2, 3], NumberStream(3)])
def test_options_go_to_the_dataloader(dataset: Any) -> None:
    assert [*Shard("train", dataset, 0, 1).to_torch(2, collate_fn=tuple)] == [
        tuple([*dataset][:2]),
        tuple([*dataset][2:]),
    ]


@pytest.mark.parametrize("dataset", [range(5), NumberStream(5), in_files([5], "seeds")])
def test_the_seed_of_a_loop_is_drawn_by_the_generator_that_is_given_and_never_by_the_programs(
    dataset: Any,
) -> None:
    own, program = torch.Generator(), torch.get_rng_state()
    before = own.get_state()
    for options in ({}, {"generator": own}):
        assert torch.equal(own.get_state(), before)
        batches(Shard("train", dataset, 0, 1).to_torch(2, **options))
    assert not torch.equal(own.get_state(), before)
    assert torch.equal(torch.get_rng_state(), program)


def test_items_of_a_stream_go_to_the_ranks_one_by_one_and_fill_batches() -> None:
    assert [batches(Shard("train", NumberStream(11), rank, 2).to_torch(2)) for rank in range(2)] == [
        [[0, 2], [4, 6], [8, 10]],
        [[1, 3], [5, 7], [9]],
    ]


def test_lines_of_files_fill_batches_across_files() -> None:
    shard = Shard("train", in_files([2, 0, 3], "batches"), 0, 1)
    loop = iter(shard.to_torch(3, collate_fn=list))
    assert next(loop) == ["0", "1", "2"]
    assert stored([shard]) == Consumed(samples=2, beyond={2: 1})
    assert next(loop) == ["3", "4"]
    assert stored([shard]) == Consumed(samples=3)


def test_a_batch_is_consumed_in_the_body_of_the_loop() -> None:
    shard = Shard("train", range(10), 0, 1)
    for number, _ in enumerate(shard.to_torch(4), 1):
        assert stored([shard]).samples == (4, 7, 10)[number - 1]


@pytest.mark.parametrize("dataset", [range(5), NumberStream(5), in_files([5], "named")])
def test_it_names_its_dataset_and_the_size_of_its_batches(dataset: Any) -> None:
    loader = Shard("train", dataset, 0, 2).to_torch(4)
    assert loader.dataset is dataset
    assert loader.batch_size == 4
    for name in ("dataset", "batch_size"):
        with pytest.raises(AttributeError):
            setattr(loader, name, 1)


class TestLength:
    def test_it_is_the_number_of_batches_left_of_the_epoch(self) -> None:
        loader = Shard("train", range(20), 1, 2).to_torch(4)
        assert len(loader) == 3
        next(iter(loader))
        assert len(loader) == 2
        assert len([*loader]) == 2
        assert len(loader) == 3

    @pytest.mark.parametrize("dataset", [NumberStream(3), in_files([2], "length")])
    def test_without_a_length_it_is_an_error(self, dataset: Any) -> None:
        with pytest.raises(TypeError, match="dataset 'train' has no length: how many batches"):
            len(Shard("train", dataset, 0, 1).to_torch(2))


class TestSizes:
    def test_another_size_is_refused_in_the_midst_of_an_epoch(self) -> None:
        shard = Shard("train", range(10), 0, 2)
        next(iter(shard.to_torch(2)))
        message = r"'train': batches of 3 in an epoch that was begun with batches of 2; finish"
        wrongs: list[Callable[[Any], Any]] = [iter, len]
        for wrong in wrongs:
            with pytest.raises(UsageError, match=message):
                next(wrong(shard.to_torch(3)))
        with pytest.raises(UsageError, match="batches of 1 in"):
            next(iter(shard))
        assert batches(shard.to_torch(2)) == [[4, 5], [8]]

    def test_another_size_goes_on_from_what_all_ranks_have_consumed(self) -> None:
        shards = [Shard("train", range(10), rank, 2) for rank in range(2)]
        for shard in shards:
            next(iter(shard.to_torch(2)))
        consumed = stored(shards)
        shards = [Shard("train", range(10), rank, 2, consumed=consumed) for rank in range(2)]
        assert [batches(shard.to_torch(3)) for shard in shards] == [[[4, 5, 6]], [[7, 8, 9]]]

    def test_an_epoch_that_has_ended_is_followed_by_one_of_any_size(self) -> None:
        shard = Shard("train", range(4), 0, 1)
        assert batches(shard.to_torch(2)) == [[0, 1], [2, 3]]
        assert len(shard) == 4
        assert batches(shard.to_torch(4)) == [[0, 1, 2, 3]]

    def test_a_stream_goes_on_in_batches_of_any_size(self) -> None:
        shard = Shard("train", NumberStream(7), 0, 1)
        assert numbers(next(iter(shard.to_torch(3)))) == [0, 1, 2]
        assert batches(shard.to_torch(2)) == [[3, 4], [5, 6]]


class TestOptions:
    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("shuffle", True),
            ("sampler", SequentialSampler(range(3))),
            ("batch_sampler", BatchSampler(SequentialSampler(range(3)), 2, False)),
            ("drop_last", False),
            ("in_order", False),
        ],
    )
    @pytest.mark.parametrize("dataset", [range(3), NumberStream(3)])
    def test_what_the_shard_decides_is_refused(self, dataset: Any, option: str, value: Any) -> None:
        with pytest.raises(UsageError, match=f"dataset 'train': .*{option}.*; (leave it out|pass it)"):
            Shard("train", dataset, 0, 1).to_torch(2, **{option: value})

    def test_processes_of_a_stream_do_not_persist(self) -> None:
        with pytest.raises(
            UsageError, match="persistent_workers=True, with a dataset that is not indexed; leave"
        ):
            Shard("train", NumberStream(3), 0, 1).to_torch(2, num_workers=1, persistent_workers=True)

    @pytest.mark.parametrize("size", [0, -1, None, 2.0, True])
    def test_a_wrong_size_is_refused(self, size: Any) -> None:
        with pytest.raises(
            UsageError, match="dataset 'train': batch_size: found .*; pass a whole number from 1 on"
        ):
            Shard("train", range(3), 0, 1).to_torch(size)


def test_the_time_in_which_batches_are_made_is_waited() -> None:
    now = 0.0

    def collate(items: list[Any]) -> Any:
        nonlocal now
        now += 2
        return default_collate(items)

    shard = Shard("train", range(6), 0, 1, clock=lambda: now)
    for _ in shard.to_torch(3, collate_fn=collate):
        now += 50
    assert shard.waited == 4


@pytest.mark.starts_processes
def test_what_processes_have_read_ahead_is_not_consumed() -> None:
    shard = Shard("train", range(40), 0, 2, shuffle=True)
    whole = batches(Shard("train", range(40), 0, 2, shuffle=True).to_torch(4))
    loader = shard.to_torch(4, num_workers=2, prefetch_factor=2, persistent_workers=True)
    assert [numbers(batch) for batch in itertools.islice(loader, 2)] == whole[:2]
    assert stored([shard]) == Consumed(samples=4, beyond={8: WHOLE, 9: WHOLE, 10: WHOLE, 11: WHOLE})
    assert batches(loader) == whole[2:]
    assert batches(loader) != whole


@pytest.mark.starts_processes
def test_processes_share_a_stream_and_files_so_that_nothing_is_lost() -> None:
    """Also where the stream would give each process another part."""
    streams = [Shard("train", NumberStream(23), rank, 2).to_torch(3, num_workers=2) for rank in range(2)]
    first = [batches(itertools.islice(loader, 1)) for loader in streams]
    assert first == [[[0, 2, 4]], [[1, 3, 5]]]
    consumed = stored([loader.shard for loader in streams])
    assert consumed == Consumed(samples=6)
    rest = Shard("train", NumberStream(23), 0, 1, consumed=consumed).to_torch(3, num_workers=2)
    assert batches(rest) == batches(Shard("train", NumberStream(23), 0, 1, consumed=consumed).to_torch(3))

    dataset = in_files([5, 1, 0, 2, 4], "processes")
    shard = Shard("train", dataset, 0, 1)
    some = [
        number for batch in itertools.islice(shard.to_torch(2, num_workers=2), 4) for number in numbers(batch)
    ]
    consumed = stored([shard])
    rest = Shard("train", dataset, 0, 1, consumed=consumed).to_torch(2, num_workers=1)
    assert sorted(some + [number for batch in rest for number in numbers(batch)]) == [*range(12)]
