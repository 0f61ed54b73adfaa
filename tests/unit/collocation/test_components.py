"""Roles on the nodes of one component of a heterogeneous Slurm job."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.collocation.brute_force import gpu, hosts
from unirun.collocation.inventory import Inventory, PlacementRequest, RoleRequest
from unirun.collocation.planning import plan, replan
from unirun.errors import PlacementError


def two_components(*components: int, devices: int = 4) -> Inventory:
    nodes = hosts(*[devices] * len(components)).nodes
    return Inventory(tuple(replace(node, component=at) for node, at in zip(nodes, components, strict=True)))


@pytest.mark.parametrize("ranks", [2, 200])
def test_ranks_are_on_the_nodes_of_their_roles_component(ranks: int) -> None:
    """Also where there is too much to place for a complete search."""
    count = ranks // 2
    inventory = two_components(*[0, 1] * count)
    request = PlacementRequest(
        (
            gpu("actor", ranks, component=1),
            gpu("rollout", ranks, component=0),
            RoleRequest("judge", ranks, ranks, "cpu", component=1),
            RoleRequest("trainer", 1, 1, None, component=1),
            gpu("critic", ranks),
        )
    )
    placement = plan(request, inventory)
    component = {node.name: node.component for node in inventory.nodes}
    found = {role.name: {component[a.node] for a in placement.of_role(role.name)} for role in request.roles}
    assert (found["actor"], found["rollout"], found["judge"], found["trainer"]) == ({1}, {0}, {1}, {1})


def test_a_role_without_a_component_may_be_anywhere() -> None:
    request = PlacementRequest((gpu("actor", 4, component=1), gpu("rollout", 8)))
    placement = plan(request, two_components(0, 1, 0))
    assert placement.nodes == ("n1", "n0", "n2")


def test_ranks_of_a_lost_node_stay_within_their_component() -> None:
    inventory = two_components(0, 1, 1, 1)
    request = PlacementRequest((gpu("actor", 4, component=1), gpu("rollout", 2, component=0)))
    before = plan(request, inventory)
    (first,) = {a.node for a in before.of_role("actor")}
    after = replan(request, inventory, before, frozenset([first]))
    assert {a.node for a in after.of_role("actor")} < {"n1", "n2", "n3"} - {first}
    with pytest.raises(PlacementError):
        replan(request, inventory, before, frozenset(["n1", "n2", "n3"]))


def test_too_small_a_component_is_told() -> None:
    request = PlacementRequest((gpu("actor", 5, component=1),))
    with pytest.raises(PlacementError) as caught:
        plan(request, two_components(0, 1))
    assert "actor in any component" in caught.value.nearest


def test_roles_on_the_same_nodes_are_of_one_component() -> None:
    request = PlacementRequest((gpu("a", 1, component=0), gpu("b", 1, component=1)), together=(("a", "b"),))
    with pytest.raises(PlacementError, match="a and b share nodes, and differ in component: a 0, b 1"):
        plan(request, two_components(0, 1))
