"""A request as the problem that is solved: cells of bundles, on nodes of a few kinds; and its faults.

Roles that share slots, rank by rank, are a *stack*. Stacks whose ranks must be on one node in a fixed proportion are a
*bundle*, and its smallest part that cannot be cut is a *cell*: of 4 actors together with 2 rewards, 2 actors and a
reward. A role by itself is a bundle with one stack, whose cells are its ranks. Larger cells come from `per_group`, and
from `per_node`: then a cell is what a node has, and no node has two. So every constraint between ranks is either within
a cell, or says which cells a node may have besides others, and a placement is a vector of cells for each node. Needs of
cells and offers of nodes are vectors too: slots by type, processors, memory, and resources that have a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import combinations
from math import frexp, gcd, lcm, ldexp
from operator import attrgetter, sub
from typing import NamedTuple

from msgspec.structs import replace

from unirun.collocation.inventory import (
    CPU,
    NEARNESS,
    Assignment,
    Device,
    Node,
    PlacementRequest,
    RoleRequest,
    Slot,
    Ties,
    number_of_slots,
    slots_of,
)
from unirun.errors import Fault, PlacementError
from unirun.values import Value

Cells = tuple[int, ...]
"""The number of cells of each bundle."""

Amounts = tuple[int, ...]
"""An amount of each of `Problem.dimensions`: units of slots by type, then resources in grains."""

BITS = 80
"""Weights are integers of so many bits."""

MANY = 1 << 62
"""More than is ever needed of anything."""

MAX_NAMES_SHOWN = 6
"""Roles that a message names at most."""

GROUPS = {
    "collocated": "collocations",
    "together": "host_collocations",
    "apart": "separations",
    "isolated": "isolations",
}
"""By field of a request: the key in the job file."""


class Stack(Value):
    """Roles that share slots. A cell has `ranks` of each; each rank takes `units` of `width` slots of type `device`.

    Of `group` consecutive ranks all should be near one NUMA node. `only` are the indices that it may have. `width` is 0
    for roles that need no slot.
    """

    roles: tuple[RoleRequest, ...]
    device: str | None
    ranks: int
    width: int
    units: int
    group: int
    only: frozenset[str] | None

    def share(self, role: RoleRequest) -> float:
        """The share of each of its slots that a rank of `role` has. Whole slots are shared equally."""
        return float(role.slots) if role.slots < 1 else 1 / len(self.roles)


class Bundle(Value):
    """Stacks with ranks on the same nodes: `least` to `most` cells; with `single`, no node has two of them. With
    `component`, these nodes are of that one. A cell needs `needs`, and `wholes` times all processors of its node."""

    stacks: tuple[Stack, ...]
    least: int
    most: int
    single: bool
    component: int | None
    needs: Amounts
    wholes: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The roles in it."""
        return tuple(role.name for stack in self.stacks for role in stack.roles)

    @property
    def ranks(self) -> int:
        """Ranks of all roles in a cell."""
        return sum(stack.ranks * len(stack.roles) for stack in self.stacks)

    @property
    def light(self) -> bool:
        """True if it needs nothing of a node, and may be on any."""
        return not (self.wholes or any(self.needs) or self.single or self.component is not None)

    def ranks_of(self, role: str) -> int:
        """Ranks of `role` in a cell."""
        return next(stack.ranks for stack in self.stacks if any(each.name == role for each in stack.roles))


class Problem(Value):
    """The problem to solve. A slot has `unit` units. Stacks are numbered through all bundles. `types` are those of
    slots, and `grains` the other resources: every need of one is a multiple of its grain.

    `apart[b]` are the bundles that no node has besides cells of b. `isolated[s]` are the stacks that no NUMA node has
    besides s, `distinct[s]` those that are on other slots than s. `gains[b][c]` is the weight between bundles b and c,
    in both directions of the pair, in integers. `parts` are bundles with roles that wait for each other, each in one.
    """

    bundles: tuple[Bundle, ...]
    unit: int
    types: tuple[str, ...]
    grains: Mapping[str, int]
    apart: tuple[frozenset[int], ...]
    isolated: tuple[frozenset[int], ...]
    distinct: tuple[frozenset[int], ...]
    gains: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[int, ...], ...]

    @property
    def least(self) -> Cells:
        """The least cells of each bundle."""
        return tuple(bundle.least for bundle in self.bundles)

    @property
    def most(self) -> Cells:
        """The most cells of each bundle."""
        return tuple(bundle.most for bundle in self.bundles)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """All stacks, by their numbers."""
        return tuple(stack for bundle in self.bundles for stack in bundle.stacks)

    @property
    def home(self) -> dict[str, int]:
        """By role, its bundle."""
        return {name: number for number, bundle in enumerate(self.bundles) for name in bundle.names}

    @property
    def dimensions(self) -> tuple[str, ...]:
        """The names of what needs and offers are amounts of."""
        return (*self.types, *self.grains)

    @property
    def countable(self) -> bool:
        """True if cells fit on a node as soon as there are as many free slots as they take."""
        plain = all(stack.units == self.unit and stack.only is None for stack in self.stacks)
        return plain and not any(self.isolated)


def with_count(cells: Cells, bundle: int, count: int) -> Cells:
    """`cells` with `count` of one bundle."""
    return (*cells[:bundle], count, *cells[bundle + 1 :])


def total(cells: Cells, needs: Sequence[Amounts]) -> Amounts:
    """The sum of the `needs` of `cells`, which are given for one cell of each bundle."""
    there = [(number, need) for number, need in zip(cells, needs, strict=True) if number]
    if len(there) == 1:
        ((number, need),) = there
        return tuple([number * amount for amount in need])
    return tuple([sum(number * need[at] for number, need in there) for at in range(len(needs[0]))])


def problem_of(request: PlacementRequest) -> Problem:
    """The problem that `request` states. Raises `PlacementError` with all faults that do not depend on the nodes.

    Values of single roles and names in groups were checked when the job's spec was parsed.
    """
    faults = [*_device_faults(request), *_stack_faults(request), *_contradictions(request)]
    if not faults:
        problem = _compiled(request, faults)
        if not faults:
            return problem
    raise PlacementError(
        "\n".join(str(fault) for fault in faults),
        role=next((role.name for role in request.roles if faults[0].where.split(".")[0] == role.name), ""),
        needed=0,
        available=0,
        constraint=faults[0].where,
        faults=tuple(faults),
    )


def _device_faults(request: PlacementRequest) -> Iterator[Fault]:
    for role in request.roles:
        if role.devices is not None and role.device in (None, CPU):
            problem = "a list of devices is given, and the role runs on none"
            yield Fault(f"{role.name}.devices", problem, "leave it out, or name the type of device")
        elif role.devices is not None and not role.devices:
            yield Fault(f"{role.name}.devices", "the list is empty", "leave it out for any device")


def _stack_faults(request: PlacementRequest) -> Iterator[Fault]:
    roles = {role.name: role for role in request.roles}
    for names in merged(tuple(roles), request.collocated):
        if len(names) > 1:
            yield from _one_stack(both(names), [roles[name] for name in names])


def _one_stack(said: str, roles: Sequence[RoleRequest]) -> Iterator[Fault]:
    where = roles[0].name

    def differ(what: str, remedy: str) -> Fault:
        values = [getattr(role, what) for role in roles]
        if what == "devices":
            values = [join(value or ("any",)) for value in values]
        told = join(f"{role.name} {value}" for role, value in zip(roles, values, strict=True))
        return Fault(f"{where}.{what}", f"{said} are collocated and differ in {what}: {told}", remedy)

    if max(role.least for role in roles) > min(role.count for role in roles):
        yield differ("count", "give them the same count")
    if any(role.device is None for role in roles):
        yield differ("device", "a role without device has no slot to share")
    elif len({role.device for role in roles}) > 1:
        yield differ("device", "roles on different devices cannot share a slot")
    if len({role.per_node for role in roles if role.per_node is not None}) > 1:
        yield differ("per_node", "give them the same, or leave out all but one")
    whole = all(role.slots >= 1 for role in roles)
    if whole and len({role.slots for role in roles}) > 1:
        yield differ("slots", "give them the same number of slots")
    if not whole and (total := sum((role.slots for role in roles), Fraction())) > 1:
        told = " + ".join(str(role.slots) for role in roles)
        problem = f"{said} share a slot, and their shares {told} are {total}"
        yield Fault(f"{where}.slots", problem, f"give each at most 1/{len(roles)}")
    lists = [set(role.devices) for role in roles if role.devices is not None]
    if lists and not set.intersection(*lists):
        yield differ("devices", "name devices that all may have")


def _contradictions(request: PlacementRequest) -> Iterator[Fault]:
    """Pairs of roles that one group joins, directly or through other groups, and another group separates."""
    names = tuple(role.name for role in request.roles)
    stacks = {name: stack for stack in merged(names, request.collocated) for name in stack}
    near = merged(names, (*request.collocated, *request.together))
    bundles = {name: bundle for bundle in near for name in bundle}
    for kind, homes, why in (
        ("together", stacks, "share a slot, and shall be on different slots"),
        ("isolated", stacks, "share a slot, and shall be on different NUMA nodes"),
        ("apart", bundles, "have ranks on the same node, and shall be on different nodes"),
    ):
        for number, group in enumerate(getattr(request, kind)):
            for one, other in combinations(group, 2):
                if other in homes[one]:
                    others = "" if homes is stacks else " or host_collocations"
                    links = f"{both(homes[one])} are joined by collocations{others}"
                    yield Fault(
                        f"{GROUPS[kind]}[{number}]",
                        f"{one} and {other} {why}",
                        f"{links}: drop one of the two",
                    )


def _compiled(request: PlacementRequest, faults: list[Fault]) -> Problem:
    """The problem that `request` states; bundles that cannot be go to `faults`. The request has no other faults."""
    roles = {role.name: role for role in request.roles}
    unit = lcm(*(role.slots.denominator for role in request.roles))
    parts = [tuple(roles[name] for name in stack) for stack in merged(tuple(roles), request.collocated)]
    found = merged(tuple(roles), (*request.collocated, *request.together))
    types = tuple(sorted({role.device for role in request.roles if role.device is not None}))
    grains = _grains(request.roles)
    bundles = tuple(
        _bundle([stack for stack in parts if stack[0].name in names], unit, types, grains, faults)
        for names in found
    )
    homes = {name: number for number, bundle in enumerate(bundles) for name in bundle.names}
    stacks = [stack for bundle in bundles for stack in bundle.stacks]
    numbers = {role.name: number for number, stack in enumerate(stacks) for role in stack.roles}
    return Problem(
        bundles,
        unit,
        types,
        grains,
        _foes(request.apart, homes, len(bundles)),
        _foes(request.isolated, numbers, len(stacks)),
        _foes(request.together, numbers, len(stacks)),
        _gains(request.ties, homes, len(bundles)),
        _parts(request.ties, bundles, homes),
    )


def _grains(roles: Sequence[RoleRequest]) -> dict[str, int]:
    """By resource, the greatest amount of which every need is a multiple: nodes that differ by less are alike."""
    found: dict[str, int] = {}
    for role in roles:
        for name, need in role.needs.items():
            found[name] = gcd(found.get(name, 0), 1 if need == "all" else need)
    return {name: max(found[name], 1) for name in sorted(found)}


def _bundle(
    parts: Sequence[tuple[RoleRequest, ...]],
    unit: int,
    types: Sequence[str],
    grains: Mapping[str, int],
    faults: list[Fault],
) -> Bundle:
    """The bundle of `parts`, the roles of each stack. Elastic roles keep the proportion of their greatest counts."""
    names = [role.name for part in parts for role in part]
    most = [min(role.count for role in part) for part in parts]
    least = [max(role.least for role in part) for part in parts]
    groups = [lcm(*(role.per_group or 1 for role in part)) for part in parts]
    cells = gcd(*most)
    ranks = [count // cells for count in most]
    # As many of the smallest cells as make whole groups in every role.
    size = lcm(*(group // gcd(group, each) for group, each in zip(groups, ranks, strict=True)))
    on_node = {
        role.name: (role.per_node, each * size)
        for part, each in zip(parts, ranks, strict=True)
        for role in part
        if role.per_node is not None
    }
    uneven = [(name, there, each) for name, (there, each) in on_node.items() if there % each]
    sizes = {name: there // each for name, (there, each) in on_node.items()}
    for name, there, each in uneven:
        fits = f"per_node {each}, or a multiple of it, fits"
        why = f"with {join(n for n in names if n != name)} " if len(names) > 1 else "in whole groups "
        faults.append(Fault(f"{name}.per_node", f"{there} on a node, but {why}it comes in {each}s", fits))
    if not uneven and len(set(sizes.values())) > 1:
        said = join(f"{name} {there}" for name, (there, _) in on_node.items())
        problem = f"{both(names)} share nodes in proportion to their counts, and per_node is {said}"
        faults.append(Fault(f"{names[0]}.per_node", problem, "leave out all but one"))
    size *= min(sizes.values(), default=1) or 1
    ranks = [each * size for each in ranks]
    top = cells // size
    bottom = max(-(-low // each) for low, each in zip(least, ranks, strict=True))
    if bottom > top and not faults:
        counts = join(f"{part[0].name}={count}" for part, count in zip(parts, most, strict=True))
        fits = join(f"{part[0].name}={each}" for part, each in zip(parts, ranks, strict=True))
        problem = f"{counts} cannot be cut into parts of {fits}"
        faults.append(Fault(names[0], problem, f"use multiples of {fits}"))
    components = {role.name: role.component for part in parts for role in part if role.component is not None}
    if len({*components.values()}) > 1:
        said = join(f"{name} {number}" for name, number in components.items())
        problem = f"{both(names)} share nodes, and differ in component: {said}"
        faults.append(Fault(f"{names[0]}.component", problem, "give them the same"))
    stacks = tuple(_stack(*each, unit) for each in zip(parts, ranks, groups, strict=True))
    slots = [
        sum(each.ranks * each.width * each.units for each in stacks if each.device == type) for type in types
    ]
    needs = [(role.needs, stack.ranks) for stack in stacks for role in stack.roles]
    amounts = [
        sum(number * need // grain for each, number in needs if (need := each.get(name, 0)) != "all")
        for name, grain in grains.items()
    ]
    return Bundle(
        stacks,
        bottom,
        top,
        bool(on_node),
        next(iter(components.values()), None),
        (*slots, *amounts),
        sum(number for each, number in needs if each.get("cpus") == "all"),
    )


def _stack(roles: tuple[RoleRequest, ...], ranks: int, group: int, unit: int) -> Stack:
    first = roles[0]
    lists = [frozenset(role.devices) for role in roles if role.devices is not None]
    whole = first.slots >= 1
    return Stack(
        roles,
        first.device,
        ranks,
        width=0 if first.device is None else int(first.slots) if whole else 1,
        units=unit if whole else int(sum(role.slots for role in roles) * unit),
        group=group,
        only=frozenset.intersection(*lists) if lists else None,
    )


def _foes(
    groups: Iterable[Sequence[str]], home: Mapping[str, int], number: int
) -> tuple[frozenset[int], ...]:
    """By bundle or stack: those that it shares a group with."""
    sets = [{home[name] for name in group} for group in groups]
    return tuple(frozenset[int]().union(*(s for s in sets if n in s)) - {n} for n in range(number))


def _gains(ties: Ties, home: Mapping[str, int], number: int) -> tuple[tuple[int, ...], ...]:
    """In integers sums do not depend on their order, and placements with which as much crosses nodes are equal.

    They have `BITS` bits, floats have 53: nothing is lost of weights down to 1e-8 of the greatest.
    """
    _, exponent = frexp(max(ties.weights.values(), default=0.0))
    found = [[0] * number for _ in range(number)]
    for (one, other), weight in ties.weights.items():
        a, b = home[one], home[other]
        gain = int(ldexp(weight, BITS - exponent))
        found[a][b] += gain
        if a != b:
            found[b][a] += gain
    return tuple(tuple(row) for row in found)


def _parts(ties: Ties, bundles: Sequence[Bundle], home: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    """The bundles of each part that has several roles. Parts that have a bundle in common are one.

    A part that is the whole job is left out: it is on as few nodes as can be when few nodes are in use.
    """
    joined = [part for part in ties.parts if len(part) > 1]
    groups = merged(tuple(home), (*(bundle.names for bundle in bundles), *joined))
    firsts = {part[0] for part in joined}
    found = [
        tuple(sorted({home[name] for name in names})) for names in groups if not firsts.isdisjoint(names)
    ]
    return tuple(part for part in found if len(part) < len(bundles))


def join(words: Iterable[object]) -> str:
    """``a, b, c``."""
    return ", ".join(str(word) for word in words)


def both(words: Iterable[object]) -> str:
    """``a, b and c``."""
    *first, last = [str(word) for word in words]
    return f"{', '.join(first)} and {last}" if first else last


def merged(names: Sequence[str], groups: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """The connected components of `names` that `groups` make, everything in the order of `names`."""
    home = {name: [name] for name in names}
    for group in groups:
        first = home[group[0]]
        for name in group[1:]:
            if home[name] is not first:
                first += home[name]
                home |= dict.fromkeys(home[name], first)
    order = {name: number for number, name in enumerate(names)}
    return list(dict.fromkeys(tuple(sorted(home[name], key=order.__getitem__)) for name in names))


# Node kinds: the free slots of nodes and their distances, computed once for all nodes that are alike.
#
# Slots that are equally near to all others, and nearest to each other, form an *island*: each pair of an NVLink bridge
# is one, and so are the GPUs of a NUMA node behind NVSwitch. The distance of two slots is then a lookup in a small
# matrix, as a node has few islands, however many slots it has.

Distances = tuple[tuple[int, ...], ...]
"""By two islands: the distance of a slot of the one from a slot of the other, 0 for the nearest.

It is twice the index in `NEARNESS`, plus 1 for slots of two NUMA nodes: of equal links, one within a NUMA node is
nearer. The diagonal is the distance of two slots of one island.
"""

_DEVICE = tuple(map(attrgetter, ("type", "index", "numa", "links")))


class KindSlot(NamedTuple):
    """A slot of a kind: `number` among those of its type on the node, `free` units, and the stacks that use the others.

    `name` is its index on the node where a role asks for devices by index, and empty otherwise.
    """

    type: str
    number: int
    name: str
    numa: int
    island: int
    free: int
    users: frozenset[int] = frozenset()


class NodeKind(Value, eq=False, dict=True, gc=True):
    """The free slots of nodes of one kind. `held` are the cells that are there already and stay.

    `offer` is what is left for other cells, of which one of each bundle needs `needs`. `distances` are by type of slot.
    Kinds are compared by identity, because they are keys of many lookups.
    """

    slots: tuple[KindSlot, ...]
    distances: dict[str, Distances]
    held: Cells
    component: int
    offer: Amounts
    needs: tuple[Amounts, ...]

    @cached_property
    def shape(self) -> object:
        """Equal for kinds on which the same cells fit, however near each other their slots are."""
        slots = sorted((s.type, s.numa, s.name, s.free, tuple(sorted(s.users))) for s in self.slots)
        return self.held, self.component, self.offer, self.needs, tuple(slots)


class Kinds:
    """Finds the kinds of nodes. Each processor counts as `per_processor` slots."""

    def __init__(self, problem: Problem, per_processor: int) -> None:
        self._problem, self._per_processor = problem, per_processor
        self._named = any(stack.only is not None for stack in problem.stacks)
        self._known: dict[object, NodeKind] = {}
        self._none: Cells = (0,) * len(problem.bundles)
        self._needs = tuple(bundle.needs for bundle in problem.bundles)

    def of(self, nodes: Sequence[Node]) -> list[NodeKind]:
        """The kinds of empty `nodes`, in their order."""
        devices = any(type != CPU for type in self._problem.types)
        cpus = CPU in self._problem.types

        def key(node: Node) -> object:
            offer = [node.offer(name) for name in self._problem.grains]
            near = (node.cpus, node.numa) if cpus else ()
            return node.component, described(node) if devices else (), near, *offer

        found: list[NodeKind] = []
        last: Node | None = None
        kind: NodeKind | None = None
        for node in nodes:
            # Neighbours mostly are alike, and a comparison is fast. Explanations repeat one node for all that are.
            if kind is None or last is None or (node is not last and replace(node, name=last.name) != last):
                same = key(node)
                kind = self._known.get(same)
                if kind is None:
                    kind = self._known[same] = self._empty(node)
            found.append(kind)
            last = node
        return found

    def _empty(self, node: Node) -> NodeKind:
        found: list[KindSlot] = []
        distances: dict[str, Distances] = {}
        for type in self._problem.types:
            slots = slots_of(node, type, self._per_processor)
            devices = [device for device in node.devices if device.type == type]
            of, distances[type] = _islands(slots, devices)
            found += [
                KindSlot(type, number, index if self._named else "", numa, island, self._problem.unit)
                for number, ((index, numa), island) in enumerate(zip(slots, of, strict=True))
            ]
        # Devices may have names of their own on each node, as with masks by UUID: these nodes are of one kind.
        offer = self.offer(node)
        same = (tuple(found), tuple(distances.values()), node.component, offer, self._needs_on(node))
        return self._known.setdefault(same, NodeKind(same[0], distances, self._none, *same[2:]))

    def offer(self, node: Node) -> Amounts:
        """The amounts that empty `node` has: far less work than its kind."""
        unit, problem = self._problem.unit, self._problem
        slots = [unit * number_of_slots(node, type, self._per_processor) for type in problem.types]
        others = [(node.offer(name), grain) for name, grain in problem.grains.items()]
        return (*slots, *(MANY if there is None else there // grain for there, grain in others))

    def _needs_on(self, node: Node) -> tuple[Amounts, ...]:
        """The needs of a cell of each bundle on `node`."""
        if "cpus" not in self._problem.grains:
            return self._needs
        at = self._problem.dimensions.index("cpus")
        return tuple(
            with_count(bundle.needs, at, bundle.needs[at] + bundle.wholes * (node.offer("cpus") or 0))
            for bundle in self._problem.bundles
        )

    def left(
        self, node: Node, kind: NodeKind, held: Cells, taken: Sequence[tuple[int, Assignment]]
    ) -> NodeKind:
        """The kind of `node`, empty of `kind`, when it has the cells `held`: ranks `taken`, each with its stack."""
        if not any(held):
            return kind
        stacks = self._problem.stacks
        users: dict[tuple[str | None, str], list[int]] = {}
        for stack, each in taken:
            for name in each.own:
                users.setdefault((stacks[stack].device, name), []).append(stack)
        slots = []
        for slot, name in zip(kind.slots, names_of(node, kind), strict=True):
            here = users.get((slot.type, name), ())
            free = slot.free - sum(stacks[stack].units for stack in here)
            slots.append(slot._replace(free=free, users=frozenset(here)))
        same = (kind, held, tuple(slots))
        offer = tuple(map(sub, kind.offer, total(held, kind.needs)))
        return self._known.setdefault(
            same, NodeKind(same[2], kind.distances, held, kind.component, offer, kind.needs)
        )

    def full(self, held: Cells, component: int) -> NodeKind:
        """A kind of a component with nothing left beside the cells `held`."""
        nothing = (0,) * len(self._problem.dimensions)
        return self._known.setdefault(
            (held, component), NodeKind((), {}, held, component, nothing, self._needs)
        )


def described(node: Node) -> tuple[object, ...]:
    """The devices of `node` as far as they matter to the planner; equal for nodes that are alike."""
    return tuple([tuple(map(each, node.devices)) for each in _DEVICE])


def names_of(node: Node, kind: NodeKind) -> tuple[str, ...]:
    """The index of each slot of `kind` on `node`, as device masks have it."""
    names: dict[str, list[str]] = {}
    for device in node.devices:
        names.setdefault(device.type, []).append(device.index)
    return tuple(str(p.number) if p.type == CPU else names[p.type][p.number] for p in kind.slots)


def _islands(slots: Sequence[Slot], devices: Sequence[Device]) -> tuple[Sequence[int], Distances]:
    """The island of each slot, and the distances. `devices` are those of `slots`, in the same order; none for CPUs.

    Where the driver reports no link, the distance follows from the NUMA nodes.
    """
    told = [dict(device.links) for device in devices]
    numas = [numa for _, numa in slots]

    def distance(one: int, other: int) -> int:
        same = numas[one] == numas[other]
        said = [told[a].get(devices[b].index) for a, b in ((one, other), (other, one)) if told]
        # Each device reports its link to the other one; the nearer counts.
        near = min((NEARNESS.index(each) for each in said if each in NEARNESS), default=None)
        return 2 * (NEARNESS.index("numa" if same else "system") if near is None else near) + (not same)

    kinds: list[object] = [*numas]
    rows: list[list[int]] = []
    if any(told):
        every = range(len(slots))
        rows = [[distance(one, other) for other in every] for one in every]
        for at, row in enumerate(rows):
            # As far from itself as from its nearest: then the rows of slots of one island are equal.
            row[at] = min((far for other, far in enumerate(row) if other != at), default=0)
        kinds = [(numa, *row) for numa, row in zip(numas, rows, strict=True)]
    number = {kind: island for island, kind in enumerate(dict.fromkeys(kinds))}
    first = [kinds.index(kind) for kind in number]
    distances = tuple(
        tuple(rows[one][other] if rows else distance(one, other) for other in first) for one in first
    )
    return [number[kind] for kind in kinds], distances
