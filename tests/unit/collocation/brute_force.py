"""The conditions of a placement, checked rank by rank, and a brute-force search for one; nothing of the planner is used."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations, combinations_with_replacement, pairwise, product
from math import gcd

from unirun.collocation.inventory import (
    Assignment,
    Device,
    Inventory,
    Node,
    Placement,
    PlacementRequest,
    RoleRequest,
)

Nodes = Mapping[str, tuple[str, ...]]
"""By role: the node of each rank."""


def hosts(
    *devices: int, numas: int = 1, cpus: int = 16, nvlink: Callable[[int, int], object] | None = None
) -> Inventory:
    """Hosts ``n0``, ``n1``, … with so many GPUs each, in equal parts near their NUMA nodes.

    NVLink joins those for which `nvlink`, of the index and the number of all, is the same.
    """
    return Inventory(
        tuple(
            Node(
                f"n{number}",
                tuple(range(cpus)),
                tuple(
                    Device(str(i), "H", "", numa=i * numas // count, links=_links(i, count, nvlink))
                    for i in range(count)
                ),
            )
            for number, count in enumerate(devices)
        )
    )


def component_of(node: str) -> int:
    """The component of a node in property tests: that of pairs of neighbours."""
    return int(node.removeprefix("n")) // 2 % 2


def _links(
    index: int, count: int, nvlink: Callable[[int, int], object] | None
) -> tuple[tuple[str, str], ...]:
    if nvlink is None:
        return ()
    peers = [peer for peer in range(count) if peer != index and nvlink(peer, count) == nvlink(index, count)]
    return tuple((str(peer), "nvlink") for peer in peers)


def gpu(name: str, count: int, least: int | None = None, **more: object) -> RoleRequest:
    """A role on GPUs."""
    return RoleRequest(name, count, count if least is None else least, "cuda", **more)  # type: ignore[arg-type]


def counts_of(placement: Placement) -> dict[str, int]:
    return dict(Counter(a.role for a in placement.assignments))


def nodes_of(request: PlacementRequest, placement: Placement) -> Nodes:
    return {role.name: tuple(a.node for a in placement.of_role(role.name)) for role in request.roles}


def usable(request: PlacementRequest, inventory: Inventory) -> list[Node]:
    sound = [node for node in inventory.nodes if node.name not in request.tainted]
    return sound[: max(len(sound) - request.spares, 0)]


def shares(request: PlacementRequest) -> dict[str, Fraction]:
    """The part of a slot that a rank of each role has."""
    return {
        role.name: role.slots if role.slots < 1 else Fraction(1, len(group))
        for group in components(request, request.collocated)
        for role in request.roles
        if role.name in group
    }


def components(request: PlacementRequest, groups: Sequence[Sequence[str]]) -> list[set[str]]:
    found: list[set[str]] = [{role.name} for role in request.roles]
    for group in groups:
        touched = [each for each in found if each & set(group)]
        found = [each for each in found if each not in touched] + [set().union(*touched)]
    return found


def check(request: PlacementRequest, placement: Placement, allowed: Sequence[Node]) -> None:
    """Every promise that a placement makes, except that of the order of ranks."""
    nodes = {node.name: node for node in allowed}
    places = {(a.role, a.rank): a for a in placement.assignments}
    assert len(places) == len(placement.assignments), "a rank is placed twice"
    assert [a.role for a in placement.assignments] == sorted(
        (a.role for a in placement.assignments), key=[r.name for r in request.roles].index
    )
    assert not {a.node for a in placement.assignments} - set(nodes)
    by_role = {role.name: placement.of_role(role.name) for role in request.roles}
    used: dict[tuple[str, str, str], Fraction] = defaultdict(Fraction)
    part = shares(request)
    for role in request.roles:
        ranks = by_role[role.name]
        masks = defaultdict[str, list[str]](list)
        for a in sorted(ranks, key=lambda each: each.local_rank):
            masks[a.node] += a.own
        assert [a.rank for a in ranks] == list(range(len(ranks)))
        assert role.least <= len(ranks) <= role.count
        assert len(set(nodes_of(request, placement)[role.name])) <= len(ranks)
        for a in ranks:
            if role.device is None:
                assert (a.own, a.slot, a.devices) == ((), -1, None)
                continue
            assert len(set(a.own)) == len(a.own) == max(1, int(role.slots))
            assert a.share == float(part[role.name])
            for index in a.own:
                used[a.node, role.device, index] += part[role.name]
            if role.device == "cpu":
                continue
            devices = [d for d in nodes[a.node].devices if d.type == role.device]
            known = [d.index for d in devices]
            assert set(a.own) <= set(known)
            assert role.devices is None or set(a.own) <= set(role.devices)
            assert a.slot == known.index(a.own[0])
            numas = {max(d.numa, 0) for d in devices if d.index in a.own}
            assert a.numa == (numas.pop() if len(numas) == 1 else -1)
            assert a.devices is not None
            assert a.devices == a.own or (a.devices[a.local_rank],) == a.own
            # Those that stay on a node do not see what has come to it since.
            assert a.devices in (a.own, tuple(masks[a.node][: len(a.devices)])), (
                "a mask has devices of no rank"
            )
        local = defaultdict(list)
        for a in ranks:
            local[a.node].append(a.local_rank)
        assert all(sorted(each) == list(range(len(each))) for each in local.values()), "local ranks"
    assert all(total <= 1 for total in used.values()), "a slot is over-committed"
    where = nodes_of(request, placement)
    assert not list(node_faults(request, where))
    assert all(has_what_ranks_need(request, node, where) for node in allowed)
    numa = {(d.index, node.name): max(d.numa, 0) for node in nodes.values() for d in node.devices}
    for node in nodes:
        cpu = {role.name for role in request.roles if role.device == "cpu"}
        here = {
            (a.role, a.rank): tuple(f"cpu {i}" for i in a.own) if a.role in cpu else a.own
            for a in placement.assignments
            if a.node == node
        }
        assert not list(slot_faults(request, here, node, numa))


def has_what_ranks_need(request: PlacementRequest, node: Node, where: Nodes) -> bool:
    """Return True if the processors, the memory and all else that ranks need of `node` are no more than it has."""
    needed: dict[str, int] = defaultdict(int)
    for role in request.roles:
        for name, need in role.needs.items():
            each = len(node.cpus) if need == "all" else need
            needed[name] += each * where[role.name].count(node.name)
    offers = {"cpus": len(node.cpus), "memory": node.memory or needed["memory"], **node.resources}
    return all(number <= offers.get(name, 0) for name, number in needed.items())


def node_faults(request: PlacementRequest, where: Nodes) -> Iterator[str]:
    """The faults of the nodes of ranks."""
    for role in request.roles:
        each = where[role.name]
        if role.component is not None and {component_of(node) for node in each} - {role.component}:
            yield f"{role.name} component"
        if role.per_node and set(Counter(each).values()) - {role.per_node}:
            yield f"{role.name} per_node"
        if role.per_group:
            groups = [each[at : at + role.per_group] for at in range(0, len(each), role.per_group)]
            if any(len(group) != role.per_group or len(set(group)) > 1 for group in groups):
                yield f"{role.name} per_group"
    for group in request.collocated:
        if len({where[name] for name in group}) > 1:
            yield f"{group} collocated"
    for group in request.apart:
        if any(set(where[one]) & set(where[other]) for one, other in combinations(group, 2)):
            yield f"{group} apart"
    # "In proportion" holds for all roles that are linked by groups: they are cut into equally many parts.
    for linked in components(request, (*request.collocated, *request.together)):
        if not any(set(group) <= linked for group in request.together):
            continue
        # Of roles that share slots there are as many as of the smallest.
        most = {
            name: min(role.count for role in request.roles if role.name in stack)
            for stack in components(request, request.collocated)
            for name in stack
            if name in linked
        }
        ratio = {name: count // gcd(*most.values()) for name, count in most.items()}
        sizes = {Fraction(len(where[name]), ratio[name]) for name in linked}
        if len(sizes) > 1 or sizes.pop().denominator > 1:
            yield f"{linked} proportion"
            continue
        number = len(where[min(linked)]) // ratio[min(linked)]
        for cell in range(number):
            own = {node for n in linked for node in where[n][cell * ratio[n] : (cell + 1) * ratio[n]]}
            if len(own) > 1:
                yield f"{linked} together"


def slot_faults(
    request: PlacementRequest,
    own: Mapping[tuple[str, int], tuple[str, ...]],
    node: str,
    numa: Mapping[tuple[str, str], int],
) -> Iterator[str]:
    """The faults of the slots of those ranks on a node that have some, but for how much they take."""
    slots: dict[str, set[str]] = defaultdict(set)
    for (role, _), indices in own.items():
        slots[role] |= set(indices)
    for group in request.collocated:
        for one, other in combinations(group, 2):
            for (role, rank), indices in own.items():
                if role == one and own.get((other, rank), indices) != indices:
                    yield f"{one} {other} collocated"
    types = {role.name: role.device for role in request.roles}
    for group in request.together:
        for one, other in combinations(group, 2):
            if types[one] == types[other] and slots[one] & slots[other]:
                yield f"{one} {other} share a slot"
    for group in request.isolated:
        for one, other in combinations(group, 2):
            first, second = ({numa.get((i, node), 0) for i in slots[name]} for name in (one, other))
            if first & second:
                yield f"{one} {other} isolated"


def all_nodes(request: PlacementRequest, counts: Mapping[str, int], inventory: Inventory) -> Iterator[Nodes]:
    """Every way to put `counts` ranks on nodes for which there are slots."""
    nodes = usable(request, inventory)
    names = [node.name for node in nodes]
    ways = [list(combinations_with_replacement(names, counts[role.name])) for role in request.roles]
    known: dict[object, bool] = {}
    for chosen in product(*ways):
        where = {role.name: nodes_ for role, nodes_ in zip(request.roles, chosen, strict=True)}
        if any(node_faults(request, where)):
            continue
        if all(
            has_what_ranks_need(request, node, where) and _has_slots(request, node, where, known)
            for node in nodes
        ):
            yield where


def _has_slots(request: PlacementRequest, node: Node, where: Nodes, known: dict[object, bool]) -> bool:
    ranks = [
        (role, rank)
        for role in request.roles
        if role.device is not None
        for rank, name in enumerate(where[role.name])
        if name == node.name
    ]
    key = (node.name, tuple((role.name, rank) for role, rank in ranks))
    if key not in known:
        numa = {(d.index, node.name): max(d.numa, 0) for d in node.devices}
        known[key] = _seat(request, node, ranks, {}, numa, shares(request))
    return known[key]


def _seat(
    request: PlacementRequest,
    node: Node,
    ranks: Sequence[tuple[RoleRequest, int]],
    own: dict[tuple[str, int], tuple[str, ...]],
    numa: Mapping[tuple[str, str], int],
    part: Mapping[str, Fraction],
) -> bool:
    if not ranks:
        return True
    (role, rank), *rest = ranks
    for slots in _choices(request, node, role, rank):
        tried = own | {(role.name, rank): slots}
        used: dict[str, Fraction] = defaultdict(Fraction)
        for (name, _), each in tried.items():
            for index in each:
                used[index] += part[name]
        sound = all(total <= 1 for total in used.values())
        sound = sound and not any(slot_faults(request, tried, node.name, numa))
        if sound and _seat(request, node, rest, tried, numa, part):
            return True
    return False


def _choices(
    request: PlacementRequest, node: Node, role: RoleRequest, rank: int
) -> Iterator[tuple[str, ...]]:
    if role.device == "cpu":
        # There are as many as anybody wants; those that share one have that of the first role.
        owner = next(min(group) for group in components(request, request.collocated) if role.name in group)
        yield (f"{owner}:{rank}",)
        return
    indices = [d.index for d in node.devices if role.devices is None or d.index in role.devices]
    yield from combinations(indices, max(1, int(role.slots)))


def may_stay(
    request: PlacementRequest, before: Placement, gone: Collection[Assignment], targets: Sequence[Node]
) -> bool:
    """Return True if there are places on `targets` for the ranks that are `gone` when all others stay where they are."""
    return any(True for _ in ways_to_stay(request, before, gone, targets))


def ways_to_stay(
    request: PlacementRequest, before: Placement, gone: Collection[Assignment], targets: Sequence[Node]
) -> Iterator[Nodes]:
    """The ways to put the ranks that are `gone` on `targets` when all others stay where they are."""
    stay = [a for a in before.assignments if a not in gone]
    roles = {role.name: role for role in request.roles}
    part = shares(request)
    for chosen in product(targets, repeat=len(gone)):
        places = {(a.role, a.rank): a.node for a in stay}
        places |= {(a.role, a.rank): node.name for a, node in zip(gone, chosen, strict=True)}
        where = {
            name: tuple(places[name, rank] for rank in range(len(before.of_role(name)))) for name in roles
        }
        if any(node_faults(request, where)):
            continue
        if not all(has_what_ranks_need(request, node, where) for node in targets):
            continue
        if all(
            _seat(
                request,
                node,
                [
                    (roles[a.role], a.rank)
                    for a, to in zip(gone, chosen, strict=True)
                    if to is node and roles[a.role].device
                ],
                {
                    (a.role, a.rank): a.own
                    if roles[a.role].device == "cuda"
                    else next(_choices(request, node, roles[a.role], a.rank))
                    for a in stay
                    if a.node == node.name and roles[a.role].device
                },
                {(d.index, node.name): max(d.numa, 0) for d in node.devices},
                part,
            )
            for node in targets
        ):
            yield where


def all_counts(request: PlacementRequest) -> Iterator[dict[str, int]]:
    for each in product(*(range(role.least, role.count + 1) for role in request.roles)):
        yield {role.name: number for role, number in zip(request.roles, each, strict=True)}


def crossing(request: PlacementRequest, where: Nodes) -> float:
    """Bytes per step between nodes, when each rank of a role talks as much with each of the other."""
    total = 0.0
    for (one, other), weight in sorted(request.ties.weights.items()):
        pairs = list(product(where[one], where[other]))
        total += weight * sum(a != b for a, b in pairs) / len(pairs) if pairs else 0.0
    return total


def nodes_of_parts(request: PlacementRequest, where: Nodes) -> int:
    """The nodes that each part of several roles is on, all parts together. Parts that share nodes by request are one."""
    joined = [part for part in request.ties.parts if len(part) > 1]
    groups = components(request, (*request.collocated, *request.together, *joined))
    parts = [group for group in groups if any(set(part) <= group for part in joined)]
    return sum(len({node for name in part for node in where[name]}) for part in parts)


def in_rank_order(request: PlacementRequest, placement: Placement, inventory: Inventory) -> bool:
    """Ranks by node, then by slot; with groups, or with groups of several, by node."""
    order = {node.name: number for number, node in enumerate(inventory.nodes)}

    def key(a: Assignment, grouped: bool) -> tuple[int, int]:
        return order[a.node], 0 if grouped else a.slot

    grouped = {role.name: role.per_group is not None for role in request.roles}
    linked = {name for group in request.collocated for name in group}
    return all(
        key(one, grouped[role.name] or role.name in linked)
        <= key(other, grouped[role.name] or role.name in linked)
        for role in request.roles
        for one, other in pairwise(placement.of_role(role.name))
    )
