"""The properties of every plan, beside a search that looks at everything."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from itertools import chain, combinations

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.collocation.brute_force import (
    Nodes,
    all_counts,
    all_nodes,
    check,
    counts_of,
    crossing,
    gpu,
    hosts,
    in_rank_order,
    may_stay,
    nodes_of,
    nodes_of_parts,
    usable,
    ways_to_stay,
)
from tests.unit.collocation.strategies import inventories, requests, spread
from unirun.collocation.inventory import Assignment, Inventory, Node, Placement, PlacementRequest, Ties
from unirun.collocation.planning import plan, replan
from unirun.collocation.planning.plan import find, searched
from unirun.collocation.planning.problem import problem_of
from unirun.errors import PlacementError

slow = settings(suppress_health_check=list(HealthCheck))


def planned(request: PlacementRequest, inventory: Inventory) -> Placement | None:
    """The result of `plan`; what it says when nothing fits is the matter of `test_planning_errors`."""
    try:
        return find(request, inventory)
    except PlacementError:
        return None


@slow
@given(requests(most=6), inventories())
def test_every_constraint_is_kept(request: PlacementRequest, inventory: Inventory) -> None:
    placement = planned(request, inventory)
    event("fits" if placement else "does not fit")
    if placement is not None:
        check(request, placement, usable(request, inventory))
        assert in_rank_order(request, placement, inventory)
        assert placement.crossing == pytest.approx(crossing(request, nodes_of(request, placement)))


@slow
@given(requests(elastic=True, most=30), inventories(most=30), st.data())
def test_every_constraint_is_kept_where_nodes_are_filled_one_after_the_other(
    request: PlacementRequest, inventory: Inventory, data: st.DataObject
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
    request: PlacementRequest, inventory: Inventory
) -> None:
    placement = planned(request, inventory)
    counts = {role.name: role.count for role in request.roles}
    ways = [crossing(request, where) for where in all_nodes(request, counts, inventory)]
    event("fits" if ways else "does not fit")
    assert (placement is not None) == bool(ways)
    if placement is not None:
        assert placement.crossing <= 1.2 * min(ways) + 1e-9


@slow
@given(requests(), inventories(most=4))
def test_rules_place_what_can_be_placed_and_little_more_than_must_crosses_nodes(
    request: PlacementRequest, inventory: Inventory
) -> None:
    """Cells are tried by a few rules when there are too many to try all, which is pretended here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unirun.collocation.planning.solve.WORK", 0)
        placement = planned(request, inventory)
    counts = {role.name: role.count for role in request.roles}
    ways = [crossing(request, where) for where in all_nodes(request, counts, inventory)]
    assert (placement is not None) == bool(ways)
    if placement is not None:
        event("the best" if placement.crossing <= min(ways) + 1e-9 else "not the best")
        assert placement.crossing - min(ways) <= 0.5 * sum(request.ties.weights.values()) + 1e-9


def judged(request: PlacementRequest, where: Nodes) -> tuple[float, int, int]:
    """The costs of a placement, first of all what goes between nodes; the least is the best."""
    used = {node for nodes in where.values() for node in nodes}
    return round(crossing(request, where), 9), nodes_of_parts(request, where), len(used)


@st.composite
def tied(draw: st.DrawFn) -> tuple[PlacementRequest, Inventory]:
    """Roles of which some wait for each other, with so little between them that often only this can decide."""
    names = "abcd"[: draw(st.integers(3, 4))]
    roles = tuple(gpu(name, draw(st.integers(1, 2))) for name in names)
    pairs = draw(st.lists(st.sampled_from([*combinations(names, 2)]), unique=True, max_size=1))
    of = [draw(st.integers(0, 1)) for _ in names]
    parts = [tuple(name for name, part in zip(names, of, strict=True) if part == each) for each in range(2)]
    ties = Ties(dict.fromkeys(pairs, 1.0), tuple(part for part in parts if part))
    sizes = draw(st.lists(st.integers(1, 4), min_size=3, max_size=3))
    request = PlacementRequest(roles, ties=ties)
    if draw(st.integers(0, 2)) == 0:
        request = replace(request, apart=(draw(st.sampled_from([*combinations(names, 2)])),))
    return request, hosts(*sizes)


@slow
@given(tied() | st.tuples(requests(), inventories()))
def test_where_as_little_crosses_nodes_parts_are_on_the_fewest_and_then_the_job(
    case: tuple[PlacementRequest, Inventory],
) -> None:
    """A complete search, as here, finds the best plan: not nearly, and not in most cases."""
    request, inventory = case
    placement = planned(request, inventory)
    assume(placement is not None)
    assert placement is not None
    counts = {role.name: role.count for role in request.roles}
    ways = {judged(request, where) for where in all_nodes(request, counts, inventory)}
    assert judged(request, nodes_of(request, placement)) == min(ways)
    without = plan(replace(request, ties=Ties(request.ties.weights)), inventory)
    free = judged(request, nodes_of(request, without))
    event("parts decide" if free != min(ways) else "they do not")


@slow
@given(requests(elastic=True, most=3), inventories())
def test_elastic_roles_have_what_there_is_room_for(request: PlacementRequest, inventory: Inventory) -> None:
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
    request: PlacementRequest, inventory: Inventory, random: object
) -> None:
    items, parts = list(request.ties.weights.items()), list(request.ties.parts)
    random.shuffle(items)  # type: ignore[attr-defined]
    random.shuffle(parts)  # type: ignore[attr-defined]
    ties = Ties(dict(items), tuple(parts))
    assert planned(request, inventory) == planned(replace(request, ties=ties), inventory)


@slow
@given(requests(most=8), inventories(most=8))
def test_what_devices_are_called_does_not_matter(request: PlacementRequest, inventory: Inventory) -> None:
    """With a mask by UUID all of them have names of their own, and no two nodes are quite alike."""
    assume(all(role.devices is None for role in request.roles))

    def called(node: Node, index: str) -> str:
        return f"GPU-{node.name}-{index}"

    renamed = Inventory(
        tuple(
            replace(
                node,
                devices=tuple(
                    replace(
                        device,
                        index=called(node, device.index),
                        links=tuple((called(node, peer), near) for peer, near in device.links),
                    )
                    for device in node.devices
                ),
            )
            for node in inventory.nodes
        )
    )
    placement, other = planned(request, inventory), planned(request, renamed)
    places = [
        each and [(a.role, a.rank, a.node, a.slot, a.local_rank, a.share, a.numa) for a in each.assignments]
        for each in (placement, other)
    ]
    assert places[0] == places[1]


@slow
@given(requests(elastic=True), inventories())
def test_a_loss_of_any_node_is_planned_again_whenever_that_is_possible(
    request: PlacementRequest, inventory: Inventory
) -> None:
    before = planned(request, inventory)
    assume(before is not None)
    assert before is not None
    for node in inventory.nodes:
        lost = frozenset({node.name})
        left = [n for n in inventory.nodes if n.name not in lost and n.name not in request.tainted]
        try:
            after = replan(request, inventory, before, lost)
        except PlacementError:
            assert planned(replace(request, spares=0), Inventory(tuple(left))) is None
            continue
        check(request, after, left)
        assert replan(request, inventory, before, lost) == after
        if not any(a.node in lost for a in before.assignments):
            event("nobody moves")
            kept = {(a.role, a.rank): (a.node, a.own) for a in after.assignments}
            assert all(kept[a.role, a.rank] == (a.node, a.own) for a in before.assignments)


@slow
@given(requests(elastic=True), inventories())
def test_a_closed_node_keeps_ranks_that_it_has_and_gets_no_more(
    request: PlacementRequest, inventory: Inventory
) -> None:
    before = planned(request, inventory)
    assume(before is not None and len(before.nodes) > 1)
    assert before is not None
    lost, *others = before.nodes
    for node in others:
        try:
            after = replan(replace(request, closed=frozenset({node})), inventory, before, frozenset({lost}))
        except PlacementError:
            event("there is no room")
            continue
        own = {each.own for each in before.assignments if each.node == node}
        assert {each.own for each in after.assignments if each.node == node} <= own
        assert node not in after.spares


def fewest_that_move(
    request: PlacementRequest, before: Placement, gone: Sequence[Assignment], targets: Sequence[Node]
) -> int | None:
    """The number of ranks beside those that are `gone` that have to leave their slots; None when there is no
    way at all. Ranks that have to be on one node move together."""
    cells: dict[tuple[int, int], list[Assignment]] = {}
    for number, bundle in enumerate(problem_of(request).bundles):
        for name in bundle.names:
            for each in before.of_role(name):
                if each not in gone:
                    cells.setdefault((number, each.rank // bundle.ranks_of(name)), []).append(each)
    sets = [chain(*some) for size in range(len(cells) + 1) for some in combinations(cells.values(), size)]
    for more in sorted(map(tuple, sets), key=len):
        if may_stay(request, before, {*gone, *more}, targets):
            return len(more)
    return None


@st.composite
def scattered(draw: st.DrawFn) -> tuple[PlacementRequest, Inventory]:
    """Ranks here and there, and one that needs a whole node: when it loses its own there are enough slots, in pieces."""
    size = draw(st.integers(2, 3))
    each = draw(st.integers(1, size - 1))
    roles = [
        gpu(name, each * draw(st.integers(1, 2)), per_node=each)
        for name in draw(st.sampled_from(["a", "ab"]))
    ]
    whole = gpu("c", 1, slots=Fraction(size))
    nodes = sum(role.count // each for role in roles) + 1
    request = PlacementRequest((*roles, whole), apart=(tuple(role.name for role in (*roles, whole)),))
    return request, hosts(*[size] * nodes)


@slow
@given(scattered())
def test_as_few_ranks_as_can_be_make_room_when_there_is_no_other_way(
    case: tuple[PlacementRequest, Inventory],
) -> None:
    spread_, inventory = case
    request = replace(spread_, roles=tuple(replace(role, per_node=None) for role in spread_.roles), apart=())
    before = plan(spread_, inventory)
    (home,) = {a.node for a in before.of_role("c")}
    left = [node for node in inventory.nodes if node.name != home]
    fewest = fewest_that_move(request, before, before.of_role("c"), left)
    if fewest is None:
        with pytest.raises(PlacementError):
            replan(request, inventory, before, frozenset({home}))
        return
    event(f"{fewest} have to move")
    after = replan(request, inventory, before, frozenset({home}))
    check(request, after, left)
    moved = [
        a
        for a, b in zip(before.assignments, after.assignments, strict=True)
        if a.node != home and (a.node, a.own) != (b.node, b.own)
    ]
    assert len(moved) == fewest > 0


@slow
@given(requests(most=3), inventories(most=4), st.data())
def test_a_loss_of_any_node_moves_only_who_must_and_to_spares_first(
    request: PlacementRequest, inventory: Inventory, data: st.DataObject
) -> None:
    before = planned(data.draw(spread(request)), inventory)
    assume(before is not None and len(before.assignments) <= 6)
    assert before is not None
    for node in before.nodes:
        left = [n for n in inventory.nodes if n.name != node and n.name not in request.tainted]
        gone = [a for a in before.assignments if a.node == node]
        fewest = fewest_that_move(request, before, gone, left)
        event("there is no way" if fewest is None else f"{fewest} have to move")
        if fewest is None:
            with pytest.raises(PlacementError):
                replan(request, inventory, before, frozenset({node}))
            continue
        after = replan(request, inventory, before, frozenset({node}))
        check(request, after, left)
        pairs = list(zip(before.assignments, after.assignments, strict=True))
        moved = [a for a, b in pairs if a.node != node and (a.node, a.own) != (b.node, b.own)]
        assert len(moved) == fewest
        spares = [n for n in left if n.name in before.spares]
        if fewest == 0 and may_stay(request, before, gone, spares):
            event("to spares")
            # Roles that may be anywhere go where the others are.
            names = [role.name for role in searched(request).roles or request.roles]
            assert {b.node for a, b in pairs if a.node == node and a.role in names} <= set(before.spares)


@st.composite
def strewn(draw: st.DrawFn) -> tuple[PlacementRequest, Inventory, Placement]:
    """Ranks of one device each that are anywhere, as losses and ends of other roles leave them."""
    inventory = hosts(*draw(st.lists(st.integers(1, 3), min_size=3, max_size=5)))
    slots = draw(
        st.permutations([(node.name, each.index) for node in inventory.nodes for each in node.devices])
    )
    roles = tuple(gpu(name, draw(st.integers(1, 2))) for name in "ab")
    ties = Ties({("a", "b"): 1.0}) if draw(st.booleans()) else Ties()
    places = []
    for role in roles:
        taken = sorted(slots.pop() for _ in range(min(role.count, len(slots))))
        places += [
            Assignment(role.name, rank, node, int(index), 0, (index,), own=(index,))
            for rank, (node, index) in enumerate(taken)
        ]
    return PlacementRequest(roles, ties=ties), inventory, Placement(tuple(places), "")


@slow
@given(strewn())
def test_those_that_must_move_go_where_they_are_best_while_the_others_stay(
    case: tuple[PlacementRequest, Inventory, Placement],
) -> None:
    request, inventory, before = case
    assume(len(before.assignments) == sum(role.count for role in request.roles))
    for node in before.nodes:
        left = [each for each in inventory.nodes if each.name != node]
        gone = [a for a in before.assignments if a.node == node]
        ways = {judged(request, where) for where in ways_to_stay(request, before, gone, left)}
        event(f"{min(len(ways), 2)} that differ")
        if ways:
            after = replan(request, inventory, before, frozenset({node}))
            assert judged(request, nodes_of(request, after)) == min(ways)


PROGRAM = """
from fractions import Fraction
from unirun.collocation import parse_fake
from unirun.collocation.planning import plan, replan
from unirun.collocation.inventory import PlacementRequest, RoleRequest, Ties

inventory = parse_fake("fake:nodes=9,devices=8,numa=2,nvlink=2")
names = ["actor", "ref", "critic", "reward", "rollout"]
roles = [RoleRequest(name, 9 + number, 4, "cuda", per_group=1 + number % 2) for number, name in enumerate(names)]
roles += [RoleRequest("judge", 5, 5, "cuda", Fraction(1, 2)), RoleRequest("data", 3, 3, "cpu")]
request = PlacementRequest(
    tuple(roles),
    collocated=(("actor", "ref"),),
    apart=(("critic", "rollout"),),
    isolated=(("reward", "judge"),),
    ties=Ties(
        {(a, b): 1.0 + len(a) / len(b) for a in names for b in names if a < b},
        (("rollout", "judge"), ("actor", "reward"), ("data",)),
    ),
    tainted=frozenset({"node3", "node5"}),
)
before = plan(request, inventory)
print(before)
print(replan(request, inventory, before, frozenset({"node0", "node2"})))
"""


@pytest.mark.starts_processes
def test_a_plan_is_the_same_in_every_process() -> None:
    """Sets and mappings of texts have another order in each."""

    def said(seed: str) -> str:
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environ,
            text=True,
            check=True,
            capture_output=True,
            timeout=60,
        ).stdout

    first, *others = [said(seed) for seed in ("0", "1", "2")]
    assert "rollout" in first
    assert others == [first, first]
