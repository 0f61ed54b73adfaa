"""Requests that fit and differ little from one that does not: found by trying changes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain, islice
from math import ceil
from typing import Any, NamedTuple

from msgspec.structs import replace

from unirun.collocation.inventory import CPU, Inventory, Node, PlacementRequest, RoleRequest, Ties
from unirun.collocation.planning.packer import Packer
from unirun.collocation.planning.problem import (
    GROUPS,
    Bundle,
    Cells,
    Kinds,
    Problem,
    both,
    described,
    join,
    problem_of,
    some,
    with_count,
)
from unirun.collocation.planning.solve import border, feasible, processes, towards
from unirun.errors import Fault, PlacementError
from unirun.values import Value

TRIES = 8
"""So many values are tried for a constraint, the nearest first."""

SHARES = (Fraction(1, 2), Fraction("0.333"), Fraction("0.25"), Fraction("0.1"))
"""The shares of a slot that are tried, as they are written in a job file."""

MAX_NODES_SHOWN = 3
"""At most so many nodes are named."""

MANY = 1_000_000
"""More than any node has of anything."""

UNDONE = {
    "apart": "without separating {}",
    "isolated": "without isolating {}",
    "together": "without keeping {} on one node",
    "collocated": "without collocating {}",
}


class Difference(NamedTuple):
    """A difference of two requests. `binds` is the constraint that is given up, of `role` if it is a role's."""

    text: str
    binds: str = ""
    role: str = ""


class Alternative(Value):
    """A request that fits, with `more` nodes if it needs them, and how it differs from the one that does not.

    `binds` are the constraints that it gives up, of `role` if they are a role's. Both are empty when there is only less
    to place, or more room.
    """

    request: PlacementRequest
    text: str
    binds: str = ""
    role: str = ""
    more: int = 0


class Trials:
    """Tries requests on the nodes of an inventory. One node stands for all that are alike."""

    def __init__(self, inventory: Inventory) -> None:
        first: dict[object, Node] = {}
        self.like: dict[str, Node] = {}
        """By the name of a node, in the order of the inventory: the first node that is like it."""
        for node in inventory.nodes:
            self.like[node.name] = first.setdefault(
                (described(node), node.cpus, node.numa, node.component), node
            )
        self._kinds = tuple(first.values())

    def nodes(self, request: PlacementRequest, more: int = 0) -> list[Node]:
        """The nodes that `request` may use when there are `more` like the usual one."""
        found = [like for name, like in self.like.items() if name not in request.tainted]
        if more:
            found += [self.usual(request)] * more
        return found[: max(len(found) - request.spares, 0)]

    def most(self, type: str | None) -> int:
        """The most slots of a type that a node has; a host may run any number of processes."""
        if type in (None, CPU):
            return MANY
        return max((sum(device.type == type for device in node.devices) for node in self._kinds), default=0)

    def usual(self, request: PlacementRequest) -> Node:
        """The most frequent kind of node, of those with all types of devices that are asked for if there are any."""
        types = {role.device for role in request.roles} - {None, CPU}
        counts = Counter(like.name for like in self.like.values())
        return max(
            self._kinds,
            key=lambda node: (types.issubset(each.type for each in node.devices), counts[node.name]),
        )

    def _feasible(self, problem: Problem, nodes: Sequence[Node]) -> Callable[[Cells], bool]:
        """A function that says whether at most the least cells of `problem` can be placed on `nodes`."""
        # What does not fit with the most processes per processor does not fit with fewer.
        *_, most = processes(problem, nodes)
        return feasible(Packer(problem), Kinds(problem, most).of(nodes), problem.least)

    def fit(self, request: PlacementRequest, more: int = 0) -> bool:
        """Return True if the least ranks of `request` can be placed."""
        try:
            problem = problem_of(request)
        except PlacementError:
            return False
        return self._feasible(problem, self.nodes(request, more))(problem.least)

    def counts(self, request: PlacementRequest) -> list[int]:
        """By bundle, the cells with which `request`, which does not fit, would fit; 0 if with none."""
        problem = problem_of(request)
        fits = self._feasible(problem, self.nodes(request))

        def most(bundle: int, least: int) -> int:
            return border(0, least, lambda cells: fits(with_count(problem.least, bundle, cells)))

        return [most(bundle, least) for bundle, least in enumerate(problem.least)]

    def room(self, request: PlacementRequest) -> Iterator[Alternative]:
        """With spares or excluded nodes in use."""
        if request.spares and self.fit(replace(request, spares=0)):
            spares = border(0, request.spares, lambda number: self.fit(replace(request, spares=number)))
            yield offer(request, replace(request, spares=spares))
        # The largest are wanted back first.
        names = sorted(request.tainted & self.like.keys())
        names.sort(key=lambda name: -len(self.like[name].devices))

        def without(back: int) -> PlacementRequest:
            return replace(request, tainted=request.tainted.difference(names[:back]))

        if names and self.fit(without(len(names))):
            yield offer(request, without(border(len(names), 0, lambda back: self.fit(without(back)))))

    def more(self, request: PlacementRequest) -> Alternative | None:
        """With more nodes like the usual one, at most as many as there are ranks."""
        ranks = sum(role.least for role in request.roles) + request.spares
        if not self._kinds or not self.fit(request, ranks):
            return None
        number = border(ranks, 0, lambda number: self.fit(request, number))
        like = f" like {self.usual(request).name}" if len(self._kinds) > 1 else ""
        return Alternative(request, f"adding {some(number, 'node')}{like}", more=number)

    def fewer(self, request: PlacementRequest, counts: Sequence[int]) -> Iterator[Alternative]:
        """With fewer ranks in one bundle, of which `counts` cells fit; that which lacks the fewest ranks first."""
        problem = problem_of(request)

        def missing(bundle: int) -> int:
            return (problem.least[bundle] - counts[bundle]) * problem.bundles[bundle].ranks

        for bundle in sorted([b for b, count in enumerate(counts) if count], key=missing):
            changed = _with_cells(request, problem, with_count(problem.least, bundle, counts[bundle]))
            if self.fit(changed):
                yield offer(request, changed)
        for each, count in zip(problem.bundles, counts, strict=True):
            if not count and len(each.stacks) > 1:
                yield from islice(self._in_smaller_cells(request, each), 1)

    def _in_smaller_cells(self, request: PlacementRequest, bundle: Bundle) -> Iterator[Alternative]:
        """With some ranks fewer in roles that are together, so that their cells are smaller.

        Of 4001 actors and 3000 rollouts a node must have all; of 4000 and 3000 it may have 4 and 3.
        """
        roles = [role for stack in bundle.stacks for role in stack.roles]
        if any(role.least < role.count for role in roles):
            return
        firsts = [stack.roles[0] for stack in bundle.stacks]
        least = max(ceil(role.count * role.slots / max(self.most(role.device), 1)) for role in firsts)
        sizes = range(least, min(role.count for role in roles) + 1)
        tries = sorted(sizes, key=lambda parts: (sum(role.count % parts for role in roles), -parts))
        for parts in islice(tries, TRIES):
            changed = request
            for role in roles:
                fewer = role.count - role.count % parts
                changed = _with_role(changed, role, least=fewer, count=fewer)
            if self.fit(changed):
                yield offer(request, changed)

    def smaller(self, request: PlacementRequest) -> PlacementRequest | None:
        """With fewer ranks in all bundles, by equal parts."""
        try:
            problem = problem_of(request)
        except PlacementError:
            return None
        least = problem.least
        fits = self._feasible(problem, self.nodes(request))
        ones = tuple(min(count, 1) for count in least)
        if not fits(ones):
            return None
        none = (0,) * len(least)
        cells = towards(none, least, lambda cells: fits(tuple(map(max, cells, ones))))
        changed = _with_cells(request, problem, tuple(map(max, cells, ones)))
        return changed if self.fit(changed) else None

    def loosened(self, request: PlacementRequest) -> Iterator[Alternative]:
        """With one group less, or with smaller needs of one role."""
        yield from (offer(request, changed) for changed in _without_a_group(request) if self.fit(changed))
        for role in request.roles:
            for each in _variants(role, self):
                yield from self._first_of(request, role, each)

    def _first_of(
        self, request: PlacementRequest, role: RoleRequest, tries: Variants
    ) -> Iterator[Alternative]:
        """The first of `tries`, changes of `role`, with which `request` fits."""
        for each in islice(tries, TRIES):
            changed = _with_role(request, role, **each)
            if self.fit(changed):
                yield offer(request, changed)
                return


Variants = Iterable[dict[str, Any]]
"""Changes of a role, the nearest first."""


def _variants(role: RoleRequest, trials: Trials) -> Iterator[Variants]:
    """With fewer slots, or a smaller share of one; with another `per_node`; a smaller `per_group`; on any device."""
    most = trials.most(role.device)
    if role.slots > 1:
        yield ({"slots": Fraction(size)} for size in range(min(int(role.slots) - 1, most), 0, -1))
    else:
        yield ({"slots": share} for share in SHARES if share < role.slots < 1)
    if role.per_node is not None:
        there = role.per_node
        # Those that leave too few nodes, or fill more than one, are not tried.
        sizes = [
            size
            for size in range(1, role.count + 1)
            if role.count % size == 0
            and size != there
            and size * role.slots <= most
            and role.count <= size * len(trials.like)
        ]
        yield ({"per_node": size} for size in sorted(sizes, key=lambda size: abs(size - there)))
    if role.per_group is not None:
        parts = [size for size in range(role.per_group - 1, 1, -1) if role.per_group % size == 0]
        yield ({"per_group": size} for size in (*parts, None))
    if role.devices is not None:
        yield [{"devices": None}]
    if role.component is not None:
        yield [{"component": None}]


def _with_role(request: PlacementRequest, role: RoleRequest, **changes: Any) -> PlacementRequest:
    """`request` with changes of the role that has the name of `role`."""
    roles = tuple(replace(each, **changes) if each.name == role.name else each for each in request.roles)
    return replace(request, roles=roles)


def _with_cells(request: PlacementRequest, problem: Problem, cells: Cells) -> PlacementRequest:
    """`request`, when `cells` are the least of each bundle; a role that may not have fewer ranks has so many."""
    for bundle, count in zip(problem.bundles, cells, strict=True):
        for stack in bundle.stacks if count < bundle.least else ():
            for role in stack.roles:
                ranks = count * stack.ranks
                elastic = role.least < role.count
                most = role.count if elastic else ranks
                request = _with_role(request, role, least=min(role.least, ranks), count=most)
    return request


def _without_a_group(request: PlacementRequest) -> Iterator[PlacementRequest]:
    """`request` with one group less, for each of them."""
    for kind in reversed(GROUPS):
        groups = getattr(request, kind)
        for group in groups:
            rest: dict[str, Any] = {kind: tuple(other for other in groups if other is not group)}
            yield replace(request, **rest)


def without_a_constraint(request: PlacementRequest) -> Iterator[PlacementRequest]:
    """`request` with one constraint less: spares, excluded nodes, a group, or a need of a role."""
    if request.spares:
        yield replace(request, spares=0)
    if request.tainted:
        yield replace(request, tainted=frozenset())
    yield from _without_a_group(request)
    for role in request.roles:
        for what in ("devices", "component", "per_group", "per_node"):
            if getattr(role, what) is not None:
                yield _with_role(request, role, **{what: None})
        if role.slots > 1:
            yield _with_role(request, role, slots=Fraction(1))


def part_of(request: PlacementRequest, names: Sequence[str]) -> PlacementRequest:
    """`request` with the roles called `names` only."""
    groups: dict[str, Any] = {kind: tuple(_cut(getattr(request, kind), names)) for kind in GROUPS}
    roles = tuple(role for role in request.roles if role.name in names)
    return replace(request, roles=roles, ties=Ties(), **groups)


def with_part(
    request: PlacementRequest, before: PlacementRequest, after: PlacementRequest
) -> PlacementRequest:
    """`request` with the changes from `before`, a part of it, to `after`."""
    changed = {role.name: role for role in after.roles}
    names = [role.name for role in before.roles]
    groups: dict[str, Any] = {}
    for kind in GROUPS:
        gone = {*getattr(before, kind)}.difference(getattr(after, kind))
        groups[kind] = tuple(
            group for group in getattr(request, kind) if gone.isdisjoint(_cut([group], names))
        )
    return replace(
        request,
        roles=tuple(changed.get(role.name, role) for role in request.roles),
        spares=min(request.spares, after.spares),
        tainted=request.tainted & after.tainted,
        **groups,
    )


def _cut(groups: Sequence[Sequence[str]], names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for group in groups:
        cut = tuple(name for name in group if name in names)
        if len(cut) > 1:
            yield cut


def offer(before: PlacementRequest, after: PlacementRequest) -> Alternative:
    """`after`, which fits, in place of `before`."""
    found = differences(before, after)
    binds = join(each.binds for each in found if each.binds)
    return Alternative(after, both(each.text for each in found), binds, found[-1].role)


def differences(before: PlacementRequest, after: PlacementRequest) -> list[Difference]:
    """The differences; `after` has the same roles, and no more of anything."""
    pairs = list(zip(before.roles, after.roles, strict=True))
    # As in a job file: ``actor=4``, ``actor=2:8``.
    counts = [
        f"{other.name}={'' if other.least == other.count else f'{other.least}:'}{other.count}"
        for one, other in pairs
        if (one.least, one.count) != (other.least, other.count)
    ]
    found = [Difference(join(counts))] if counts else []
    for one, other in pairs:
        found += _differences_of_role(one, other)
    for kind in GROUPS:
        for group in getattr(before, kind):
            if group not in getattr(after, kind):
                found.append(Difference(UNDONE[kind].format(both(group)), f"{kind} {both(group)}"))
    if before.spares != after.spares:
        found.append(Difference(f"spares {after.spares}", f"spares {before.spares}"))
    if back := sorted(before.tainted - after.tainted):
        text = f"not excluding {both(back) if len(back) <= MAX_NODES_SHOWN else f'{len(back)} of the nodes'}"
        names = sorted(before.tainted)
        few = join([*names[:MAX_NODES_SHOWN], *(["…"] if len(names) > MAX_NODES_SHOWN else [])])
        found.append(Difference(text, f"excluded {few}"))
    return found


def _differences_of_role(one: RoleRequest, other: RoleRequest) -> Iterator[Difference]:
    name = one.name
    if one.slots != other.slots:
        # As in a job file: ``2``, ``0.5``, ``0.333``.
        before, after = (f"{name} slots {float(slots):.3g}" for slots in (one.slots, other.slots))
        yield Difference(after, before, name)
    for what in ("per_node", "per_group"):
        size, there = getattr(one, what), getattr(other, what)
        if size != there:
            text = f"without {what} of {name}" if there is None else f"{name} {what} {there}"
            yield Difference(text, f"{name} {what} {size}", name)
    if one.devices != other.devices:
        yield Difference(f"any device for {name}", f"{name} devices {join(one.devices or ())}", name)
    if one.component != other.component:
        yield Difference(f"{name} in any component", f"{name} component {one.component}", name)


# The reasons why a request does not fit, and similar requests that do, in words.

MAX_REQUESTS_SHOWN = 4
"""At most so many requests that fit are named."""


class Shortage(Value):
    """A shortage in words and numbers. Counts are ranks of `role`; each of `offers` fits."""

    role: str
    needed: int
    available: int
    constraint: str
    problem: str
    offers: tuple[Alternative, ...]


def does_not_fit(request: PlacementRequest, inventory: Inventory) -> PlacementError:
    """The error for a request without faults for which no placement was found.

    It names single changes with which the request fits. When there are none, it says which roles do not fit alone, and
    names several changes together.
    """
    trials = Trials(inventory)
    whole, *alone = shortages(request, trials)
    remedy = _remedy(whole.offers) or _no_remedy(request, trials)
    faults = [Fault(each.role, each.problem, _remedy(each.offers[:1], "alone ")) for each in alone]
    if faults and whole.offers:
        remedy = f"for all roles {remedy}"
    return PlacementError(
        "\n".join(map(str, faults)) or whole.problem,
        remedy,
        role=whole.role,
        needed=whole.needed,
        available=whole.available,
        constraint=whole.constraint,
        nearest=tuple(each.text for each in whole.offers),
        faults=tuple(faults) or (Fault(whole.role, whole.problem, remedy),),
    )


def shortages(request: PlacementRequest, trials: Trials) -> list[Shortage]:
    """The shortage of `request`; when no single change is enough, then those of the roles that do not fit alone."""
    whole = _shortage(request, trials)
    alone: list[tuple[PlacementRequest, Shortage]] = []
    if not whole.offers:
        problem = problem_of(request)
        parts = [part_of(request, bundle.names) for bundle in problem.bundles if len(problem.bundles) > 1]
        alone = [(part, _shortage(part, trials)) for part in parts if not trials.fit(part)]
        first = alone[0][1] if len(alone) > 1 else whole
        whole = replace(first, offers=tuple(_several(request, trials, alone)))
    more = trials.more(request)
    if more is not None:
        whole = replace(whole, offers=(*whole.offers[: MAX_REQUESTS_SHOWN - 1], more))
    return [whole, *(each for _, each in alone if len(alone) > 1)]


def _shortage(request: PlacementRequest, trials: Trials) -> Shortage:
    problem = problem_of(request)
    counts = trials.counts(request)
    lacking = any(need > there for _, need, there in _slots(request, problem, trials))
    ways = [
        trials.loosened(request),
        islice(trials.fewer(request, counts), MAX_REQUESTS_SHOWN // 2 if lacking else MAX_REQUESTS_SHOWN),
    ]
    # Where slots are lacking, constraints are rarely the reason.
    found = chain(trials.room(request), *(reversed(ways) if lacking else ways))
    offers = tuple(islice(found, MAX_REQUESTS_SHOWN))
    constraint = "slots" if lacking else _binding_groups(request, trials)
    if offers and offers[0].binds:
        constraint = offers[0].binds
    bundle = _short(problem, counts, offers)
    stack = problem.bundles[bundle].stacks[0]
    role = stack.roles[0]
    needed, available = problem.bundles[bundle].least * stack.ranks, counts[bundle] * stack.ranks
    least = "at least " if role.least < role.count else ""
    besides = " besides the other roles" if len(problem.bundles) > 1 else ""
    why = "" if constraint == "slots" else f"{constraint}; "
    said = (
        f"{role.name} needs room for {least}{some(needed, 'rank')} and there is room for {available}{besides} "
        f"({why}{_slots_said(request, problem, trials)})"
    )
    return Shortage(role.name, needed, available, constraint, said, offers)


def _short(problem: Problem, counts: Sequence[int], offers: Sequence[Alternative]) -> int:
    """The bundle to name: that of the role whose constraint binds, else that which lacks the fewest ranks."""

    def missing(bundle: int) -> int:
        return (problem.bundles[bundle].least - counts[bundle]) * problem.bundles[bundle].ranks

    for number, bundle in enumerate(problem.bundles):
        if offers and offers[0].role in bundle.names:
            return number
    return max(range(len(counts)), key=lambda b: (missing(b) > 0, counts[b] > 0, -missing(b), -b))


def _binding_groups(request: PlacementRequest, trials: Trials) -> str:
    """All groups, if the request fits without them; else ``slots``."""
    free = replace(request, collocated=(), together=(), apart=(), isolated=())
    return join(each.binds for each in differences(request, free)) if trials.fit(free) else "slots"


def _several(
    request: PlacementRequest, trials: Trials, alone: Sequence[tuple[PlacementRequest, Shortage]]
) -> Iterator[Alternative]:
    """One offer of several changes: what each role needs alone, and fewer ranks; else without constraints as well."""
    changed = request
    for part, shortage in alone:
        if shortage.offers:
            changed = with_part(changed, part, shortage.offers[0].request)
    ever_less = [changed]
    while (less := next(without_a_constraint(ever_less[-1]), None)) is not None:
        ever_less.append(less)
    for each in chain([changed], without_a_constraint(changed), ever_less[1:]):
        found = each if trials.fit(each) else trials.smaller(each)
        if found is not None:
            yield offer(request, found)
            return
    # Then there are more roles than slots.
    more = trials.more(ever_less[-1])
    if more is not None and ever_less[-1] != request:
        rest = offer(request, ever_less[-1])
        yield replace(rest, text=both([rest.text, more.text]), more=more.more)


def _slots(request: PlacementRequest, problem: Problem, trials: Trials) -> Iterator[tuple[str, int, int]]:
    """By type of device: how many are needed at least, and how many there are."""
    nodes = trials.nodes(request)
    for type in problem.types:
        if type != CPU:
            need = sum(bundle.least * bundle.demand().get(type, 0) for bundle in problem.bundles)
            there = sum(device.type == type for node in nodes for device in node.devices)
            yield type, -(-need // problem.unit), there


def _slots_said(request: PlacementRequest, problem: Problem, trials: Trials) -> str:
    """``9 cuda slots are needed, 8 are there, 2 nodes with 4 each, 1 held back``."""
    nodes = trials.nodes(request)
    slots = list(_slots(request, problem, trials))
    said = [
        f"{some(need, f'{type} slot')} {'is' if need == 1 else 'are'} needed, {there} are there"
        for type, need, there in slots
    ]
    there = some(len(nodes), "node") if nodes else "no node is left"
    if len(slots) == 1 and nodes:
        sizes = {sum(device.type == slots[0][0] for device in node.devices) for node in nodes}
        there += (
            f" with {'at most ' if len(sizes) > 1 else ''}{max(sizes)}{' each' if len(nodes) > 1 else ''}"
        )
    held = min(request.spares, len(trials.like.keys() - request.tainted))
    unused = {"held back": held, "excluded": len(request.tainted)}
    return join([*said, there, *(f"{number} {why}" for why, number in unused.items() if number)])


def _remedy(offers: Sequence[Alternative], where: str = "") -> str:
    """``actor=4 fits, or without separating actor and rollout, or adding 1 node``; empty without offers."""
    first, *others = [each.text for each in offers] or [""]
    return ", or ".join([f"{where}{first} fits", *others]) if first else ""


def _no_remedy(request: PlacementRequest, trials: Trials) -> str:
    """The remedy when no change is enough."""
    problem = problem_of(request)
    none = [type for type in problem.types if not trials.most(type)]
    return f"use nodes with {both(none)} devices" if none else "use more nodes, or larger ones"
