"""Roles that may be on any node: they change nothing for the others."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.collocation.brute_force import gpu, hosts
from tests.unit.collocation.strategies import inventories, requests
from unirun.collocation.inventory import Inventory, Placement, PlacementRequest, RoleRequest, Ties
from unirun.collocation.planning import plan, replan
from unirun.collocation.planning.plan import find
from unirun.errors import PlacementError

slow = settings(suppress_health_check=list(HealthCheck))


def service(name: str, count: int, **more: object) -> RoleRequest:
    return RoleRequest(name, count, count, None, **more)  # type: ignore[arg-type]


@st.composite
def beside(draw: st.DrawFn, request: PlacementRequest) -> PlacementRequest:
    """`request` with further roles that need no slot."""
    roles = list(request.roles)
    for name in "xyz"[: draw(st.integers(1, 3))]:
        per_group = draw(st.sampled_from([None, None, 2]))
        added = service(name, draw(st.integers(1, 20)) * (per_group or 1), per_group=per_group)
        roles.insert(draw(st.integers(0, len(roles))), added)
    return replace(request, roles=tuple(roles))


def of_roles(request: PlacementRequest, placement: Placement) -> list[object]:
    return [placement.of_role(role.name) for role in request.roles]


@slow
@given(requests(elastic=True, most=20), inventories(most=6), st.data())
def test_the_others_are_where_they_would_be_without_them(
    request: PlacementRequest, inventory: Inventory, data: st.DataObject
) -> None:
    more = data.draw(beside(request))
    alone, placement = find(request, inventory), find(more, inventory)
    # A role that may have no ranks at all needs no node.
    assume(alone is not None and alone.assignments)
    assert alone is not None
    assert placement is not None, "they need no room"
    usable = {node.name for node in inventory.nodes} - request.tainted - {*alone.spares}
    gone: frozenset[str] = frozenset()
    for _ in range(3):
        assert of_roles(request, placement) == of_roles(request, alone)
        assert placement.crossing == alone.crossing
        for role in more.roles:
            if role not in request.roles:
                seats = placement.of_role(role.name)
                assert [(each.slot, each.own, each.devices, each.cpus) for each in seats] == [
                    (-1, (), None, None)
                ] * role.count
                assert {each.node for each in seats} <= usable
                local = sorted((each.node, each.local_rank) for each in seats)
                assert len({*local}) == len(local)
        gone |= {data.draw(st.sampled_from(inventory.names))}
        usable = {node.name for node in inventory.nodes} - request.tainted - gone
        try:
            alone = replan(request, inventory, alone, gone)
        except PlacementError:
            with pytest.raises(PlacementError):
                replan(more, inventory, placement, gone)
            return
        if not alone.assignments:
            return
        placement = replan(more, inventory, placement, gone)


def test_they_are_on_a_node_that_is_in_use() -> None:
    request = PlacementRequest((service("engine", 40), gpu("actor", 4)), spares=1)
    placement = plan(request, hosts(2, 4, 4))
    assert {each.node for each in placement.of_role("actor")} == {"n1"}
    assert {each.node for each in placement.of_role("engine")} == {"n1"}
    assert [each.local_rank for each in placement.of_role("engine")] == [*range(40)]


def test_constraints_and_edges_that_name_them_are_kept() -> None:
    roles = (gpu("actor", 4), service("engine", 1), service("judge", 1, component=0), service("proxy", 2))
    request = PlacementRequest(roles, apart=(("actor", "engine"),), ties=Ties({("actor", "proxy"): 1.0}))
    placement = plan(request, hosts(4, 4))
    nodes = {role.name: {each.node for each in placement.of_role(role.name)} for role in roles}
    assert nodes["actor"].isdisjoint(nodes["engine"])
    assert nodes["proxy"] == nodes["actor"]
    with pytest.raises(PlacementError, match=r"without separating actor and engine"):
        plan(request, hosts(4))
    (alone, *_) = plan(PlacementRequest((service("engine", 4, per_node=1),)), hosts(0, 0, 0, 0)).assignments
    assert alone.node == "n0"


def test_they_stay_when_another_node_is_lost_and_move_to_one_in_use_when_theirs_is() -> None:
    request = PlacementRequest(
        (gpu("actor", 2), gpu("critic", 1, slots=Fraction(2)), service("engine", 2)), spares=1
    )
    inventory = hosts(2, 2, 2)
    before = plan(request, inventory)
    assert {each.node for each in before.of_role("engine")} == {"n0"}
    kept = replan(request, inventory, before, frozenset({"n1"}))
    assert kept.of_role("engine") == before.of_role("engine")
    moved = replan(request, inventory, before, frozenset({"n0"}))
    assert {each.node for each in moved.of_role("engine")} <= {each.node for each in moved.of_role("actor")}


def test_a_job_of_nothing_else_is_on_one_node_and_needs_one() -> None:
    request = PlacementRequest(tuple(service(f"s{number}", 1) for number in range(100)), spares=1)
    placement = plan(request, hosts(0, 0, 0))
    assert placement.nodes == ("n0",)
    assert (placement.spares, placement.note) == (("n2",), "1 node in use; n2 held back")
    again = replan(request, hosts(0, 0, 0), placement, frozenset({"n0", "n1"}))
    assert (again.nodes, again.spares, again.note) == (("n2",), (), "1 node in use")
    with pytest.raises(PlacementError, match="s0 needs room for 1 rank and there is room for 0"):
        plan(replace(request, roles=request.roles[:1]), hosts(0))
    for spares in (3, 4, 5):
        with pytest.raises(PlacementError, match="s0 needs room for 1 rank and there is room for 0"):
            plan(replace(request, roles=request.roles[:1], spares=spares), hosts(0, 0, 0))


def test_what_does_not_fit_is_told_of_those_that_need_slots() -> None:
    request = PlacementRequest((service("engine", 3), gpu("actor", 4)))
    with pytest.raises(PlacementError, match=r"actor needs room for 4 ranks and there is room for 2 \("):
        plan(request, hosts(2))
