"""What holds for every plan, beside a search that looks at everything."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from tests.unit.collocation.checking import (
    all_counts,
    all_nodes,
    check,
    counts_of,
    crossing,
    in_rank_order,
    may_stay,
    nodes_of,
    usable,
)
from tests.unit.collocation.requests import inventories, requests
from unirun.collocation.inventory import Inventory
from unirun.collocation.placement import Placement
from unirun.collocation.planning import plan, replan
from unirun.collocation.request import Request
from unirun.errors import PlacementError

slow = settings(deadline=None, suppress_health_check=list(HealthCheck))


def planned(request: Request, inventory: Inventory) -> Placement | None:
    try:
        return plan(request, inventory)
    except PlacementError:
        return None


@slow
@given(requests(most=6), inventories())
def test_every_constraint_is_kept(request: Request, inventory: Inventory) -> None:
    placement = planned(request, inventory)
    event("fits" if placement else "does not fit")
    if placement is not None:
        check(request, placement, usable(request, inventory))
        assert in_rank_order(request, placement, inventory)
        assert placement.crossing == pytest.approx(crossing(request, nodes_of(request, placement)))


@slow
@given(requests(elastic=True, most=30), inventories(most=30), st.data())
def test_every_constraint_is_kept_where_nodes_are_filled_one_after_the_other(
    request: Request, inventory: Inventory, data: st.DataObject
) -> None:
    """These are mostly too large for a complete search."""
    placement = planned(request, inventory)
    assume(placement is not None)
    assert placement is not None
    check(request, placement, usable(request, inventory))
    assert in_rank_order(request, placement, inventory)
    lost = frozenset({data.draw(st.sampled_from([node.name for node in inventory.nodes]))})
    left = [n for n in inventory.nodes if n.name not in lost and n.name not in request.tainted]
    with contextlib.suppress(PlacementError):
        check(request, replan(request, inventory, placement, lost), left)


@slow
@given(requests(), inventories())
def test_what_can_be_placed_is_placed_and_hardly_anything_crosses_nodes(
    request: Request, inventory: Inventory
) -> None:
    placement = planned(request, inventory)
    counts = {role.name: role.count for role in request.roles}
    ways = [crossing(request, where) for where in all_nodes(request, counts, inventory)]
    event("fits" if ways else "does not fit")
    assert (placement is not None) == bool(ways)
    if placement is not None:
        assert placement.crossing <= 1.2 * min(ways) + 1e-9


@slow
@given(requests(elastic=True, most=3), inventories())
def test_elastic_roles_have_what_there_is_room_for(request: Request, inventory: Inventory) -> None:
    placement = planned(request, inventory)
    fitting = [each for each in all_counts(request) if any(all_nodes(request, each, inventory))]
    event("fits" if fitting else "does not fit")
    assert (placement is not None) == bool(fitting)
    if placement is None:
        return
    check(request, placement, usable(request, inventory))
    own = counts_of(placement)
    for other in fitting:
        greater = [other[role.name] - own.get(role.name, 0) for role in request.roles]
        assert min(greater) < 0 or max(greater) == 0, f"{other} fits and is more than {own}"


@slow
@given(requests(), inventories(), st.randoms(use_true_random=False))
def test_the_order_of_mappings_does_not_matter(
    request: Request, inventory: Inventory, random: object
) -> None:
    items = list(request.weights.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    assert planned(request, inventory) == planned(replace(request, weights=dict(items)), inventory)


@slow
@given(requests(elastic=True), inventories(), st.data())
def test_a_loss_moves_only_what_it_must(request: Request, inventory: Inventory, data: st.DataObject) -> None:
    before = planned(request, inventory)
    if before is None:
        return
    lost = frozenset({data.draw(st.sampled_from([node.name for node in inventory.nodes]))})
    left = [n for n in inventory.nodes if n.name not in lost and n.name not in request.tainted]
    try:
        after = replan(request, inventory, before, lost)
    except PlacementError:
        assert planned(replace(request, spares=0), Inventory(tuple(left))) is None
        return
    check(request, after, left)
    assert replan(request, inventory, before, lost) == after
    gone = [a for a in before.assignments if a.node in lost]
    there = {(a.role, a.node, a.own) for a in after.assignments}
    forced = [a for a in before.assignments if a.node not in lost and (a.role, a.node, a.own) not in there]
    event("nobody moves" if not gone else "others move" if forced else "the lost ones move")
    if not gone:
        kept = {(a.role, a.rank): (a.node, a.own) for a in after.assignments}
        assert all(kept[a.role, a.rank] == (a.node, a.own) for a in before.assignments)


@slow
@given(requests(most=3), inventories(), st.data())
def test_survivors_stay_if_they_can_and_spares_are_used_first(
    request: Request, inventory: Inventory, data: st.DataObject
) -> None:
    before = planned(request, inventory)
    assume(before is not None and len(before.nodes) > 0)
    assert before is not None
    lost = frozenset({data.draw(st.sampled_from(before.nodes))})
    left = [n for n in inventory.nodes if n.name not in lost and n.name not in request.tainted]
    if not may_stay(request, before, lost, left):
        event("survivors have to move")
        return
    after = replan(request, inventory, before, lost)
    pairs = list(zip(before.assignments, after.assignments, strict=True))
    assert all((a.node, a.own) == (b.node, b.own) for a, b in pairs if a.node not in lost)
    spares = [node for node in left if node.name in before.spares]
    if may_stay(request, before, lost, spares):
        event("to spares")
        assert {b.node for a, b in pairs if a.node in lost} <= set(before.spares)
