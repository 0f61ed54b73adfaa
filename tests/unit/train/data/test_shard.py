"""One rank's part of one dataset."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.train.data.datasets import NumberStream, in_files, stored
from unirun.errors import UsageError
from unirun.train.data import Consumed, merged
from unirun.train.data.loader import Shard
from unirun.train.data.plan import WHOLE


@given(n=st.integers(0, 60), world=st.integers(1, 7), seed=st.integers(0, 5), block=st.integers(1, 70))
def test_in_each_epoch_each_sample_is_for_one_rank_in_a_new_order(
    n: int, world: int, seed: int, block: int
) -> None:
    shards = [
        Shard("train", range(n), rank, world, shuffle=True, seed=seed, block=block) for rank in range(world)
    ]
    for _ in range(3):
        assert sorted(sample for shard in shards for sample in shard) == [*range(n)]


def test_shuffled_epochs_differ() -> None:
    shard = Shard("train", range(20), 0, 1, shuffle=True)
    first, second = [*shard], [*shard]
    assert first != second
    assert sorted(first) == sorted(second) == [*range(20)]


class TestLoops:
    def test_a_loop_goes_on_where_the_last_one_was_left(self) -> None:
        shard = Shard("train", range(5), 0, 1)
        assert [*itertools.islice(shard, 2)] == [0, 1]
        assert [*itertools.islice(shard, 2)] == [2, 3]
        assert [*shard] == [4]
        assert [*shard] == [0, 1, 2, 3, 4]

    def test_an_item_is_consumed_in_the_body_of_the_loop(self) -> None:
        shard = Shard("train", range(3), 0, 1)
        for number, _ in enumerate(shard, 1):
            assert stored([shard]) == Consumed(samples=number)

    def test_a_loop_that_is_left_at_the_last_item_has_not_ended_the_epoch(self) -> None:
        shard = Shard("train", range(2), 0, 1)
        assert [*itertools.islice(shard, 2)] == [0, 1]
        assert stored([shard]) == Consumed(0, samples=2)
        assert [*shard] == []
        assert stored([shard]) == Consumed(1)
        assert [*shard] == [0, 1]

    def test_an_empty_dataset_has_empty_epochs(self) -> None:
        shard = Shard("train", [], 0, 2)
        assert [[*shard], [*shard]] == [[], []]
        assert merged([shard.progress]) == Consumed(2)

    def test_two_loops_at_once_are_refused(self) -> None:
        shard = Shard("train", range(5), 0, 1)
        first = iter(shard)
        assert next(first) == 0
        assert next(iter(shard)) == 1
        with pytest.raises(
            UsageError, match=r"'train': this loop goes on after another one began.*; leave it"
        ):
            next(first)
        assert [*shard] == [2, 3, 4]

    def test_an_item_that_cannot_be_read_is_not_consumed(self) -> None:
        class Once(list[int]):
            fails = True

            def __getitem__(self, index: Any) -> Any:
                if index == 1 and self.fails:
                    self.fails = False
                    raise OSError("away")
                return super().__getitem__(index)

        shard = Shard("train", Once([5, 6, 7]), 0, 1)
        with pytest.raises(OSError, match="away"):
            list(shard)
        assert [*shard] == [6, 7]


class TestLength:
    def test_it_is_that_of_the_loop_that_is_under_way_or_comes_next(self) -> None:
        shard = Shard("train", range(7), 1, 2)
        loader = shard.to_torch(2)
        assert len(shard) == 3
        assert [len(shard) for _ in shard] == [3, 3, 3]
        assert len(shard) == 3
        assert [len(loader) for _ in loader] == [2, 2]

    def test_a_loop_that_was_left_has_the_next_one_begin_with_what_remains(self) -> None:
        shard = Shard("train", range(7), 1, 2)
        for _ in shard:
            break
        assert len(shard) == 2

    def test_it_counts_items_of_batches_too(self) -> None:
        shard = Shard("train", range(10), 0, 2)
        next(iter(shard.to_torch(4)))
        assert len(shard) == 2

    @pytest.mark.parametrize("dataset", [NumberStream(3), in_files([2], "length")])
    def test_without_a_length_it_is_an_error(self, dataset: Any) -> None:
        with pytest.raises(TypeError, match="dataset 'train' has no length: .* known at its end"):
            len(Shard("train", dataset, 0, 1))


class TestBegin:
    def test_a_rank_goes_on_from_what_was_used(self) -> None:
        shards = [Shard("train", range(9), rank, 3) for rank in range(3)]
        assert [*itertools.islice(shards[1], 2)] == [1, 4]
        consumed = stored(shards)
        assert consumed == Consumed(beyond={1: WHOLE, 4: WHOLE})
        assert [[*Shard("train", range(9), rank, 2, consumed=consumed)] for rank in range(2)] == [
            [0, 3, 6, 8],
            [2, 5, 7],
        ]

    @pytest.mark.parametrize(
        "consumed", [Consumed(samples=5), Consumed(beyond={4: WHOLE}), Consumed(beyond={4: 1})]
    )
    def test_what_does_not_fit_is_refused(self, consumed: Consumed) -> None:
        message = "of another size than 4; pass the dataset .* in Trainer.run with a dict"
        with pytest.raises(UsageError, match=f"dataset 'train': .*{message}"):
            Shard("train", range(4), 0, 2, consumed=consumed)

    def test_all_that_a_dataset_has_may_be_consumed(self) -> None:
        assert [*Shard("train", range(4), 0, 2, consumed=Consumed(samples=4))] == []
        assert [*Shard("train", range(4), 0, 2, consumed=Consumed(beyond={3: WHOLE}))] == [0, 2]


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"rank": -1}, "rank: found -1; pass a whole number from 0 on"),
            ({"rank": "0"}, "rank: found '0'"),
            ({"rank": 2}, "there is no rank 2 of 2; ranks begin at 0"),
            ({"world": 0}, "world: found 0; pass a whole number from 1 on"),
            ({"world": True}, "world: found True"),
            ({"seed": -1}, "seed: found -1"),
            ({"block": 0}, "block: found 0"),
        ],
    )
    def test_a_wrong_number_is_refused_by_name(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(UsageError, match=f"dataset 'train'.*{message}"):
            Shard("train", range(3), **{"rank": 0, "world": 2, **arguments})


def test_two_datasets_go_on_each_by_itself() -> None:
    train, validation = Shard("train", range(6), 0, 2), Shard("validation", range(4), 0, 2)
    assert [*itertools.islice(train, 2)] == [0, 2]
    assert [[*validation], [*validation]] == [[0, 2], [0, 2]]
    epochs = {shard.name: shard.progress.epoch for shard in (train, validation)}
    assert epochs == {"train": 0, "validation": 1}
    assert [*train] == [4]


def test_the_time_in_which_data_is_made_is_waited_and_that_of_the_loop_is_not() -> None:
    now = 0.0

    class Slow(list[int]):
        def __getitem__(self, index: Any) -> Any:
            nonlocal now
            now += 3
            return super().__getitem__(index)

    shard = Shard("train", Slow([1, 2]), 0, 1, clock=lambda: now)
    for number, _ in enumerate(shard, 1):
        assert shard.waited == 3 * number
        now += 100
    assert shard.waited == 6


def test_a_loop_that_was_left_changes_nothing_of_the_one_that_goes_on_when_it_ends() -> None:
    shard = Shard("train", range(10), 0, 1)
    left, goes_on = iter(shard), iter(shard)
    assert next(left) == 0
    assert next(goes_on) == 1
    promised = len(shard)
    del left
    assert len(shard) == promised == len([1, *goes_on])
