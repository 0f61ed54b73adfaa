"""Places when some nodes are excluded, or lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.collocation.brute_force import check
from tests.unit.collocation.samples import hosts, job, masks, ranks, role
from unirun.collocation import (
    Device,
    Inventory,
    Node,
    place,
    place_again,
    slot_types,
    unknown_nodes,
)
from unirun.collocation.placing import request_of
from unirun.errors import PlacementError


class TestNodesThatAreExcluded:
    def test_have_no_ranks_and_are_named(self) -> None:
        spec = job(*ranks(actor=4), exclude_nodes=("node1",), spares=1)
        _, placement = place(spec, hosts("nodes=4,devices=2"))
        assert placement.nodes == ("node0", "node2")
        assert (placement.spares, placement.excluded) == (("node3",), ("node1",))
        assert placement.note == "2 nodes in use; node3 held back; node1 excluded"

    def test_may_leave_one_which_is_not_crowded_for_that(self) -> None:
        """As under torchrun, more ranks than devices may be on a node that is alone from the beginning."""
        spec = job(*ranks(actor=4), exclude_nodes=("node0",))
        with pytest.raises(PlacementError, match="not excluding node0 fits"):
            place(spec, hosts("nodes=2,devices=3"))
        _, placement = place(replace(spec, exclude_nodes=()), hosts("nodes=1,devices=3"))
        assert masks(placement) == {"actor": [None] * 4}

    def test_do_not_say_which_devices_there_are(self) -> None:
        gpus, bare = Node("gpus", (0,), (Device("0", "H"),)), Node("bare", (0,))
        spec = job(*ranks(actor=2), exclude_nodes=("gpus",))
        assert slot_types(spec, Inventory((gpus, bare))) == {"actor": "cpu"}
        _, placement = place(spec, Inventory((gpus, bare)))
        assert (placement.nodes, placement.note) == (("bare",), "1 node in use; gpus excluded")

    def test_are_missing_when_all_of_them_are_excluded(self) -> None:
        with pytest.raises(PlacementError, match="room for 0") as caught:
            place(job(*ranks(actor=1), exclude_nodes=("node0",)), hosts("devices=2"))
        assert caught.value.exit_code == 3

    def test_are_looked_for_by_their_names(self) -> None:
        spec = job(*ranks(actor=1), exclude_nodes=("node0", "nod1", "elsewhere"))
        inventory = hosts("nodes=3,devices=1")
        assert unknown_nodes(spec, inventory) == [
            "no node is called elsewhere, so it is not excluded",
            "no node is called nod1, so it is not excluded; did you mean node1?",
        ]
        assert place(spec, inventory)[1].excluded == ("node0",), "a name of yesterday's node is no fault"
        assert not unknown_nodes(job(*ranks(actor=1), exclude_nodes=("node0",)), inventory)


class TestAfterALoss:
    @given(st.integers(1, 4), st.integers(1, 4), st.data())
    def test_only_who_was_there_moves_when_there_is_room(
        self, actors: int, rollouts: int, data: st.DataObject
    ) -> None:
        nodes = hosts("nodes=6,devices=2,cpus=4")
        spec, before = place(
            job(
                role("actor", 2 * actors, slots=0.5, device="cuda"),
                role("rollout", rollouts, device="cuda", per_node=1),
                role("judge", 1, device="cpu"),
                spares=1,
            ),
            nodes,
        )
        gone = data.draw(st.sampled_from(before.nodes))
        _, after = place_again(spec, nodes, before, [gone])
        assert after.lost == (gone,)
        assert gone not in after.nodes
        assert after.masks == before.masks
        left = [node for node in nodes.nodes if node.name != gone]
        check(request_of(spec, nodes), after, left)
        stayed = zip(before.assignments, after.assignments, strict=True)
        assert all(was == now for was, now in stayed if was.node != gone)

    def test_losses_add_up(self) -> None:
        nodes = hosts("nodes=4,devices=2")
        spec, placement = place(job(role("actor", 2, device="cuda"), spares=1), nodes)
        for number in range(3):
            spec, placement = place_again(spec, nodes, placement, [f"node{number}"])
        assert placement.lost == ("node0", "node1", "node2")
        assert placement.nodes == ("node3",)
        assert placement.note.endswith("node0, node1, node2 lost")

    def test_who_moves_is_bound_to_processors_there(self) -> None:
        nodes = hosts("nodes=2,cpus=4")
        spec, placement = place(job(role("judge", 2, device="cpu"), spares=1), nodes)
        _, after = place_again(spec, nodes, placement, ["node0"])
        assert [(each.node, each.cpus) for each in after.assignments] == [("node1", (0,)), ("node1", (1,))]

    def test_with_too_few_nodes_nothing_is_placed(self) -> None:
        nodes = hosts("nodes=2,devices=2")
        spec, placement = place(job(role("actor", 4, device="cuda")), nodes)
        with pytest.raises(PlacementError, match="actor"):
            place_again(spec, nodes, placement, ["node1"])
