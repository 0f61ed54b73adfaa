"""Plans, drawn: a line per node, a column per slot, ranks by the letter of their role.

The first are the three strategies of the DLRover proposal for a unified control plane, and their combinations.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from msgspec.structs import replace

from tests.unit.collocation.brute_force import gpu, hosts
from unirun.collocation.inventory import Inventory, Placement, PlacementRequest, RoleRequest, Ties
from unirun.collocation.planning import plan, replan

ACTOR, ROLLOUT, REWARD = gpu("actor", 4), gpu("rollout", 4), gpu("Reward", 2)
HALF = Fraction(1, 2)


def picture(placement: Placement, inventory: Inventory) -> list[str]:
    """``n0 a0R0 a1R1 | r0 -``: what is on each slot, a bar between NUMA nodes, roles without a slot at the end."""
    lines = []
    for node in inventory.nodes:
        here = [a for a in placement.assignments if a.node == node.name]
        words = [node.name]
        for number, device in enumerate(node.devices):
            if number and device.numa != node.devices[number - 1].numa:
                words.append("|")
            words.append("".join(f"{a.role[0]}{a.rank}" for a in here if device.index in a.own) or "-")
        words += [f"+{a.role[0]}{a.rank}" for a in here if not a.own]
        words += ["spare"] if node.name in placement.spares else []
        lines.append(" ".join(words))
    return lines


def drawn(request: PlacementRequest, inventory: Inventory) -> list[str]:
    return picture(plan(request, inventory), inventory)


def test_device_collocation_roles_share_slots_rank_by_rank() -> None:
    request = PlacementRequest((ACTOR, ROLLOUT), collocated=(("actor", "rollout"),))
    assert drawn(request, hosts(2, 2)) == ["n0 a0r0 a1r1", "n1 a2r2 a3r3"]


def test_host_collocation_roles_are_on_one_node_in_proportion() -> None:
    request = PlacementRequest((ACTOR, REWARD), together=(("actor", "Reward"),))
    assert drawn(request, hosts(3, 3)) == ["n0 a0 a1 R0", "n1 a2 a3 R1"]


def test_separation_no_node_has_both() -> None:
    request = PlacementRequest((ACTOR, REWARD), apart=(("actor", "Reward"),))
    assert drawn(request, hosts(3, 3, 3)) == ["n0 a0 a1 a2", "n1 a3 - -", "n2 R0 R1 -"]


def test_collocated_and_together() -> None:
    request = PlacementRequest(
        (ACTOR, ROLLOUT, REWARD), collocated=(("actor", "rollout"),), together=(("actor", "Reward"),)
    )
    assert drawn(request, hosts(3, 3)) == ["n0 a0r0 a1r1 R0", "n1 a2r2 a3r3 R1"]


def test_collocated_and_apart() -> None:
    request = PlacementRequest(
        (ACTOR, ROLLOUT, REWARD), collocated=(("actor", "rollout"),), apart=(("rollout", "Reward"),)
    )
    assert drawn(request, hosts(4, 4)) == ["n0 a0r0 a1r1 a2r2 a3r3", "n1 R0 R1 - -"]


def test_together_and_apart() -> None:
    request = PlacementRequest(
        (ACTOR, ROLLOUT, REWARD), together=(("actor", "rollout"),), apart=(("actor", "Reward"),)
    )
    assert drawn(request, hosts(4, 4, 4)) == ["n0 a0 a1 r0 r1", "n1 a2 a3 r2 r3", "n2 R0 R1 - -"]


def test_all_three_at_once() -> None:
    critic = gpu("critic", 2)
    request = PlacementRequest(
        (ACTOR, ROLLOUT, critic, REWARD),
        collocated=(("actor", "rollout"),),
        together=(("actor", "critic"),),
        apart=(("critic", "Reward"),),
    )
    assert drawn(request, hosts(3, 3, 3)) == ["n0 a0r0 a1r1 c0", "n1 a2r2 a3r3 c1", "n2 R0 R1 -"]


def test_reinforcement_learning_on_whole_nodes_with_all_strategies() -> None:
    """NVLink joins four devices of eight. Prefill and decode are apart, as such roles are for inference."""
    nodes = hosts(8, 8, 8, numas=2, nvlink=lambda index, _: index // 4)
    roles = (
        *(gpu("actor", 8), gpu("ref", 8), gpu("critic", 4), gpu("Reward", 4)),
        *(gpu("prefill", 4), gpu("decode", 4)),
    )
    request = PlacementRequest(
        roles,
        collocated=(("actor", "ref"),),
        together=(("critic", "Reward"),),
        apart=(("prefill", "decode"),),
    )
    assert drawn(request, nodes) == [
        "n0 a0r0 a1r1 a2r2 a3r3 | p0 p1 p2 p3",
        "n1 a4r4 a5r5 a6r6 a7r7 | d0 d1 d2 d3",
        "n2 c0 c1 c2 c3 | R0 R1 R2 R3",
    ]
    heavy = replace(
        request,
        collocated=(("actor", "ref"), ("critic", "Reward")),
        together=(),
        apart=(("prefill", "decode"), ("actor", "critic")),
        ties=Ties({("actor", "decode"): 9.0, ("prefill", "decode"): 2.0}),
    )
    assert drawn(heavy, nodes) == [
        "n0 a0r0 a1r1 a2r2 a3r3 | p0 p1 p2 p3",
        "n1 a4r4 a5r5 a6r6 a7r7 | d0 d1 d2 d3",
        "n2 c0R0 c1R1 c2R2 c3R3 | - - - -",
    ]


def test_isolated_roles_share_a_host_and_no_numa_node() -> None:
    request = PlacementRequest((gpu("actor", 3), REWARD), isolated=(("actor", "Reward"),))
    assert drawn(request, hosts(8, numas=2)) == ["n0 a0 a1 a2 - | R0 R1 - -"]


def test_together_on_different_numa_nodes() -> None:
    request = PlacementRequest(
        (ACTOR, REWARD), together=(("actor", "Reward"),), isolated=(("actor", "Reward"),)
    )
    assert drawn(request, hosts(4, 4, numas=2)) == ["n0 a0 a1 | R0 -", "n1 a2 a3 | R1 -"]


def test_per_node_spreads_a_role_and_per_group_keeps_ranks_near() -> None:
    assert drawn(PlacementRequest((replace(ACTOR, per_node=2),)), hosts(4, 4)) == [
        "n0 a0 a1 - -",
        "n1 a2 a3 - -",
    ]
    grouped = PlacementRequest((gpu("Reward", 3), replace(ACTOR, per_group=2)))
    assert drawn(grouped, hosts(4, 4, numas=2)) == ["n0 R0 R1 | R2 -", "n1 a0 a1 | a2 a3"]


def test_a_rank_with_two_devices_has_them_from_one_numa_node() -> None:
    request = PlacementRequest((REWARD, gpu("actor", 2, slots=Fraction(2))))
    assert drawn(request, hosts(6, numas=2)) == ["n0 a0 a0 R0 | a1 a1 R1"]
    placement = plan(request, hosts(6, numas=2))
    assert [a.numa for a in placement.of_role("actor")] == [0, 1]
    assert all(a.devices == a.own for a in placement.of_role("actor")), "each sees its own two"


def test_shares_fill_slots() -> None:
    request = PlacementRequest((gpu("actor", 3, slots=HALF), gpu("rollout", 1, slots=HALF), REWARD))
    assert drawn(request, hosts(4)) == ["n0 R0 R1 a0a1 a2r0"]
    assert {a.share for a in plan(request, hosts(4)).of_role("actor")} == {0.5}


def test_named_devices_only() -> None:
    request = PlacementRequest((ACTOR, gpu("Reward", 2, devices=("0", "1"))))
    assert drawn(request, hosts(6)) == ["n0 R0 R1 a0 a1 a2 a3"]


def test_heavy_pairs_are_on_one_node() -> None:
    roles = (gpu("actor", 2), gpu("critic", 2), gpu("rollout", 2), gpu("Reward", 2))
    request = PlacementRequest(
        roles, ties=Ties({("actor", "Reward"): 9.0, ("critic", "rollout"): 9.0, ("actor", "critic"): 1})
    )
    assert drawn(request, hosts(4, 4)) == ["n0 a0 a1 R0 R1", "n1 c0 c1 r0 r1"]
    assert plan(request, hosts(4, 4)).crossing == 1.0


def test_roles_without_device_are_where_they_talk_most() -> None:
    trainer = RoleRequest("trainer", 1, 1, None)
    request = PlacementRequest((ACTOR, ROLLOUT, trainer), apart=(("actor", "rollout"),))
    assert drawn(request, hosts(4, 4)) == ["n0 a0 a1 a2 a3 +t0", "n1 r0 r1 r2 r3"]
    talks = replace(request, ties=Ties({("trainer", "rollout"): 2.0, ("actor", "trainer"): 1.0}))
    assert drawn(talks, hosts(4, 4)) == ["n0 a0 a1 a2 a3", "n1 r0 r1 r2 r3 +t0"]


def test_elastic_roles_share_what_there_is() -> None:
    request = PlacementRequest((gpu("actor", 8, 1), gpu("rollout", 8, 1), REWARD))
    assert drawn(request, hosts(4, 4)) == ["n0 a0 a1 a2 r0", "n1 r1 r2 R0 R1"]


def test_spares_are_the_last_nodes_and_tainted_ones_are_not_used() -> None:
    request = PlacementRequest((ACTOR,), spares=1, tainted=frozenset({"n0"}))
    assert drawn(request, hosts(4, 4, 4)) == ["n0 - - - -", "n1 a0 a1 a2 a3", "n2 - - - - spare"]


def test_a_lost_node_is_replaced_by_a_spare_and_nobody_else_moves() -> None:
    inventory = hosts(3, 3, 3, 3)
    request = PlacementRequest((ACTOR, REWARD), together=(("actor", "Reward"),), spares=2)
    before = plan(request, inventory)
    assert picture(before, inventory) == ["n0 a0 a1 R0", "n1 a2 a3 R1", "n2 - - - spare", "n3 - - - spare"]
    after = replan(request, inventory, before, frozenset({"n0"}))
    assert picture(after, inventory) == ["n0 - - -", "n1 a2 a3 R1", "n2 a0 a1 R0", "n3 - - - spare"]
    again = replan(request, inventory, after, frozenset({"n0", "n1"}))
    assert picture(again, inventory) == ["n0 - - -", "n1 - - -", "n2 a0 a1 R0", "n3 a2 a3 R1"]


def test_without_a_spare_free_slots_are_used_and_masks_of_survivors_stay() -> None:
    inventory = hosts(4, 4)
    request = PlacementRequest((gpu("actor", 2), REWARD), apart=())
    spread = replace(request, apart=(("actor", "Reward"),))
    before = plan(spread, inventory)
    assert picture(before, inventory) == ["n0 a0 a1 - -", "n1 R0 R1 - -"]
    after = replan(request, inventory, before, frozenset({"n0"}))
    assert picture(after, inventory) == ["n0 - - - -", "n1 R0 R1 a0 a1"]
    assert after.of_role("Reward") == before.of_role("Reward")


def test_an_elastic_role_shrinks_rather_than_that_others_move() -> None:
    inventory = hosts(2, 2)
    request = PlacementRequest((gpu("actor", 4, 1),))
    before = plan(request, inventory)
    after = replan(request, inventory, before, frozenset({"n0"}))
    assert picture(after, inventory) == ["n0 - -", "n1 a0 a1"]


def test_as_few_survivors_as_can_be_move_when_there_is_no_other_way() -> None:
    inventory = hosts(2, 2, 2)
    request = PlacementRequest((gpu("Reward", 2), gpu("actor", 1, slots=Fraction(2))))
    spread = replace(request, roles=(gpu("Reward", 2, per_node=1), request.roles[1]))
    before = plan(spread, inventory)
    assert picture(before, inventory) == ["n0 R0 -", "n1 R1 -", "n2 a0 a0"]
    after = replan(request, inventory, before, frozenset({"n2"}))
    assert picture(after, inventory) == ["n0 R0 R1", "n1 a0 a0", "n2 - -"]


def test_a_device_that_is_gone_moves_its_rank_only() -> None:
    inventory = hosts(3, 3)
    request = PlacementRequest((gpu("actor", 2), REWARD))
    before = plan(request, inventory)
    assert picture(before, inventory) == ["n0 a0 a1 -", "n1 R0 R1 -"]
    sick = inventory.nodes[0]
    rest = Inventory((replace(sick, devices=sick.devices[1:]), inventory.nodes[1]))
    after = replan(request, rest, before, frozenset())
    assert picture(after, rest) == ["n0 a1 a0", "n1 R0 R1 -"]
    assert [(a.rank, a.own, a.local_rank) for a in after.of_role("actor")] == [(0, ("2",), 1), (1, ("1",), 0)]


def test_cpu_jobs_have_a_place_per_processor_and_more_when_it_takes_more() -> None:
    def nodes(count: int) -> list[int]:
        placement = plan(PlacementRequest((RoleRequest("actor", count, count),)), hosts(0, 0, cpus=4))
        return [sum(a.node == node for a in placement.assignments) for node in ("n0", "n1")]

    assert nodes(4) == [4, 0]
    assert nodes(6) == [4, 2]
    assert nodes(16) == [8, 8]


@pytest.mark.parametrize("count", range(1, 20))
def test_processes_that_are_more_than_processors_are_spread_over_the_numa_nodes(count: int) -> None:
    (node,) = hosts(0, cpus=4).nodes
    numa = replace(node, numa=((0, (0, 1)), (1, (2, 3))))
    placement = plan(PlacementRequest((RoleRequest("actor", count, count),)), Inventory((numa,)))
    of = Counter(each.numa for each in placement.assignments)
    assert all(2 * (count // 4) <= of[number] <= 2 * -(-count // 4) for number in range(2)), of
