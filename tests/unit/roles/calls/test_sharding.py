"""The division of arguments: every item goes to exactly one worker, in order."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import UsageError
from unirun.roles import replicate, shard
from unirun.roles.calls.policy import Arguments, Sharding, rearranged, sizes, split

RANKS = st.integers(1, 20)


def parts_of(done: tuple[tuple[Arguments, ...], Sharding], ranks: int, where: int | str = 0) -> list[Any]:
    """The part of one argument that each rank gets."""
    rows = done[0] * ranks if len(done[0]) == 1 else done[0]
    assert len(rows) == ranks
    return [row[0][where] if isinstance(where, int) else row[1][where] for row in rows]


@given(st.integers(0, 1000), RANKS)
def test_parts_differ_by_one_at_most_and_the_first_are_larger(length: int, ranks: int) -> None:
    found = sizes(length, ranks)
    assert sum(found) == length
    assert max(found) - min(found) <= 1
    assert list(found) == sorted(found, reverse=True)


@given(st.lists(st.integers()), RANKS)
def test_the_parts_of_a_list_are_the_list(items: list[int], ranks: int) -> None:
    parts = parts_of(split((shard(items),), {}, ranks, auto=True), ranks)
    assert list(itertools.chain(*parts)) == items
    assert all(isinstance(part, list) for part in parts)


@given(st.integers(0, 50), st.integers(1, 4), RANKS)
def test_the_parts_of_a_tensor_are_the_tensor(rows: int, columns: int, ranks: int) -> None:
    tensor = torch.arange(rows * columns).reshape(rows, columns)
    parts = parts_of(split((), {"x": shard(tensor)}, ranks, auto=True), ranks, "x")
    assert torch.equal(torch.cat(parts), tensor)
    assert all(part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for part in parts)


@given(st.integers(0, 30), RANKS)
def test_the_parts_of_a_mapping_are_mappings_of_parts(rows: int, ranks: int) -> None:
    batch = {
        "ids": torch.arange(rows),
        "text": [str(n) for n in range(rows)],
        "more": {"a": tuple(range(rows))},
    }
    parts = parts_of(split((shard(batch),), {}, ranks, auto=True), ranks)
    for part in parts:
        assert list(part) == ["ids", "text", "more"]
        assert [str(int(n)) for n in part["ids"]] == part["text"]
        assert part["more"]["a"] == tuple(map(int, part["text"]))
    assert list(itertools.chain(*(part["text"] for part in parts))) == batch["text"]


@given(st.lists(st.integers(), max_size=5), st.dictionaries(st.text(min_size=1), st.integers()), RANKS)
def test_without_marks_and_lists_everybody_gets_everything(
    args: list[int], kwargs: dict[str, int], ranks: int
) -> None:
    done = split(tuple(args), kwargs, ranks, auto=True)
    assert done[0] == ((tuple(args), kwargs),), "pickled once"
    assert set(done[1].values()) <= {"replicate"}


@pytest.mark.parametrize("auto", [True, False])
def test_a_call_without_arguments_has_nothing_to_split(auto: bool) -> None:
    assert split((), {}, 4, auto=auto) == ((((), {}),), {})


class TestTheRuleOfTheGuide:
    """Every argument a list with an item for each target: each gets its item."""

    def test_lists_with_an_item_for_each_worker_are_split_by_items(self) -> None:
        done = split(([1, 2, 3], ["a", "b", "c"]), {"x": [None, True, 0.5]}, 3, auto=True)
        assert done[0] == (
            ((1, "a"), {"x": None}),
            ((2, "b"), {"x": True}),
            ((3, "c"), {"x": 0.5}),
        )
        assert done[1] == {0: "item", 1: "item", "x": "item"}

    @pytest.mark.parametrize(
        ("args", "ranks"),
        [
            (([1, 2, 3], 4), 3),
            (([1, 2, 3], [1, 2]), 3),
            (((1, 2, 3),), 3),
            (([1, 2],), 3),
            (([1],), 1),
            ((torch.ones(3),), 3),
        ],
        ids=["a-number", "uneven", "a-tuple", "too-short", "one-target", "a-tensor"],
    )
    def test_other_arguments_go_to_all_workers(self, args: tuple[Any, ...], ranks: int) -> None:
        done = split(args, {}, ranks, auto=True)
        assert len(done[0]) == 1
        assert done[0][0][0] is args

    def test_lists_are_not_split_with_auto_shard_off(self) -> None:
        assert split(([1, 2],), {}, 2, auto=False)[0] == ((([1, 2],), {}),)

    def test_lists_are_not_split_when_an_argument_is_marked(self) -> None:
        done = split((replicate([1, 2]), [3, 4]), {}, 2, auto=True)
        assert done[0] == ((([1, 2], [3, 4]), {}),)
        assert done[1] == {0: "replicate", 1: "replicate"}


class TestMarks:
    def test_marked_arguments_are_split_and_the_others_go_to_all(self) -> None:
        done = split((shard([1, 2, 3]), "x"), {"y": [7, 8]}, 2, auto=True)
        assert done[0] == ((([1, 2], "x"), {"y": [7, 8]}), (([3], "x"), {"y": [7, 8]}))
        assert done[1] == {0: "shard 2+1", 1: "replicate", "y": "replicate"}

    def test_more_workers_than_items_leave_some_with_nothing(self) -> None:
        assert parts_of(split((shard([1]),), {}, 3, auto=True), 3) == [[1], [], []]

    def test_a_single_worker_gets_the_whole_value(self) -> None:
        assert split((shard([1, 2]),), {}, 1, auto=True)[0] == ((([1, 2],), {}),)

    @pytest.mark.parametrize("value", [(1, 2), range(4), np.arange(4), bytearray(b"abcd")], ids=repr)
    def test_a_value_with_a_length_and_slices_is_split(self, value: Any) -> None:
        first, second = parts_of(split((shard(value),), {}, 2, auto=True), 2)
        assert type(first) is type(value)
        assert [*first, *second] == list(value)

    def test_shard_is_refused_where_splitting_is_switched_off(self) -> None:
        with pytest.raises(UsageError, match=r"auto_shard=False; leave one of them out"):
            split((shard([1, 2]),), {}, 2, auto=False)
        assert split((replicate([1, 2]),), {}, 2, auto=False)[0] == ((([1, 2],), {}),)

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            (5, "argument 0: unirun.shard cannot split int; give a list"),
            (None, "cannot split NoneType"),
            ("text", "cannot split str"),
            (b"bytes", "cannot split bytes"),
            ({1, 2}, "cannot split set"),
            (iter([1, 2]), "cannot split list_iterator"),
            (torch.tensor(3.0), "without dimensions cannot be split; replicate it"),
            (np.array(3.0), "without dimensions cannot be split"),
            (deque([1, 2]), "cannot slice deque"),
            ({"a": [1, 2], "b": [1]}, r"the values of the mapping have lengths \[1, 2\]"),
            ({}, r"have lengths \[\]"),
            ({"a": 5}, "cannot split int"),
            ({"a": deque([1, 2])}, "argument 0: unirun.shard cannot slice deque"),
        ],
    )
    def test_what_cannot_be_split_is_told_with_its_place(self, value: Any, words: str) -> None:
        with pytest.raises(UsageError, match=words):
            split((shard(value),), {}, 2, auto=True)
        with pytest.raises(UsageError, match="argument batch"):
            split((), {"batch": shard(value)}, 2, auto=True)


@pytest.mark.parametrize(
    ("result", "args", "kwargs"),
    [
        (5, (5,), {}),
        (None, (None,), {}),
        ([1, 2], ([1, 2],), {}),
        ((), (), {}),
        ((1, 2), (1, 2), {}),
        ((1, 2, 3), (1, 2, 3), {}),
        ({"x": 1}, (), {"x": 1}),
        (((1, 2), {"x": 3}), (1, 2), {"x": 3}),
        (([1], {}), (1,), {}),
        ((1, {"x": 3}), (1, {"x": 3}), {}),
        (({"x": 1},), ({"x": 1},), {}),
    ],
)
def test_what_pre_func_returns_becomes_the_arguments(result: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    assert rearranged(result) == (args, kwargs)


def test_a_dict_that_holds_no_names_is_refused() -> None:
    with pytest.raises(UsageError, match="keys are not names"):
        rearranged({1: 2})
