"""The division of sequences: nothing is lost, nothing is too large, and the parts are nearly equal."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.experiments.sample import balanced, first_fit_decreasing, micro_batches, padded_micro_batches

sizes = st.lists(st.integers(0, 60), max_size=40)
parts = st.integers(1, 9)
capacities = st.integers(1, 80)


def sums(sizes: Sequence[int], found: Sequence[Sequence[int]]) -> list[int]:
    return [sum(sizes[index] for index in part) for part in found]


def check_partition(sizes: Sequence[int], found: Sequence[Sequence[int]]) -> None:
    """Each index is in one part, and each part ascends."""
    assert sorted(index for part in found for index in part) == [*range(len(sizes))]
    assert all([*part] == sorted(part) for part in found)


def least_possible(sizes: Sequence[int], parts: int) -> int:
    """No way to split has a largest part below this."""
    return max(-(-sum(sizes) // parts), max(sizes, default=0))


class TestBalanced:
    @given(sizes, parts)
    def test_each_index_is_in_one_part(self, sizes: list[int], parts: int) -> None:
        found = balanced(sizes, parts)
        assert len(found) == parts
        check_partition(sizes, found)

    @given(sizes, parts)
    def test_no_part_is_empty_if_there_are_enough_sizes(self, sizes: list[int], parts: int) -> None:
        assert sum(map(bool, balanced(sizes, parts))) == min(parts, len(sizes))

    @given(sizes, parts)
    def test_two_parts_differ_by_the_largest_size_at_most(self, sizes: list[int], parts: int) -> None:
        found = sums(sizes, balanced(sizes, parts))
        assert max(found) - min(found) <= max(sizes, default=0)

    @given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 3))
    def test_the_largest_part_is_4_3_of_the_best_one_at_most(self, sizes: list[int], parts: int) -> None:
        best = sum(sizes)
        for code in range(parts ** len(sizes)):
            totals = [0] * parts
            for size in sizes:
                code, at = divmod(code, parts)
                totals[at] += size
            best = min(best, max(totals))
        assert 3 * max(sums(sizes, balanced(sizes, parts))) <= 4 * best

    def test_the_largest_come_first(self) -> None:
        assert balanced([1, 2, 3, 4], 2) == [[0, 3], [1, 2]]

    def test_sequences_without_tokens_are_dealt_out_too(self) -> None:
        assert balanced([0, 0, 0, 0, 7], 3) == [[4], [0, 2], [1, 3]]

    def test_equal_sizes_are_dealt_out(self) -> None:
        assert balanced([5] * 7, 3) == [[0, 3, 6], [1, 4], [2, 5]]

    @pytest.mark.parametrize("seed", range(3))
    def test_ten_thousand_sequences_are_balanced_over_eight_ranks(self, seed: int) -> None:
        chance = random.Random(seed)
        sizes = [min(int(chance.lognormvariate(6.0, 1.0)) + 1, 32_768) for _ in range(10_000)]
        found = balanced(sizes, 8)
        check_partition(sizes, found)
        assert max(sums(sizes, found)) >= least_possible(sizes, 8)
        assert max(sums(sizes, found)) <= 1.02 * sum(sizes) / 8


class TestFirstFitDecreasing:
    @given(sizes, capacities)
    def test_each_index_is_in_one_part(self, sizes: list[int], capacity: int) -> None:
        found = first_fit_decreasing(sizes, capacity)
        check_partition(sizes, found)
        assert all(found)

    @given(sizes, capacities)
    def test_only_what_is_alone_is_above_the_capacity(self, sizes: list[int], capacity: int) -> None:
        found = first_fit_decreasing(sizes, capacity)
        for part, total in zip(found, sums(sizes, found), strict=True):
            assert total <= capacity or len(part) == 1

    @given(sizes, capacities)
    def test_it_is_the_rule_step_by_step(self, sizes: list[int], capacity: int) -> None:
        expected: list[list[int]] = []
        for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
            for part in expected:
                if sum(sizes[other] for other in part) + sizes[index] <= capacity:
                    part.append(index)
                    break
            else:
                expected.append([index])
        assert first_fit_decreasing(sizes, capacity) == [sorted(part) for part in expected]

    @given(st.lists(st.integers(1, 60), max_size=40), capacities)
    def test_there_are_few_parts(self, sizes: list[int], capacity: int) -> None:
        # Two parts that would fit into one are never there.
        found = sorted(sums(sizes, first_fit_decreasing(sizes, capacity)))
        assert len(found) < 2 or found[0] + found[1] > capacity

    def test_nothing_has_no_parts(self) -> None:
        assert first_fit_decreasing([], 4) == []

    def test_ten_thousand_sequences_are_packed_tightly(self) -> None:
        chance = random.Random(0)
        sizes = [chance.randint(1, 2048) for _ in range(10_000)]
        found = first_fit_decreasing(sizes, 8192)
        check_partition(sizes, found)
        assert max(sums(sizes, found)) <= 8192
        assert len(found) <= 1.01 * sum(sizes) / 8192


class TestMicroBatches:
    @given(sizes, parts, capacities)
    def test_each_index_is_in_one_of_them_and_none_is_empty(
        self, sizes: list[int], least: int, capacity: int
    ) -> None:
        found = micro_batches(sizes, least, capacity)
        check_partition(sizes, found)
        assert all(found)

    @given(sizes, parts, capacities)
    def test_only_a_sequence_that_is_alone_is_above_the_capacity(
        self, sizes: list[int], least: int, capacity: int
    ) -> None:
        found = micro_batches(sizes, least, capacity)
        for part, total in zip(found, sums(sizes, found), strict=True):
            assert total <= capacity or len(part) == 1

    @given(sizes, parts, capacities)
    def test_there_are_as_many_as_are_asked_for_if_there_are_so_many_sequences(
        self, sizes: list[int], least: int, capacity: int
    ) -> None:
        assert len(micro_batches(sizes, least, capacity)) >= min(least, len(sizes))

    @given(sizes, parts)
    def test_with_room_for_all_they_are_balanced(self, sizes: list[int], least: int) -> None:
        expected = balanced(sizes, min(least, len(sizes))) if sizes else []
        assert micro_batches(sizes, least, 1 << 40) == expected

    def test_where_balance_would_need_more_room_fewest_counts(self) -> None:
        assert balanced([3, 3, 2, 2, 2], 2) == [[0, 2, 4], [1, 3]]
        assert micro_batches([3, 3, 2, 2, 2], 2, 6) == [[0, 1], [2, 3, 4]]

    def test_a_sequence_above_the_capacity_gives_the_others_no_more_room(self) -> None:
        assert micro_batches([100, 3, 3, 2, 2, 2], 1, 6) == [[0], [1, 2], [3, 4, 5]]


def padded(lengths: Sequence[Sequence[int]], part: Sequence[int]) -> int:
    """Tokens of a micro-batch with its padding."""
    rows = [length for index in part for length in lengths[index]]
    return len(rows) * max(rows, default=0)


class TestPadded:
    @given(
        st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=4), max_size=20),
        parts,
        st.integers(1, 400),
    )
    def test_each_is_in_one_micro_batch_and_none_is_too_large(
        self, lengths: list[list[int]], least: int, capacity: int
    ) -> None:
        found = padded_micro_batches(lengths, least, capacity)
        check_partition([0] * len(lengths), found)
        assert all(found)
        assert len(found) >= min(least, len(lengths))
        assert all(len(part) == 1 or padded(lengths, part) <= capacity for part in found)

    def test_sequences_of_similar_lengths_are_together(self) -> None:
        lengths = [[16], [1], [15], [2], [14], [1], [2], [1]]
        assert padded_micro_batches(lengths, 2, 1 << 40) == [[0, 2, 4], [1, 3, 5, 6, 7]]

    def test_spread_lengths_take_two_thirds_of_the_tokens(self) -> None:
        lengths = [[8 + 120 * at // 31] for at in range(32)]
        total = sum(padded(lengths, part) for part in padded_micro_batches(lengths, 8, 1 << 40))
        apart = sum(
            padded(lengths, part) for part in micro_batches([each for (each,) in lengths], 8, 1 << 40)
        )
        assert total < 0.7 * apart
