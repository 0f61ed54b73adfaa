"""What cannot be is said at once, with what would fit."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, assume, given, settings

from tests.unit.collocation.checking import gpu, hosts
from tests.unit.collocation.requests import inventories, requests
from unirun.collocation.inventory import Inventory
from unirun.collocation.placement import Placement
from unirun.collocation.planning import plan, replan
from unirun.collocation.request import Request, RoleRequest
from unirun.errors import PlacementError

PAIR = (gpu("actor", 2), gpu("rollout", 2))


def error(request: Request, inventory: Inventory) -> PlacementError:
    with pytest.raises(PlacementError) as caught:
        plan(request, inventory)
    return caught.value


def test_too_few_slots() -> None:
    found = error(Request((gpu("actor", 8), gpu("rollout", 4))), hosts(4, 4))
    assert (found.role, found.needed, found.available, found.constraint) == ("actor", 8, 4, "slots")
    assert found.nearest == ("actor=4",)
    assert str(found) == (
        "actor needs room for 8 ranks and there is room for 4 besides the other roles "
        "(slots; 12 cuda slots are needed, 8 are there, 2 nodes); actor=4 fits"
    )


def test_collocated_roles_shrink_together() -> None:
    request = Request((gpu("actor", 8), gpu("rollout", 8)), collocated=(("actor", "rollout"),))
    assert error(request, hosts(4)).nearest == ("actor=4, rollout=4",)


@pytest.mark.parametrize(
    ("request_", "inventory", "constraint", "nearest"),
    [
        (Request((gpu("actor", 4, per_node=4),)), hosts(2, 2), "actor per_node 4", "actor per_node 2"),
        (
            Request((gpu("actor", 4, per_group=4),)),
            hosts(2, 2),
            "actor per_group 4",
            "without per_group of actor",
        ),
        (Request((gpu("actor", 2, devices=("0",)),)), hosts(2), "actor devices 0", "any device for actor"),
        (Request((gpu("actor", 2, slots=Fraction(4)),)), hosts(4), "actor slots 4", "actor slots 2"),
        (Request(PAIR[:1], spares=2), hosts(2, 2), "spares 2", "spares 1"),
        (Request(PAIR[:1], tainted=frozenset({"n0"})), hosts(2), "tainted n0", "node n0 untainted"),
        (
            Request(PAIR, apart=(("actor", "rollout"),)),
            hosts(4),
            "apart actor and rollout",
            "without separating actor and rollout",
        ),
        (
            Request(PAIR, isolated=(("actor", "rollout"),)),
            hosts(4),
            "isolated actor and rollout",
            "without isolating actor and rollout",
        ),
        (
            Request((gpu("actor", 3), gpu("rollout", 2)), together=(("actor", "rollout"),)),
            hosts(3, 3),
            "together actor and rollout",
            "without keeping on one node actor and rollout",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_the_constraint_that_binds_is_named(
    request_: Request, inventory: Inventory, constraint: str, nearest: str
) -> None:
    found = error(request_, inventory)
    assert found.constraint == constraint
    assert found.nearest[0] == nearest


def test_all_shortages_that_do_not_depend_on_each_other() -> None:
    found = error(Request((gpu("actor", 4, devices=("0",)), gpu("rollout", 9))), hosts(4, 4))
    assert [fault.where for fault in found.faults] == ["actor", "rollout"]
    assert "rollout=8 would fit alone" in str(found)
    assert found.nearest == (), "no single change is enough"


def test_a_type_of_device_that_no_node_has() -> None:
    found = error(Request((RoleRequest("actor", 2, 2, "npu"),)), hosts(4))
    assert (found.available, found.nearest) == (0, ())
    assert "2 npu slots are needed, 0 are there" in str(found)


def test_all_faults_of_a_request_at_once() -> None:
    request = Request(
        (
            gpu("actor", 2, per_group=3),
            gpu("rollout", 2, slots=Fraction(3, 4)),
            gpu("critic", 2, slots=Fraction(1, 2), per_node=2),
            gpu("reward", 4, 5, slots=Fraction(3, 2), devices=()),
            RoleRequest("trainer", 1, 1, None, devices=("0",)),
        ),
        collocated=(("rollout", "critic"),),
        apart=(("rollout", "critic"),),
        isolated=(("rollout", "critic"),),
        together=(("rollout", "critic"),),
        spares=-1,
    )
    assert [fault.where for fault in error(request, hosts(4)).faults] == [
        "actor.per_group",
        "reward.least",
        "reward.slots",
        "reward.devices",
        "trainer.devices",
        "spares",
        "rollout.slots",
        "together[0]",
        "isolated[0]",
        "apart[0]",
    ]


def test_groups_of_roles_that_are_not_there() -> None:
    request = Request(
        PAIR, collocated=(("actor", "ref"),), together=(("actor", "actor"),), weights={("x", "actor"): -1}
    )
    assert [str(fault) for fault in error(request, hosts(4)).faults] == [
        "collocated[0]: there is no role ref; there are actor, rollout",
        "together[0]: actor is in it twice",
        "weights[x, actor]: there is no role x; there are actor, rollout",
        "weights[x, actor]: expected 0 or more bytes per step, found -1",
    ]


@pytest.mark.parametrize(
    ("other", "where"),
    [
        (gpu("b", 4), "a.count"),
        (RoleRequest("b", 2, 2, "cpu"), "a.device"),
        (RoleRequest("b", 2, 2, None), "a.device"),
        (gpu("b", 2, per_node=1), "a.per_node"),
        (gpu("b", 2, slots=Fraction(2)), "a.slots"),
        (gpu("b", 2, slots=Fraction(1, 2)), "a.slots"),
        (gpu("b", 2, devices=("7",)), "a.devices"),
    ],
    ids=["count", "type", "none", "per_node", "width", "share", "devices"],
)
def test_collocated_roles_that_differ(other: RoleRequest, where: str) -> None:
    request = Request((gpu("a", 2, per_node=2, devices=("0", "1")), other), collocated=(("a", "b"),))
    assert [fault.where for fault in error(request, hosts(4, 4)).faults] == [where]


def test_apart_through_a_chain_of_groups() -> None:
    roles = (gpu("a", 2), gpu("b", 2), gpu("c", 2))
    request = Request(roles, collocated=(("a", "b"),), together=(("b", "c"),), apart=(("a", "c"),))
    (fault,) = error(request, hosts(8)).faults
    assert str(fault) == (
        "apart[0]: a and c have ranks on the same node, and shall be on different nodes; "
        "a, b and c are collocated or together: drop one of the two"
    )


def test_what_is_left_is_too_little_to_plan_again() -> None:
    request, inventory = Request((gpu("actor", 4),)), hosts(2, 2)
    before = plan(request, inventory)
    with pytest.raises(PlacementError, match="needs room for 4 ranks and there is room for 2"):
        replan(request, inventory, before, frozenset({"n0"}))


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(requests(), inventories())
def test_fewer_ranks_that_are_offered_do_fit(request: Request, inventory: Inventory) -> None:
    try:
        plan(request, inventory)
    except PlacementError as found:
        offers = [offer for offer in found.nearest if "=" in offer]
        assume(offers)
        for offer in offers:
            counts = {name: int(count) for name, count in (part.split("=") for part in offer.split(", "))}
            roles = tuple(
                replace(r, count=counts.get(r.name, r.count), least=counts.get(r.name, r.least))
                for r in request.roles
            )
            assert isinstance(plan(replace(request, roles=roles), inventory), Placement)
    else:
        assume(False)
