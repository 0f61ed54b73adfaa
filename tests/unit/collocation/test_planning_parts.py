"""Roles that wait for each other are the unit of scheduling: each group of them is on as few nodes as it can be."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.collocation.brute_force import gpu, hosts
from tests.unit.collocation.test_planning_pictures import drawn, picture
from unirun.collocation.inventory import Placement, PlacementRequest, RoleRequest, Ties
from unirun.collocation.planning import plan, replan

ROLES = (gpu("actor", 2), gpu("critic", 2), gpu("rollout", 2), gpu("Reward", 2))
RING = dict.fromkeys(
    [("actor", "rollout"), ("rollout", "critic"), ("critic", "Reward"), ("Reward", "actor")], 5.0
)
"""With it as much goes between nodes when rollouts are with the actors as when they are with the critics."""


def parts_on(placement: Placement, parts: Sequence[Sequence[str]]) -> list[int]:
    """The number of nodes that each of `parts` is on."""
    return [len({a.node for role in part for a in placement.of_role(role)}) for part in parts]


class TestWhatAPlanGoesBy:
    def test_parts_decide_where_weights_do_not(self) -> None:
        ties = Ties(RING, (("actor", "rollout"), ("critic", "Reward")))
        assert drawn(PlacementRequest(ROLES, ties=ties), hosts(4, 4)) == ["n0 a0 a1 r0 r1", "n1 c0 c1 R0 R1"]
        others = Ties(RING, (("actor", "Reward"), ("critic", "rollout")))
        assert drawn(PlacementRequest(ROLES, ties=others), hosts(4, 4)) == [
            "n0 a0 a1 R0 R1",
            "n1 c0 c1 r0 r1",
        ]

    def test_what_goes_between_nodes_comes_before_parts(self) -> None:
        """Two that do not wait for each other may have more to say than two that do."""
        ties = Ties(RING | {("rollout", "critic"): 5.1}, (("actor", "rollout"), ("critic", "Reward")))
        assert drawn(PlacementRequest(ROLES, ties=ties), hosts(4, 4)) == ["n0 a0 a1 R0 R1", "n1 c0 c1 r0 r1"]

    def test_parts_come_before_few_nodes(self) -> None:
        roles = tuple(gpu(name, 1) for name in "abcdef")
        pairs = (("a", "b"), ("c", "d"), ("e", "f"))
        assert drawn(PlacementRequest(roles), hosts(3, 3, 3)) == ["n0 a0 b0 c0", "n1 d0 e0 f0", "n2 - - -"]
        tied = PlacementRequest(roles, ties=Ties(parts=pairs))
        assert drawn(tied, hosts(3, 3, 3)) == ["n0 a0 b0 -", "n1 c0 d0 -", "n2 e0 f0 -"]
        assert drawn(tied, hosts(3, 3)) == ["n0 a0 b0 c0", "n1 d0 e0 f0"], (
            "which does not mean that none fits"
        )

    def test_a_part_that_is_the_whole_job_changes_nothing(self) -> None:
        whole = Ties(RING, (tuple(role.name for role in ROLES),))
        assert plan(PlacementRequest(ROLES, ties=whole), hosts(4, 4)) == plan(
            PlacementRequest(ROLES, ties=Ties(RING)), hosts(4, 4)
        )

    def test_a_role_without_slots_is_with_those_that_it_waits_for(self) -> None:
        trainer = RoleRequest("trainer", 1, 1, None)
        roles = (gpu("actor", 4), gpu("rollout", 4), trainer)
        request = PlacementRequest(roles, apart=(("actor", "rollout"),))
        for other, there in (("actor", 0), ("rollout", 1)):
            tied = replace(request, ties=Ties(parts=((other, "trainer"),)))
            (seat,) = plan(tied, hosts(4, 4)).of_role("trainer")
            assert seat.node == f"n{there}"

    def test_parts_with_roles_that_share_nodes_are_one(self) -> None:
        """A critic is where an actor is, so rewards that wait for it are better there as well."""
        request = PlacementRequest(
            (gpu("Reward", 1), gpu("other", 1), gpu("actor", 1), gpu("critic", 1)),
            collocated=(("actor", "critic"),),
            ties=Ties(parts=(("actor",), ("critic", "Reward"), ("other",))),
        )
        assert drawn(request, hosts(2, 2)) == ["n0 R0 a0c0", "n1 o0 -"]


class TestThousandsOfRanks:
    """Plans so large that nodes are filled, and not all possibilities are looked at."""

    @given(
        st.lists(st.tuples(st.integers(1, 150), st.integers(1, 150)), min_size=2, max_size=4),
        st.integers(0, 40),
        st.sampled_from([4, 8]),
    )
    def test_every_part_has_the_fewest_nodes_when_there_are_some_more(
        self, pairs: list[tuple[int, int]], alone: int, size: int
    ) -> None:
        """The roles that wait for each other are far from each other in the order of the job."""
        parts = [(f"a{number}", f"b{number}") for number in range(len(pairs))]
        counts = {first: each for (first, _), (each, _) in zip(parts, pairs, strict=True)}
        counts |= {"alone": alone} if alone else {}
        counts |= {second: each for (_, second), (_, each) in zip(parts, pairs, strict=True)}
        fewest = [-(-sum(pair) // size) for pair in pairs]
        roles = tuple(gpu(name, count) for name, count in counts.items())
        request = PlacementRequest(roles, ties=Ties(parts=tuple(parts)))
        placement = plan(request, hosts(*[size] * (sum(fewest) + -(-alone // size))))
        assert parts_on(placement, parts) == fewest

    def test_every_part_has_the_fewest_nodes_when_all_are_full(self) -> None:
        """500, 368 and 732 ranks on 200 nodes of eight."""
        parts = (("actor", "rollout"), ("critic", "reward"), ("prefill", "decode"))
        counts = {"actor": 200, "critic": 188, "prefill": 402, "rollout": 300, "reward": 180, "decode": 330}
        roles = tuple(gpu(name, count) for name, count in counts.items())
        weights = {("actor", "rollout"): 9e9, ("critic", "reward"): 9e9, ("prefill", "decode"): 9e9}
        for ties in (Ties(parts=parts), Ties(weights, parts)):
            placement = plan(PlacementRequest(roles, ties=ties), hosts(*[8] * 200))
            assert parts_on(placement, parts) == [63, 46, 92]
        without = plan(PlacementRequest(roles, ties=Ties(weights)), hosts(*[8] * 200))
        assert sum(parts_on(without, parts)) > 63 + 46 + 92

    def test_parts_are_as_near_on_nodes_of_several_sizes(self) -> None:
        inventory = hosts(*[2] * 60, *[8] * 30, *[4] * 30)
        counts = {"a": 60, "c": 40, "b": 60, "d": 36}
        roles = tuple(gpu(name, count) for name, count in counts.items())
        placement = plan(PlacementRequest(roles, ties=Ties(parts=(("a", "b"), ("c", "d")))), inventory)
        assert parts_on(placement, [("a", "b"), ("c", "d")]) == [15, 10], "120 of 8 each, and 76"
        assert len(placement.nodes) == 25

    def test_shares_of_slots_and_constraints_are_kept_with_it(self) -> None:
        roles = (
            gpu("actor", 40, slots=Fraction(1, 2)),
            gpu("critic", 40, per_node=4),
            gpu("rollout", 60),
            gpu("reward", 20, slots=Fraction(2)),
        )
        parts = (("actor", "rollout"), ("critic", "reward"))
        placement = plan(PlacementRequest(roles, ties=Ties(parts=parts)), hosts(*[8] * 30))
        assert parts_on(placement, parts) == [10, 10], "80 slots each"


class TestAfterALoss:
    @pytest.mark.parametrize(("other", "home"), [("actor", 0), ("critic", 1), ("rollout", 2)])
    def test_ranks_go_to_nodes_that_have_their_part(self, other: str, home: int) -> None:
        inventory = hosts(4, 4, 4, 2)
        before = plan(PlacementRequest(ROLES, apart=(tuple(role.name for role in ROLES),)), inventory)
        lines = ["n0 a0 a1 - -", "n1 c0 c1 - -", "n2 r0 r1 - -", "n3 R0 R1"]
        assert picture(before, inventory) == lines
        request = PlacementRequest(ROLES, ties=Ties(parts=((other, "Reward"),)))
        lines[home] = lines[home].replace("- -", "R0 R1")
        assert picture(replan(request, inventory, before, frozenset({"n3"})), inventory) == [
            *lines[:3],
            "n3 - -",
        ]

    @pytest.mark.parametrize("size", [8, 32], ids=["few", "many"])
    def test_ranks_do_not_go_to_nodes_of_others_to_fill_them(self, size: int) -> None:
        """Each part leaves two slots free on its last node. When that of the one is lost, there are also new nodes."""
        parts = (("actor", "rollout"), ("critic", "reward"))
        half = 75 * size // 2
        roles = (gpu("actor", half), gpu("critic", half), gpu("rollout", half - 2), gpu("reward", half - 2))
        request = PlacementRequest(roles, ties=Ties(parts=parts))
        inventory = hosts(*[size] * 160)
        before = plan(request, inventory)
        assert parts_on(before, parts) == [75, 75]
        for part in parts:
            ends = [a.node for a in before.assignments if a.role in part]
            last = next(node for node in ends if ends.count(node) < size)
            assert parts_on(replan(request, inventory, before, frozenset({last})), parts) == [75, 75]


class TestWords:
    def test_the_note_names_parts_that_are_on_some_nodes_only(self) -> None:
        ties = Ties(parts=(("actor", "rollout"), ("critic",), ("Reward",)))
        placement = plan(PlacementRequest(ROLES, ties=ties), hosts(4, 4))
        assert placement.note == "2 nodes in use; actor and rollout, which wait for each other, on 1 node"
        narrow = plan(PlacementRequest(ROLES, ties=ties), hosts(2, 2, 2, 2))
        assert "actor and rollout, which wait for each other, on 2 nodes" in narrow.note

    def test_the_note_leaves_out_roles_without_slots(self) -> None:
        trainer = RoleRequest("trainer", 1, 1, None)
        ties = Ties(parts=(("actor", "trainer"),))
        assert plan(PlacementRequest((*ROLES, trainer), ties=ties), hosts(4, 4)).note == "2 nodes in use"

    def test_the_note_leaves_out_parts_on_all_nodes(self) -> None:
        ties = Ties(parts=(("actor", "rollout"),))
        assert plan(PlacementRequest(ROLES[::2], ties=ties), hosts(2, 2)).note == "2 nodes in use"
