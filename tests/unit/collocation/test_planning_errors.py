"""Impossible requests are refused at once, with ones that would fit."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from msgspec.structs import replace

from tests.unit.collocation.brute_force import counts_of, gpu, hosts
from tests.unit.collocation.strategies import inventories, requests
from unirun.collocation import parse_fake
from unirun.collocation.inventory import Device, Inventory, Node, PlacementRequest, RoleRequest
from unirun.collocation.planning import plan, replan
from unirun.collocation.planning.offers import Trials, shortages
from unirun.collocation.planning.problem import Kinds, problem_of
from unirun.errors import PlacementError

PAIR = (gpu("actor", 2), gpu("rollout", 2))


def error(request: PlacementRequest, inventory: Inventory) -> PlacementError:
    with pytest.raises(PlacementError) as caught:
        plan(request, inventory)
    return caught.value


def test_too_few_slots_are_an_error_with_requests_that_fit() -> None:
    found = error(PlacementRequest((gpu("actor", 8), gpu("rollout", 4))), hosts(4, 4))
    assert (found.role, found.needed, found.available, found.constraint) == ("actor", 8, 4, "slots")
    assert found.nearest == ("actor=4", "adding 1 node")
    assert str(found) == (
        "actor needs room for 8 ranks and there is room for 4 besides the other roles "
        "(12 cuda slots are needed, 8 are there, 2 nodes with 4 each); actor=4 fits, or adding 1 node"
    )


def test_collocated_roles_shrink_together() -> None:
    request = PlacementRequest((gpu("actor", 8), gpu("rollout", 8)), collocated=(("actor", "rollout"),))
    assert error(request, hosts(4)).nearest == ("actor=4, rollout=4", "adding 1 node")


@pytest.mark.parametrize(
    ("request_", "inventory", "constraint", "nearest"),
    [
        (
            PlacementRequest((gpu("actor", 4, per_node=4),)),
            hosts(2, 2),
            "actor per_node 4",
            "actor per_node 2",
        ),
        (
            PlacementRequest((gpu("actor", 4, per_group=4),)),
            hosts(2, 2),
            "actor per_group 4",
            "actor per_group 2",
        ),
        (
            PlacementRequest((gpu("actor", 2, devices=("0",)),)),
            hosts(2),
            "actor devices 0",
            "any device for actor",
        ),
        (
            PlacementRequest((gpu("actor", 3, per_group=3),)),
            hosts(2, 2),
            "actor per_group 3",
            "without per_group of actor",
        ),
        (
            PlacementRequest((gpu("actor", 1, slots=Fraction(8)),)),
            hosts(4, 4),
            "actor slots 8",
            "actor slots 4",
        ),
        (PlacementRequest((gpu("actor", 2, slots=Fraction(4)),)), hosts(4), "slots", "actor=1"),
        (
            PlacementRequest((gpu("actor", 3, slots=Fraction(2, 3)),)),
            hosts(2),
            "actor slots 0.667",
            "actor slots 0.5",
        ),
        (PlacementRequest(PAIR[:1], spares=2), hosts(2, 2), "spares 2", "spares 1"),
        (PlacementRequest(PAIR[:1], tainted=frozenset({"n0"})), hosts(2), "excluded n0", "not excluding n0"),
        (
            PlacementRequest(PAIR, apart=(("actor", "rollout"),)),
            hosts(4),
            "apart actor and rollout",
            "without separating actor and rollout",
        ),
        (
            PlacementRequest(PAIR, isolated=(("actor", "rollout"),)),
            hosts(4),
            "isolated actor and rollout",
            "without isolating actor and rollout",
        ),
        (
            PlacementRequest((gpu("actor", 3), gpu("rollout", 2)), together=(("actor", "rollout"),)),
            hosts(3, 3),
            "together actor and rollout",
            "without keeping actor and rollout on one node",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_the_constraint_that_binds_is_named(
    request_: PlacementRequest, inventory: Inventory, constraint: str, nearest: str
) -> None:
    found = error(request_, inventory)
    assert found.constraint == constraint
    assert found.nearest[0] == nearest


def test_all_shortages_that_do_not_depend_on_each_other() -> None:
    found = error(PlacementRequest((gpu("actor", 4, devices=("0",)), gpu("rollout", 9))), hosts(4, 4))
    assert [fault.where for fault in found.faults] == ["actor", "rollout"]
    assert "alone rollout=8 fits" in str(found)
    assert found.nearest == ("actor=2, rollout=6", "adding 2 nodes")


def test_a_type_of_device_that_no_node_has() -> None:
    found = error(PlacementRequest((RoleRequest("actor", 2, 2, "npu"),)), hosts(4))
    assert (found.available, found.nearest) == (0, ())
    assert "2 npu slots are needed, 0 are there" in str(found)


def test_all_faults_of_a_request_at_once() -> None:
    request = PlacementRequest(
        (
            gpu("actor", 2, devices=()),
            gpu("rollout", 2, slots=Fraction(3, 4)),
            gpu("critic", 2, slots=Fraction(1, 2), per_node=2),
            RoleRequest("trainer", 1, 1, None, devices=("0",)),
        ),
        collocated=(("rollout", "critic"),),
        apart=(("rollout", "critic"),),
        isolated=(("rollout", "critic"),),
        together=(("rollout", "critic"),),
    )
    assert [fault.where for fault in error(request, hosts(4)).faults] == [
        "actor.devices",
        "trainer.devices",
        "rollout.slots",
        "host_collocations[0]",
        "isolations[0]",
        "separations[0]",
    ]


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (
            PlacementRequest((gpu("a", 4, per_node=2, per_group=4),)),
            "a.per_node: 2 on a node, but in whole groups it comes in 4s",
        ),
        (PlacementRequest((gpu("a", 5, per_group=2),)), "a: a=5 cannot be cut into parts of a=2"),
    ],
)
def test_ranks_that_make_no_whole_groups_are_told(request_: PlacementRequest, says: str) -> None:
    assert str(error(request_, hosts(8))).startswith(says)


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
    request = PlacementRequest((gpu("a", 2, per_node=2, devices=("0", "1")), other), collocated=(("a", "b"),))
    assert [fault.where for fault in error(request, hosts(4, 4)).faults] == [where]


@pytest.mark.parametrize("device", [None, "cpu", "cuda"])
def test_roles_that_cannot_be_isolated_are_named_and_no_other(device: str | None) -> None:
    roles = (RoleRequest("trainer", 1, 1, device), gpu("actor", 2), gpu("rollout", 2))
    together = (("actor", "rollout"),)
    request = PlacementRequest(roles, together=together, isolated=together)
    assert str(error(request, hosts(8))).startswith("actor needs room for 2 ranks and there is room for 0")


def test_apart_through_a_chain_of_groups() -> None:
    roles = (gpu("a", 2), gpu("b", 2), gpu("c", 2))
    request = PlacementRequest(roles, collocated=(("a", "b"),), together=(("b", "c"),), apart=(("a", "c"),))
    (fault,) = error(request, hosts(8)).faults
    assert str(fault) == (
        "separations[0]: a and c have ranks on the same node, and shall be on different nodes; "
        "a, b and c are joined by collocations or host_collocations: drop one of the two"
    )


def test_replan_on_too_few_nodes_is_an_error() -> None:
    request, inventory = PlacementRequest((gpu("actor", 4),)), hosts(2, 2)
    before = plan(request, inventory)
    with pytest.raises(PlacementError, match="needs room for 4 ranks and there is room for 2"):
        replan(request, inventory, before, frozenset({"n0"}))


def test_replan_without_any_node_is_an_error() -> None:
    request, inventory = PlacementRequest((gpu("actor", 4),)), hosts(2, 2)
    before = plan(request, inventory)
    with pytest.raises(
        PlacementError, match="there is room for 0 .4 cuda slots are needed, 0 are there, no node is left"
    ):
        replan(request, inventory, before, frozenset({"n0", "n1"}))


def with_more(inventory: Inventory, node: Node, number: int) -> Inventory:
    """With so many copies of `node` behind the others."""
    return Inventory((*inventory.nodes, *(replace(node, name=f"more{n}") for n in range(number))))


def check_offers(
    request: PlacementRequest, inventory: Inventory, found: PlacementError | None = None
) -> PlacementError:
    """Every change that is named makes the job fit."""
    found, trials = found or error(request, inventory), Trials(inventory)
    offers = shortages(request, trials)[0].offers
    assert found.nearest == tuple(offer.text for offer in offers)
    for offer in offers:
        there = with_more(inventory, trials.usual(offer.request), offer.more)
        placed = counts_of(plan(offer.request, there))
        assert all(role.least <= placed.get(role.name, 0) for role in offer.request.roles)
        assert offer.more or offer.request != request
    return found


@settings(suppress_health_check=list(HealthCheck))
@given(requests(elastic=True, most=6), inventories())
def test_for_every_request_that_does_not_fit_a_near_one_does(
    request: PlacementRequest, inventory: Inventory
) -> None:
    try:
        plan(request, inventory)
    except PlacementError as found:
        check_offers(request, inventory, found)
        event(found.constraint.split()[0])
        assert found.role in [role.name for role in request.roles]
        assert 0 <= found.available < found.needed
        types = {device.type for node in inventory.nodes for device in node.devices}
        assert found.nearest or not {role.device for role in request.roles} <= {*types, "cpu", None}
    else:
        assume(False)


OTHER = {
    "cpus": (0,),
    "devices": (Device("0", "H"),),
    "memory": 40,
    "numa": ((0, (0, 1)), (1, (2, 3))),
    "component": 1,
    "resources": {"license": 1},
}
"""By field of a node: another value."""


@pytest.mark.parametrize("field", [each for each in Node.__struct_fields__ if each != "name"])
def test_nodes_that_differ_in_what_ranks_may_need_are_tried_each(field: str) -> None:
    needs = {"memory": 30, "license": 1}
    request = PlacementRequest((gpu("a", 1, needs=needs), RoleRequest("b", 1, 1, "cpu", needs={"cpus": 1})))
    (node,) = hosts(2, cpus=4).nodes
    alike, other = replace(node, name="n1"), replace(node, name="n2", **{field: OTHER[field]})
    assert len(Trials(Inventory((node, alike, other))).kinds) == 2
    first, second, third = Kinds(problem_of(request), 1).of([node, alike, other])
    assert first is second is not third


def large(**counts: int) -> tuple[RoleRequest, ...]:
    return tuple(gpu(name, count) for name, count in counts.items())


APART = (("actor", "rollout"),)
HALF, THIRD = Fraction(1, 2), Fraction(1, 3)


@pytest.mark.parametrize(
    ("nodes", "request_", "constraint", "nearest"),
    [
        ("nodes=1000", PlacementRequest(large(actor=8001)), "slots", "actor=8000"),
        ("nodes=1000", PlacementRequest(large(actor=6000, rollout=3000)), "slots", "actor=5000"),
        ("nodes=100", PlacementRequest(large(actor=401, rollout=400), apart=APART), "slots", "actor=400"),
        (
            "nodes=100",
            PlacementRequest(large(actor=399, rollout=401), apart=APART),
            "apart actor and rollout",
            "without separating actor and rollout",
        ),
        (
            "nodes=500",
            PlacementRequest((gpu("actor", 1600, per_group=16),)),
            "actor per_group 16",
            "actor per_group 8",
        ),
        (
            "nodes=500",
            PlacementRequest((gpu("actor", 1600, per_node=16),)),
            "actor per_node 16",
            "actor per_node 8",
        ),
        (
            "nodes=100",
            PlacementRequest((gpu("actor", 50, slots=Fraction(16)),)),
            "actor slots 16",
            "actor slots 8",
        ),
        ("nodes=1000", PlacementRequest((gpu("actor", 16001, slots=HALF),)), "slots", "actor=16000"),
        (
            "nodes=1000",
            PlacementRequest((gpu("actor", 8001, slots=2 * THIRD), gpu("rollout", 4000, slots=THIRD))),
            "actor slots 0.667",
            "actor slots 0.5",
        ),
        (
            "nodes=1,devices=64",
            PlacementRequest(large(actor=30, rollout=30), isolated=APART),
            "isolated actor and rollout",
            "without isolating actor and rollout",
        ),
        ("nodes=1000", PlacementRequest(large(actor=4000, rollout=4000), spares=1), "spares 1", "spares 0"),
        ("nodes=1000", PlacementRequest(large(actor=4000, rollout=3981), spares=5), "spares 5", "spares 2"),
        ("nodes=4", PlacementRequest(large(actor=4), spares=5), "spares 5", "spares 3"),
        pytest.param(
            "nodes=1000",
            PlacementRequest(
                large(actor=8000), tainted=frozenset(f"node{number:03}" for number in range(40))
            ),
            "excluded node000, node001, node002, …",
            "not excluding 40 of the nodes",
            id="forty of a thousand nodes",
        ),
        (
            "nodes=1000",
            PlacementRequest(large(actor=4001, rollout=3000), together=APART),
            "together actor and rollout",
            "without keeping actor and rollout on one node",
        ),
        ("nodes=100", PlacementRequest((gpu("actor", 2000, 900),)), "slots", "actor=800:2000"),
        (
            "nodes=2000",
            PlacementRequest(
                large(**{f"role{n}": 1601 for n in range(10)}), apart=(tuple(f"role{n}" for n in range(10)),)
            ),
            "slots",
            "role0=1528",
        ),
        (
            "nodes=10",
            PlacementRequest((gpu("actor", 90), gpu("rollout", 80, per_group=16))),
            "slots",
            "actor=48, rollout=32 and rollout per_group 8",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_large_jobs_are_told_what_would_fit(
    nodes: str, request_: PlacementRequest, constraint: str, nearest: str
) -> None:
    """Beyond a complete search."""
    inventory = parse_fake(f"fake:devices=8,{nodes}" if "devices" not in nodes else f"fake:{nodes}")
    found = check_offers(request_, inventory)
    assert (found.constraint, found.nearest[0]) == (constraint, nearest)


def test_that_roles_together_could_be_cut_into_smaller_parts() -> None:
    request = PlacementRequest(large(actor=4001, rollout=3000), together=APART)
    assert check_offers(request, parse_fake("fake:nodes=1000,devices=8")).nearest == (
        "without keeping actor and rollout on one node",
        "actor=4000",
    )


def test_several_constraints_that_stand_in_the_way_together() -> None:
    request = PlacementRequest(large(a=2, b=2, c=2), apart=(("a", "b"), ("b", "c")), isolated=(("a", "c"),))
    found = check_offers(request, hosts(8))
    assert found.constraint == "apart a and b, apart b and c, isolated a and c"
    assert found.nearest[0] == (
        "without isolating a and c, without separating a and b and without separating b and c"
    )


def test_resources_that_no_node_has_are_told() -> None:
    request = PlacementRequest((gpu("actor", 2, needs={"license": 2, "cpus": 20}), gpu("rollout", 2)))
    found = check_offers(request, hosts(4, 4))
    assert str(found).startswith(
        "actor needs room for 2 ranks and there is room for 0 besides the other roles (4 cuda slots are needed, "
        "8 are there, 40 cpus (actor 2 × 20) are needed, 32 are there, "
        "4 license (actor 2 × 2) are needed, 0 are there, 2 nodes with 4 each); "
    )
    assert found.nearest == ("without license of actor and actor cpus 16",)


def test_what_kind_of_node_is_missing_where_they_differ() -> None:
    found = check_offers(PlacementRequest(large(actor=21)), hosts(4, 8, 8))
    assert found.nearest == ("actor=20", "adding 1 node like n1")
    assert "20 are there, 3 nodes with at most 8 each" in str(found)
