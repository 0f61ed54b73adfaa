"""The transfers between ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.weights.shardings import Sharding, shardings
from unirun.errors import WeightsError
from unirun.weights.tensors import (
    Box,
    Layout,
    NamedBox,
    Part,
    Piece,
    Tensor,
    layout_of,
    part_of,
    plan,
    shared,
)

WHOLE = torch.arange(70).view(7, 10)


@given(shardings(), shardings())
def test_every_pair_of_layouts_moves_each_element_once_and_exactly(
    sources: Sharding, receivers: Sharding
) -> None:
    tensors = {"w": WHOLE}
    layouts = sources.layouts(tensors)
    held = [sources.local(WHOLE, at) for at in sources.coordinates]
    for at, wanted in zip(receivers.coordinates, receivers.layouts(tensors), strict=True):
        expected = receivers.local(WHOLE, at)
        got, times = torch.full_like(expected, -1), torch.zeros_like(expected)
        for source, takes in plan(layouts, wanted).items():
            part = layouts[source]["w"]
            for take in takes:
                part_of(got, wanted["w"], take.box).copy_(part_of(held[source], part, take.box))
                part_of(times, wanted["w"], take.box).add_(1)
        assert torch.equal(got, expected)
        assert torch.equal(times, torch.ones_like(times))


@given(st.lists(shardings(), min_size=2, max_size=4), shardings())
def test_tensors_that_a_receiver_has_in_the_same_part_come_from_those_that_have_each(
    sources: list[Sharding], receivers: Sharding
) -> None:
    """As the layers of a pipeline, whose stages have different ones: equal parts are one object, and one search."""
    tensors = {f"w{number}": WHOLE for number in range(len(sources))}
    layouts: list[Layout] = [{} for _ in range(max(len(each.coordinates) for each in sources))]
    for name, each in zip(tensors, sources, strict=True):
        for rank, at in enumerate(each.coordinates):
            layouts[rank][name] = each.part(WHOLE, at)
    for wanted in receivers.layouts(tensors):
        apart = {name: replace(part) for name, part in wanted.items()}
        assert plan([*map(shared, layouts)], shared(wanted)) == plan(layouts, apart)


def test_receivers_with_different_turns_ask_different_sources_with_the_same_data() -> None:
    whole = layout_of({"w": WHOLE})
    assert [[*plan([whole] * 3, whole, turn=turn)] for turn in range(4)] == [[0], [1], [2], [0]]


def test_sources_with_the_same_data_send_equally_much() -> None:
    tensors = layout_of({f"w{number}": torch.zeros(size) for number, size in enumerate((8, 3, 5, 2, 6))})
    takes = plan([tensors] * 2, tensors)
    assert {source: [take.name for take in some] for source, some in takes.items()} == {
        0: ["w0", "w3"],
        1: ["w1", "w2", "w4"],
    }


def test_sources_on_this_host_come_first() -> None:
    whole = layout_of({"w": WHOLE})
    assert [*plan([whole] * 4, whole, near=[2], turn=1)] == [2]


def test_a_half_that_is_near_is_taken_from_there_and_the_rest_from_elsewhere() -> None:
    about = Tensor((4,), "float32")
    half = {"w": Part(about, (Piece(Box((0,), (2,)), (0,)),))}
    whole = {"w": Part(about, (Piece(Box((0,), (4,)), (0,)),))}
    assert plan([whole, half], whole, near=[1]) == {
        1: (NamedBox("w", Box((0,), (2,))),),
        0: (NamedBox("w", Box((2,), (2,))),),
    }


def test_all_tensors_that_do_not_fit_are_told_at_once() -> None:
    there = layout_of({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(4)})
    here = layout_of(
        {
            "a": torch.zeros(3),
            "b": torch.zeros(3, dtype=torch.bfloat16),
            "c": torch.zeros(4),
            "d": torch.zeros(1),
        }
    )
    with pytest.raises(WeightsError) as caught:
        plan([there], here)
    assert [fault.where for fault in caught.value.faults] == ["a", "b", "d"]
    assert "published as float32[3] and received as bfloat16[3]" in str(caught.value)


def test_a_part_that_nobody_has_is_told() -> None:
    about = Tensor((4, 2), "float32")
    half = {"w": Part(about, (Piece(Box((0, 0), (2, 2)), (0, 0)),))}
    whole = {"w": Part(about, (Piece(Box((0, 0), (4, 2)), (0, 0)),))}
    with pytest.raises(WeightsError, match=r"no publisher has \[2:4, 0:2\] of float32\[4, 2\]"):
        plan([half], whole)
