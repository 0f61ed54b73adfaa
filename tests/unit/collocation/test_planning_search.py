"""Ranks get devices that are near each other, beside a search that looks at all there are; and it costs no place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations
from random import Random

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.collocation.brute_force import gpu, hosts
from tests.unit.collocation.strategies import inventories, requests
from unirun.collocation import Device, Inventory, Node, parse_fake
from unirun.collocation.inventory import NEARNESS, Placement, PlacementRequest, RoleRequest
from unirun.collocation.planning import plan, replan
from unirun.collocation.planning.problem import Kinds, problem_of
from unirun.errors import PlacementError

slow = settings(suppress_health_check=list(HealthCheck))
TWO = Fraction(2)


def pairs(index: int, count: int) -> int:
    """0-1, 2-3, …: bridges between neighbours."""
    return index // 2


def far_pairs(index: int, count: int) -> int:
    """0-4, 1-5, …: bridges between halves, as some boards have them."""
    return index % (count // 2)


def quads(index: int, count: int) -> int:
    return index // 4


def odd_and_even(index: int, count: int) -> int:
    return index % 2


def drawn(inventory: Inventory, *roles: RoleRequest, **more: object) -> list[dict[str, list[str]]]:
    """By node, by role: the devices of each rank."""
    placement = plan(PlacementRequest(roles, **more), inventory)  # type: ignore[arg-type]
    return [
        {
            role.name: ["+".join(a.own) for a in placement.of_role(role.name) if a.node == node.name]
            for role in roles
        }
        for node in inventory.nodes
    ]


class TestPlans:
    def test_of_ranks_with_two_devices_on_neighbours_that_are_joined(self) -> None:
        (node,) = drawn(hosts(8, nvlink=pairs), gpu("a", 1), gpu("b", 3, slots=TWO))
        assert node == {"a": ["6"], "b": ["0+1", "2+3", "4+5"]}

    def test_of_ranks_with_two_devices_that_are_joined_across_numa_nodes(self) -> None:
        (node,) = drawn(hosts(8, numas=2, nvlink=far_pairs), gpu("b", 4, slots=TWO))
        assert node == {"b": ["0+4", "1+5", "2+6", "3+7"]}

    def test_of_groups_on_pairs_that_are_not_consecutive(self) -> None:
        (node,) = drawn(hosts(8, numas=2, nvlink=far_pairs), gpu("b", 6, per_group=2), gpu("a", 2))
        assert node == {"b": ["0", "4", "1", "5", "2", "6"], "a": ["3", "7"]}

    def test_of_groups_that_are_larger_than_what_is_joined(self) -> None:
        """Then it counts that they are on one NUMA node, and on whole pairs there."""
        (node,) = drawn(hosts(8, numas=2, nvlink=pairs), gpu("a", 1), gpu("b", 4, per_group=4))
        assert node == {"a": ["4"], "b": ["0", "1", "2", "3"]}
        (node,) = drawn(hosts(12, numas=2, nvlink=pairs), gpu("a", 1), gpu("b", 4, per_group=4))
        assert node == {"a": ["4"], "b": ["0", "1", "2", "3"]}

    def test_of_groups_of_ranks_with_several_devices(self) -> None:
        """The devices of a rank come before those of its group."""
        (node,) = drawn(hosts(8, numas=2, nvlink=far_pairs), gpu("b", 4, per_group=2, slots=TWO))
        assert node == {"b": ["0+4", "1+5", "2+6", "3+7"]}
        (node,) = drawn(hosts(6, numas=2), gpu("b", 2, per_group=2, slots=TWO))
        assert node == {"b": ["0+1", "3+4"]}

    @pytest.mark.parametrize("numas", [1, 2, 4])
    def test_of_quads_that_agree_with_numa_nodes_or_not(self, numas: int) -> None:
        (node,) = drawn(hosts(8, numas=numas, nvlink=odd_and_even), gpu("b", 8, per_group=4))
        assert node == {"b": ["0", "2", "4", "6", "1", "3", "5", "7"]}

    def test_of_roles_that_fill_whole_islands(self) -> None:
        (node,) = drawn(hosts(8, nvlink=quads), gpu("a", 4), gpu("b", 4))
        assert node == {"a": ["0", "1", "2", "3"], "b": ["4", "5", "6", "7"]}
        (node,) = drawn(hosts(8, nvlink=odd_and_even), gpu("a", 4), gpu("b", 4))
        assert node == {"a": ["0", "2", "4", "6"], "b": ["1", "3", "5", "7"]}
        (node,) = drawn(hosts(8, nvlink=quads), gpu("a", 3), gpu("b", 4))
        assert node == {"a": ["0", "1", "2"], "b": ["4", "5", "6", "7"]}
        (node,) = drawn(hosts(8, nvlink=quads), gpu("a", 1), gpu("b", 1), gpu("c", 3), gpu("d", 3))
        assert node == {"a": ["0"], "b": ["4"], "c": ["1", "2", "3"], "d": ["5", "6", "7"]}

    def test_of_a_role_that_is_larger_than_an_island(self) -> None:
        """It has as few devices as can be elsewhere."""
        (node,) = drawn(hosts(9, nvlink=lambda i, n: (0, 0, 0, 0, 1, 2, 2, 2, 2)[i]), gpu("a", 6))
        assert node == {"a": ["0", "1", "2", "3", "5", "6"]}

    def test_of_shares_that_open_slots_near_those_that_they_have(self) -> None:
        (node,) = drawn(hosts(8, nvlink=far_pairs), gpu("a", 4, slots=Fraction(1, 2)))
        assert node == {"a": ["0", "0", "4", "4"]}

    def test_of_nodes_where_all_are_joined_look_at_numa_nodes_alone(self) -> None:
        roles = (gpu("a", 3), gpu("b", 2, per_group=2), gpu("c", 1, slots=TWO))
        joined = hosts(8, numas=2, nvlink=lambda _i, _n: 0)
        assert drawn(joined, *roles) == drawn(hosts(8, numas=2), *roles)
        assert drawn(joined, *roles) == [{"a": ["4", "5", "6"], "b": ["0", "1"], "c": ["2+3"]}]

    def test_of_what_is_left_after_a_loss(self) -> None:
        inventory = hosts(8, 4, nvlink=far_pairs)
        request = PlacementRequest((gpu("a", 2, slots=TWO), gpu("b", 3)))
        before = plan(replace(request, apart=(("a", "b"),)), inventory)
        assert [a.own for a in before.of_role("b")] == [("0",), ("1",), ("4",)]
        after = replan(request, inventory, before, frozenset({"n1"}))
        assert [a.own for a in after.of_role("a")] == [("2", "6"), ("3", "7")]


def test_of_two_roles_whose_ranks_are_on_one_slot_the_later_one_moves() -> None:
    """As when the first has ended, its slots have gone to the other, and now it starts again."""
    inventory, request = hosts(2, 1), PlacementRequest((gpu("a", 1), gpu("b", 2)))
    before = plan(request, inventory)
    (a,) = before.of_role("a")
    same = [replace(each, node=a.node, slot=a.slot, own=a.own) for each in before.of_role("b")[:1]]
    pinned = replace(before, assignments=(a, *same, before.of_role("b")[1]))
    after = replan(request, inventory, pinned, frozenset())
    assert after.of_role("a") == (a,)
    assert [(each.node, each.own) for each in after.of_role("b")] == [
        (each.node, each.own) for each in before.of_role("b")
    ]
    shared = PlacementRequest((gpu("a", 1, slots=Fraction(1, 2)), gpu("b", 1, slots=Fraction(1, 2))))
    both = plan(shared, inventory)
    assert replan(shared, inventory, both, frozenset()).assignments == both.assignments


def far(one: Device, other: Device) -> tuple[int, bool]:
    """The distance of two devices from each other: by what they say of it, then by their NUMA nodes."""
    told = dict(one.links)
    same = max(one.numa, 0) == max(other.numa, 0)
    return NEARNESS.index(told.get(other.index, "numa" if same else "system")), not same


def pairs_of(devices: Sequence[Device]) -> list[tuple[int, bool]]:
    """The distances of all pairs, the farthest first: the less the better."""
    return sorted((far(*pair) for pair in combinations(devices, 2)), reverse=True)


@st.composite
def topologies(draw: st.DrawFn, most: int = 8) -> Inventory:
    """One node with links of any kind, in no order: those of bridges and switches are among them."""
    count = draw(st.integers(2, most))
    numas = draw(st.sampled_from([1, 2, 4]))
    levels = [draw(st.sampled_from([*NEARNESS, None])) for _ in range(draw(st.integers(1, 3)))]
    kinds = [draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)) for _ in levels]
    some = draw(st.sets(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=4))

    def nearness(one: int, other: int) -> str | None:
        if (min(one, other), max(one, other)) in some:
            return "nvlink"
        return next(
            (level for level, kind in zip(levels, kinds, strict=True) if kind[one] == kind[other]), None
        )

    return Inventory(
        (
            Node(
                "n0",
                tuple(range(16)),
                tuple(
                    Device(
                        str(i),
                        "H",
                        numa=i * numas // count,
                        links=tuple(
                            (str(j), near) for j in range(count) if j != i and (near := nearness(i, j))
                        ),
                    )
                    for i in range(count)
                ),
            ),
        )
    )


def devices_of(placement: Placement, inventory: Inventory, role: str) -> list[list[Device]]:
    """By rank."""
    by_index = {device.index: device for device in inventory.nodes[0].devices}
    return [[by_index[index] for index in a.own] for a in placement.of_role(role)]


@slow
@given(topologies(), st.data())
def test_the_first_that_is_placed_has_the_nearest_devices_that_are_free(
    inventory: Inventory, data: st.DataObject
) -> None:
    devices = inventory.nodes[0].devices
    free = [device for device in devices if data.draw(st.booleans(), device.index)]
    size = data.draw(st.integers(1, len(devices)), "size")
    assume(size <= len(free))
    only = tuple(device.index for device in free)
    best = min(pairs_of(each) for each in combinations(free, size))
    event(f"{size} of {len(free)}")
    roles = (
        gpu("a", size, devices=only),
        gpu("a", size, per_group=size, devices=only),
        gpu("a", 1, slots=Fraction(size), devices=only),
    )
    for role in roles:
        ranks = devices_of(plan(PlacementRequest((role,)), inventory), inventory, "a")
        assert pairs_of([device for rank in ranks for device in rank]) == best


def ways(devices: Sequence[Device], width: int, ranks: int) -> Iterator[list[tuple[Device, ...]]]:
    """Every way to give so many ranks that many devices each."""
    if ranks == 0:
        yield []
        return
    for own in combinations(devices, width):
        # In the order of their first devices.
        rest = [device for device in devices if device not in own and int(device.index) > int(own[0].index)]
        for others in ways(rest, width, ranks - 1):
            yield [own, *others]


def worst(devices: Sequence[Device]) -> tuple[int, bool]:
    return max(pairs_of(devices), default=(0, False))


@slow
@given(topologies(), st.integers(2, 3), st.integers(1, 3), st.booleans())
def test_the_ranks_of_a_role_are_each_as_near_as_all_of_them_can_be(
    inventory: Inventory, width: int, ranks: int, grouped: bool
) -> None:
    devices = inventory.nodes[0].devices
    assume(width * ranks <= len(devices))
    role = gpu("a", ranks, slots=Fraction(width), per_group=ranks if grouped else None)
    own = devices_of(plan(PlacementRequest((role,)), inventory), inventory, "a")
    best = min(max(map(worst, way)) for way in ways(devices, width, ranks))
    assert max(map(worst, own)) == best


@slow
@given(topologies(most=6), st.lists(st.integers(1, 3), min_size=2, max_size=3))
def test_all_roles_are_as_near_as_each_could_be_alone_whenever_that_is_possible(
    inventory: Inventory, counts: list[int]
) -> None:
    devices = inventory.nodes[0].devices
    assume(sum(counts) <= len(devices))
    alone = [min(worst(each) for each in combinations(devices, count)) for count in counts]

    def possible(left: Sequence[Device], number: int) -> bool:
        if number == len(counts):
            return True
        return any(
            worst(own) == alone[number] and possible([d for d in left if d not in own], number + 1)
            for own in combinations(left, counts[number])
        )

    names = [f"r{number}" for number in range(len(counts))]
    request = PlacementRequest(tuple(gpu(name, count) for name, count in zip(names, counts, strict=True)))
    placement = plan(request, inventory)
    own = [[d for rank in devices_of(placement, inventory, name) for d in rank] for name in names]
    attained = list(map(worst, own)) == alone
    event("attained" if attained else "not possible")
    assert attained == possible(devices, 0)


def fits(request: PlacementRequest, inventory: Inventory) -> Placement | None:
    try:
        return plan(request, inventory)
    except PlacementError:
        return None


@slow
@given(requests(most=6), inventories())
def test_what_fits_does_not_depend_on_links_nor_does_who_is_on_which_node(
    request: PlacementRequest, inventory: Inventory
) -> None:
    plain = Inventory(
        tuple(
            replace(node, devices=tuple(replace(device, links=()) for device in node.devices))
            for node in inventory.nodes
        )
    )
    one, other = fits(request, inventory), fits(request, plain)
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert [(a.role, a.rank, a.node) for a in one.assignments] == [
            (a.role, a.rank, a.node) for a in other.assignments
        ]


def test_nodes_with_the_same_links_are_alike() -> None:
    problem = problem_of(PlacementRequest((gpu("a", 1),)))

    def rooms(*texts: str) -> int:
        nodes = [node for text in texts for node in parse_fake(text).nodes]
        return len(set(Kinds(problem, 1).of(nodes)))

    assert rooms("fake:nodes=50,devices=8,nvlink=2") == 1
    assert rooms("fake:nodes=2,devices=8,nvlink=2", "fake:devices=8,nvlink=4") == 2
    assert rooms("fake:devices=8,nvlink=2", "fake:devices=8,nvlink=4", "fake:devices=8,nvlink=2") == 2


@given(
    st.integers(2, 8),
    st.sampled_from([1, 2]),
    st.sampled_from([pairs, far_pairs, quads, odd_and_even]),
    st.randoms(use_true_random=False),
)
def test_nodes_are_alike_when_only_one_device_of_a_link_tells_it(
    count: int, numas: int, nvlink: Callable[[int, int], int], random: Random
) -> None:
    (node,) = hosts(count, numas=numas, nvlink=nvlink).nodes
    links = [(each.index, peer) for each in node.devices for peer, _ in each.links if each.index < peer]
    silent = {random.choice([(one, other), (other, one)]) for one, other in links}
    devices = (
        replace(each, links=tuple(link for link in each.links if (each.index, link[0]) not in silent))
        for each in node.devices
    )
    problem = problem_of(PlacementRequest((gpu("a", 1),)))
    both, one = Kinds(problem, 1).of([node, replace(node, name="n1", devices=tuple(devices))])
    assert both is one
