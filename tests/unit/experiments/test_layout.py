"""Ranks and places of a model: each rank is at one place, and in one group along each axis."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import UsageError
from unirun.experiments.graph import AXES, ModelName, ModelShardID, ProcessTopology, topology

topologies = st.builds(
    lambda pipe, data, tensor, order: topology(pipe=pipe, data=data, tensor=tensor, order=order),
    *(st.integers(1, 4) for _ in AXES),
    st.permutations(AXES),
)


class TestPlaces:
    @given(topologies)
    def test_each_rank_is_at_one_place_and_each_place_has_one_rank(self, topo: ProcessTopology) -> None:
        places = itertools.product(*map(range, topo.dims))
        ranks = [topo.rank(**dict(zip(topo.axes, place, strict=True))) for place in places]
        assert ranks == [*range(topo.world_size())]
        assert [topo.rank(**topo.coordinates(rank)) for rank in ranks] == ranks

    def test_ranks_that_differ_in_the_last_axis_only_are_neighbours(self) -> None:
        assert topology(pipe=2, data=2, tensor=4).rank(pipe=1, data=0, tensor=3) == 11
        apart = topology(pipe=2, data=3, order=("data", "tensor", "pipe"))
        assert [apart.rank(pipe=stage, data=1, tensor=0) for stage in range(2)] == [2, 3]

    @given(topologies)
    def test_coordinates_are_named_in_the_order_of_the_axes(self, topo: ProcessTopology) -> None:
        assert tuple(topo.coordinates(0)) == topo.axes

    @pytest.mark.parametrize(
        "at",
        [
            {},
            {"pipe": 0, "data": 0},
            {"pipe": 0, "data": 2, "tensor": 0},
            {"pipe": 0, "data": 0, "tensor": -1},
            {"pipe": 0, "data": 0, "tensor": 0, "expert": 0},
        ],
    )
    def test_a_place_that_is_not_there_is_refused(self, at: dict[str, int]) -> None:
        with pytest.raises(UsageError, match="there is no place.*name pipe, data, tensor"):
            topology(data=2).rank(**at)

    @pytest.mark.parametrize("rank", [-1, 6])
    def test_a_rank_that_is_not_there_is_refused(self, rank: int) -> None:
        with pytest.raises(
            UsageError, match=f"there is no rank {rank} in pipe 2 × data 3 × tensor 1; it has 6"
        ):
            topology(pipe=2, data=3).coordinates(rank)


class TestGroups:
    @given(topologies, st.sampled_from(AXES))
    def test_each_rank_is_in_one_group_along_an_axis(self, topo: ProcessTopology, axis: str) -> None:
        groups = topo.groups(axis)
        assert sorted(rank for group in groups for rank in group) == [*range(topo.world_size())]
        assert {len(group) for group in groups} == {topo.get_dim(axis)}

    @given(topologies, st.sampled_from(AXES))
    def test_ranks_of_a_group_differ_in_its_axis_only_and_are_in_its_order(
        self, topo: ProcessTopology, axis: str
    ) -> None:
        for group in topo.groups(axis):
            places = [topo.coordinates(rank) for rank in group]
            assert [place.pop(axis) for place in places] == [*range(topo.get_dim(axis))]
            assert all(place == places[0] for place in places)

    def test_along_an_axis_that_it_does_not_have_each_rank_is_alone(self) -> None:
        assert topology(data=3).groups("expert") == [[0], [1], [2]]
        assert topology(data=3).get_dim("expert") == 1

    @given(topologies, st.data())
    def test_ranks_at_a_place_are_those_whose_coordinates_say_so(
        self, topo: ProcessTopology, data: st.DataObject
    ) -> None:
        named = data.draw(st.sets(st.sampled_from(AXES)))
        at = {axis: data.draw(st.integers(0, topo.get_dim(axis) - 1)) for axis in named}
        assert topo.matching(**at) == [
            rank for rank in range(topo.world_size()) if at.items() <= topo.coordinates(rank).items()
        ]


class TestMaking:
    @pytest.mark.parametrize("size", [0, -1, True, 1.0, "2", None])
    def test_a_size_that_is_no_number_of_ranks_is_refused(self, size: Any) -> None:
        with pytest.raises(UsageError, match="data=.* is no number of ranks; it is 1 or more"):
            topology(data=size)

    @pytest.mark.parametrize(
        "order", [(), ("pipe", "data"), ("pipe", "data", "data"), ("pipe", "data", "model")]
    )
    def test_an_order_without_each_axis_once_is_refused(self, order: tuple[str, ...]) -> None:
        with pytest.raises(UsageError, match="it has each of pipe, data, tensor once"):
            topology(order=order)


class TestShards:
    def test_a_model_has_a_shard_for_each_rank(self) -> None:
        topo = topology(pipe=2, tensor=2)
        found = [ModelShardID(ModelName("actor"), topo, rank) for rank in range(topo.world_size())]
        assert found == [ModelShardID(ModelName("actor"), topo, rank) for rank in range(4)]
        assert [shard.place["pipe"] for shard in found] == [0, 0, 1, 1]

    def test_a_shard_has_the_spellings_of_realhf(self) -> None:
        topo = topology(pipe=2, data=2, tensor=3)
        shard = ModelShardID.from_parallelism_rank(ModelName("actor"), topo, 10)
        assert shard == ModelShardID(ModelName("actor"), topo, 10)
        assert (shard.pp_rank, shard.dp_rank, shard.tp_rank) == (1, 1, 1)
        with pytest.raises(UsageError, match="there is no rank 12 in pipe 2 × data 2 × tensor 3; it has 12"):
            ModelShardID.from_parallelism_rank(ModelName("actor"), topo, 12)

    def test_a_text_is_the_name_of_the_first_replica(self) -> None:
        shard: Any = ModelShardID
        assert shard("actor", topology(), 0).model_name == ModelName("actor", 0)

    def test_names_are_written_as_role_and_replica(self) -> None:
        shard = ModelShardID(ModelName("actor", 1), topology(pipe=2), 1)
        assert str(ModelName("actor")) == "actor@0"
        assert str(shard) == "actor@1[pipe 1, data 0, tensor 0]"

    def test_models_are_sorted_by_role_and_then_by_replica(self) -> None:
        names = [ModelName("b"), ModelName("a", 10), ModelName("a", 2)]
        assert [*map(str, sorted(names))] == ["a@2", "a@10", "b@0"]
