"""Boxes, and what a rank of a mesh has."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from tests.unit.weights.shardings import Sharding, shardings
from unirun.weights.dtensors import local_indices
from unirun.weights.tensors import Box, pieces_of, runs


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, a + n) for a, n in zip(box.start, box.size, strict=True))))


BOXES = st.integers(0, 3).flatmap(
    lambda axes: st.tuples(
        *[
            st.builds(
                Box,
                st.tuples(*[st.integers(0, 4)] * axes),
                st.tuples(*[st.integers(0, 4)] * axes),
            )
        ]
        * 2
    )
)


class TestBoxes:
    @given(BOXES)
    def test_two_boxes_meet_in_the_elements_that_both_have(self, pair: tuple[Box, Box]) -> None:
        one, other = pair
        common = one.meet(other)
        assert (cells(common) if common else set()) == cells(one) & cells(other)

    @given(BOXES)
    def test_what_is_left_of_a_box_is_cut_into_boxes_that_do_not_overlap(self, pair: tuple[Box, Box]) -> None:
        one, other = pair
        rest = [cells(box) for box in one.without(other)]
        assert set().union(*rest) == cells(one) - cells(other)
        assert sum(map(len, rest)) == len(cells(one) - cells(other))

    def test_a_tensor_without_dimensions_has_one_element(self) -> None:
        assert Box((), ()).count == 1
        assert Box((), ()).meet(Box((), ())) == Box((), ())
        assert list(Box((), ()).without(Box((), ()))) == []


class TestPieces:
    def test_indices_that_follow_each_other_are_one_run(self) -> None:
        assert runs([0, 1, 2, 5, 6, 9]) == [(0, 0, 3), (3, 5, 2), (5, 9, 1)]
        assert runs([]) == []

    @given(shardings())
    def test_the_pieces_of_all_ranks_together_are_the_tensor(self, sharding: Sharding) -> None:
        shape = (7, 10)
        found: set[tuple[int, ...]] = set()
        for coordinate in sharding.coordinates:
            axes = local_indices(shape, sharding.mesh, coordinate, sharding.placements)
            mine = [cells(piece.box) for piece in pieces_of(axes)]
            assert sum(map(len, mine)) == len(set().union(*mine)) == len(axes[0]) * len(axes[1])
            found |= set().union(*mine)
        assert len(found) == 70

    @given(shardings())
    def test_a_rank_has_what_torch_gives_it(self, sharding: Sharding) -> None:
        for coordinate in sharding.coordinates:
            axes = local_indices((7, 10), sharding.mesh, coordinate, sharding.placements)
            shape, offset = _compute_local_shape_and_global_offset(
                (7, 10), sharding.mesh, coordinate.__getitem__, sharding.placements, False
            )
            assert tuple(map(len, axes)) == tuple(shape)
            if torch.Size(shape).numel() and all(isinstance(p, Shard) for p in sharding.placements):
                assert [axis[0] for axis in axes] == [*offset]
