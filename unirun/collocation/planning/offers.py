"""The message when nothing fits: the role, what is missing, and changes with which it fits, found by planning again.

Each constraint and each count has *variants*, from the nearest to the loosest. Of each the nearest that fits is named.
When no change is enough alone, constraints are dropped one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import chain, islice
from math import ceil
from typing import Any

from msgspec.structs import replace

from unirun.collocation.inventory import CPU, Inventory, Node, PlacementRequest, RoleRequest, Ties
from unirun.collocation.planning.packer import Packer
from unirun.collocation.planning.problem import (
    GROUPS,
    MAX_NAMES_SHOWN,
    Bundle,
    Cells,
    Kinds,
    Problem,
    both,
    described,
    join,
    problem_of,
    with_count,
)
from unirun.collocation.planning.solve import Search, border, grow, processes
from unirun.errors import Fault, PlacementError
from unirun.spec.read import show_size, some
from unirun.spec.roles import LEAST_MEMORY
from unirun.values import Value

TRIES = 8
"""So many values are tried for a constraint, the nearest first; of more, the nearest is found by halving."""

SHARES = (Fraction(1, 2), Fraction("0.333"), Fraction("0.25"), Fraction("0.1"))
"""The shares of a slot that are tried, as they are written in a job file."""

MAX_NODES_SHOWN = 3
"""At most so many nodes are named."""

MAX_REQUESTS_SHOWN = 4
"""At most so many requests that fit are named."""

MANY = 1_000_000
"""More than any node has of any device."""

UNDONE = {
    "apart": "without separating {}",
    "isolated": "without isolating {}",
    "together": "without keeping {} on one node",
    "collocated": "without collocating {}",
    "devices": "any device for {}",
    "component": "{} in any component",
}


class Alternative(Value):
    """A request that is easier to place, with `more` nodes if it needs them, and how it differs from another one.

    `binds` are the constraints that it gives up, of the `roles`. Both are empty when there is only less to place, or
    more room.
    """

    request: PlacementRequest
    text: str
    binds: str = ""
    roles: tuple[str, ...] = ()
    more: int = 0


class Shortage(Value):
    """A shortage in words and numbers. Counts are ranks of `role`; each of `offers` fits."""

    role: str
    needed: int
    available: int
    constraint: str
    problem: str
    offers: tuple[Alternative, ...]


Variants = tuple[Sequence[Any], Callable[[Any], Alternative]]
"""Values from the nearest to the loosest, and the request with one of them."""


class Trials:
    """Tries requests on the nodes of an inventory. One node stands for all that are alike."""

    def __init__(self, inventory: Inventory) -> None:
        first: dict[object, Node] = {}
        self.like: dict[str, Node] = {}
        """By the name of a node, in the order of the inventory: the first node that is like it."""
        for node in inventory.nodes:
            same = (
                described(node),
                node.cpus,
                node.numa,
                node.component,
                node.memory,
                *node.resources.items(),
            )
            self.like[node.name] = first.setdefault(same, node)
        self.kinds = tuple(first.values())

    def nodes(self, request: PlacementRequest, more: int = 0) -> list[Node]:
        """The nodes that `request` may use when there are `more` like the usual one."""
        found = [like for name, like in self.like.items() if name not in request.tainted]
        found += [self.usual(request)] * more if more else []
        return found[: max(len(found) - request.spares, 0)]

    def most(self, type: str | None) -> int:
        """The most slots of a type that a node has; a host may run any number of processes."""
        if type in (None, CPU):
            return MANY
        return max((sum(device.type == type for device in node.devices) for node in self.kinds), default=0)

    def usual(self, request: PlacementRequest) -> Node:
        """The most frequent kind of node, of those with all types of devices that are asked for if there are any."""
        types = {role.device for role in request.roles} - {None, CPU}
        counts = Counter(like.name for like in self.like.values())
        return max(
            self.kinds,
            key=lambda node: (types.issubset(each.type for each in node.devices), counts[node.name]),
        )

    def fits(self, problem: Problem, nodes: Sequence[Node]) -> Callable[[Cells], bool]:
        """A function that says whether so many cells of `problem` can be placed on `nodes`."""
        # What does not fit with the most processes per processor does not fit with fewer.
        *_, most = processes(problem, nodes)
        packer, kinds = Packer(problem), Kinds(problem, most).of(nodes)
        return lambda cells: Search(packer, kinds, cells).possible()

    def fit(self, request: PlacementRequest, more: int = 0) -> bool:
        """Return True if the least ranks of `request` can be placed."""
        try:
            problem = problem_of(request)
        except PlacementError:
            return False
        return self.fits(problem, self.nodes(request, more))(problem.least)

    def nearest(
        self, variants: Variants, fits: Callable[[PlacementRequest], bool] | None = None
    ) -> Iterator[Alternative]:
        """The nearest of `variants` that fits; nothing if the loosest does not."""
        values, made = variants
        fits = fits or self.fit
        if not values or not fits(made(values[-1]).request):
            return
        if len(values) > TRIES:
            yield made(values[border(len(values) - 1, -1, lambda at: fits(made(values[at]).request))])
        else:
            yield next(each for each in map(made, values) if fits(each.request))

    def counts(self, request: PlacementRequest) -> list[int]:
        """By bundle, the cells with which `request`, which does not fit, would fit; 0 if with none."""
        problem = problem_of(request)
        fits = self.fits(problem, self.nodes(request))

        def most(bundle: int, least: int) -> int:
            return border(0, least, lambda cells: fits(with_count(problem.least, bundle, cells)))

        return [most(bundle, least) for bundle, least in enumerate(problem.least)]

    def more(self, request: PlacementRequest) -> Iterator[Alternative]:
        """With more nodes like the usual one, at most as many as there are ranks."""
        ranks = sum(role.least for role in request.roles) + request.spares
        if self.kinds and self.fit(request, ranks):
            number = border(ranks, 0, lambda number: self.fit(request, number))
            like = f" like {self.usual(request).name}" if len(self.kinds) > 1 else ""
            yield Alternative(request, f"adding {some(number, 'node')}{like}", more=number)

    def fewer(self, request: PlacementRequest, counts: Sequence[int]) -> Iterator[Alternative]:
        """With fewer ranks in one bundle, of which `counts` cells fit; that which lacks the fewest ranks first."""
        problem = problem_of(request)
        lacking = _lacking(problem, counts)
        for bundle in sorted([b for b, count in enumerate(counts) if count], key=lacking.__getitem__):
            changed = _with_cells(request, problem, with_count(problem.least, bundle, counts[bundle]))
            if self.fit(changed.request):
                yield changed
        for each, count in zip(problem.bundles, counts, strict=True):
            if not count and len(each.stacks) > 1:
                tries = map(partial(_in_parts, request, each), self._parts(each))
                yield from islice((changed for changed in tries if self.fit(changed.request)), 1)

    def _parts(self, bundle: Bundle) -> Sequence[int]:
        """Numbers of cells for roles that are together, so that these are smaller, when they have some ranks fewer.

        Of 4001 actors and 3000 rollouts a node must have all; of 4000 and 3000 it may have 4 and 3.
        """
        roles = [role for stack in bundle.stacks for role in stack.roles]
        if any(role.least < role.count for role in roles):
            return ()
        firsts = [stack.roles[0] for stack in bundle.stacks]
        least = max(ceil(role.count * role.slots / max(self.most(role.device), 1)) for role in firsts)
        sizes = range(least, min(role.count for role in roles) + 1)
        return sorted(sizes, key=lambda parts: (sum(role.count % parts for role in roles), -parts))[:TRIES]

    def smaller(self, request: PlacementRequest) -> Alternative | None:
        """With fewer ranks in all bundles, by equal parts, if `request` does not fit as it is."""
        try:
            problem = problem_of(request)
        except PlacementError:
            return None
        fits = self.fits(problem, self.nodes(request))
        ones = tuple(min(count, 1) for count in problem.least)
        if not fits(ones):
            return None
        changed = _with_cells(request, problem, grow(ones, problem.least, fits))
        return changed if self.fit(changed.request) else None


def _with_role(request: PlacementRequest, role: RoleRequest, **changes: Any) -> PlacementRequest:
    """`request` with changes of the role that has the name of `role`."""
    roles = tuple(replace(each, **changes) if each.name == role.name else each for each in request.roles)
    return replace(request, roles=roles)


def _with_counts(request: PlacementRequest, counts: dict[str, tuple[int, int]]) -> Alternative:
    """With other least and greatest counts of roles."""
    changed, said = request, []
    for role in request.roles:
        least, most = counts.get(role.name, (role.least, role.count))
        if (least, most) != (role.least, role.count):
            changed = _with_role(changed, role, least=least, count=most)
            # As in a job file: ``actor=4``, ``actor=2:8``.
            said.append(f"{role.name}={most if least == most else f'{least}:{most}'}")
    return Alternative(changed, join(said))


def _with_cells(request: PlacementRequest, problem: Problem, cells: Cells) -> Alternative:
    """`request`, when `cells` are the least of each bundle; a role that may not have fewer ranks has so many."""
    counts = {
        role.name: (min(role.least, ranks), role.count if role.least < role.count else ranks)
        for bundle, count in zip(problem.bundles, cells, strict=True)
        for stack in bundle.stacks
        for role in stack.roles
        if count < bundle.least and (ranks := count * stack.ranks) is not None
    }
    return _with_counts(request, counts)


def _in_parts(request: PlacementRequest, bundle: Bundle, parts: int) -> Alternative:
    """With so many ranks in the roles of a bundle that they can be cut into `parts`."""
    roles = [role for stack in bundle.stacks for role in stack.roles]
    return _with_counts(request, {role.name: (role.count - role.count % parts,) * 2 for role in roles})


def _room(request: PlacementRequest, trials: Trials) -> Iterator[Variants]:
    """With spares or excluded nodes in use."""

    def with_spares(spares: int) -> Alternative:
        return Alternative(replace(request, spares=spares), f"spares {spares}", f"spares {request.spares}")

    # The largest are wanted back first.
    names = sorted(request.tainted & trials.like.keys())
    names.sort(key=lambda name: -len(trials.like[name].devices))
    all_names = sorted(request.tainted)
    few = join([*all_names[:MAX_NODES_SHOWN], *(["…"] if len(all_names) > MAX_NODES_SHOWN else [])])

    def without(number: int) -> Alternative:
        back = sorted(names[:number])
        said = both(back) if number <= MAX_NODES_SHOWN else f"{number} of the nodes"
        changed = replace(request, tainted=request.tainted.difference(back))
        return Alternative(changed, f"not excluding {said}", f"excluded {few}")

    yield range(request.spares - 1, -1, -1), with_spares
    yield range(1, len(names) + 1), without


def _loosened(request: PlacementRequest, trials: Trials) -> Iterator[Variants]:
    """With one group less, or with smaller needs of one role."""

    def without(kind: str, group: tuple[str, ...]) -> Alternative:
        rest: dict[str, Any] = {kind: tuple(other for other in getattr(request, kind) if other is not group)}
        return Alternative(
            replace(request, **rest), UNDONE[kind].format(both(group)), f"{kind} {both(group)}", group
        )

    for kind in reversed(GROUPS):
        for group in getattr(request, kind):
            yield [group], partial(without, kind)
    for role in request.roles:
        for what, values in _smaller_needs(role, trials):
            yield values, partial(_with_need, request, role, what)


def _smaller_needs(role: RoleRequest, trials: Trials) -> Iterator[tuple[str, Sequence[Any]]]:
    """By field, or by resource, values of a role that are easier to place, from the nearest to the loosest."""
    most = trials.most(role.device)
    if role.slots > 1:
        yield "slots", [Fraction(number) for number in range(min(int(role.slots) - 1, most), 0, -1)]
    elif role.slots < 1:
        yield "slots", [share for share in SHARES if share < role.slots]
    for name, need in role.needs.items():
        there = max((node.offer(name) or 0 for node in trials.kinds), default=0)
        top = there if need == "all" else need - 1
        # Sizes are those that are short in a job file.
        unit = 1 if name != "memory" else 10**9 if top >= 10**10 else 10**6
        least = max(LEAST_MEMORY, unit) if name == "memory" else 1
        values = range(top // unit * unit, least - 1, -unit)
        yield name, values if name in ("cpus", "memory") else [*values, None]
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
        yield "per_node", [*sorted(sizes, key=lambda size: abs(size - there))[: TRIES - 1], None]
    if role.per_group is not None:
        parts = [size for size in range(role.per_group - 1, 1, -1) if role.per_group % size == 0]
        yield "per_group", [*parts[: TRIES - 1], None]
    if role.devices is not None:
        yield "devices", [None]
    if role.component is not None:
        yield "component", [None]


def _with_need(request: PlacementRequest, role: RoleRequest, what: str, value: Any) -> Alternative:
    """With another value of a field, or another need, of a role."""
    name = role.name
    if what in role.needs:
        before: Any = role.needs[what]
        needs = {**role.needs, what: value}
        changed = _with_role(
            request, role, needs={each: need for each, need in needs.items() if need is not None}
        )
        if what == "memory":
            # As in a job file: ``26GB``.
            value = f"{value // 10**9}GB" if value >= 10**10 else f"{value // 10**6}MB"
            before = show_size(before)
    else:
        changed, before = _with_role(request, role, **{what: value}), getattr(role, what)
        # As in a job file: ``2``, ``0.5``, ``0.333``.
        value, before = (
            f"{float(each):.3g}" if isinstance(each, Fraction) else each for each in (value, before)
        )
        before = join(before) if what == "devices" else before
    text = (
        UNDONE.get(what, f"without {what} of {{}}").format(name)
        if value is None
        else f"{name} {what} {value}"
    )
    return Alternative(changed, text, f"{name} {what} {before}", (name,))


def does_not_fit(request: PlacementRequest, inventory: Inventory) -> PlacementError:
    """The error for a request without faults for which no placement was found.

    It names single changes with which the request fits. When there are none, it says which roles do not fit alone, and
    names several changes together.
    """
    trials = Trials(inventory)
    whole, *alone = shortages(request, trials)
    none = [type for type in problem_of(request).types if not trials.most(type)]
    remedy = f"use nodes with {both(none)} devices" if none else "use more nodes, or larger ones"
    remedy = _remedy(whole.offers) or remedy
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


def _remedy(offers: Sequence[Alternative], where: str = "") -> str:
    """``actor=4 fits, or without separating actor and rollout, or adding 1 node``; empty without offers."""
    first, *others = [each.text for each in offers] or [""]
    return ", or ".join([f"{where}{first} fits", *others]) if first else ""


def shortages(request: PlacementRequest, trials: Trials) -> list[Shortage]:
    """The shortage of `request`; when no single change is enough, then those of the roles that do not fit alone."""
    whole = _shortage(request, trials)
    alone: list[Shortage] = []
    if not whole.offers:
        bundles = problem_of(request).bundles
        parts = [_part(request, bundle.names) for bundle in bundles if len(bundles) > 1]
        alone = [_shortage(part, trials) for part in parts if not trials.fit(part)]
        alone = alone if len(alone) > 1 else []
        whole = replace([*alone, whole][0], offers=tuple(_several(request, trials)))
    more = tuple(trials.more(request))
    return [replace(whole, offers=(*whole.offers[: MAX_REQUESTS_SHOWN - len(more)], *more)), *alone]


def _part(request: PlacementRequest, names: Sequence[str]) -> PlacementRequest:
    """`request` with the roles called `names` only."""
    groups: dict[str, Any] = {
        kind: tuple(group for group in getattr(request, kind) if set(group) <= {*names}) for kind in GROUPS
    }
    roles = tuple(role for role in request.roles if role.name in names)
    return replace(request, roles=roles, ties=Ties(), **groups)


def _shortage(request: PlacementRequest, trials: Trials) -> Shortage:
    problem = problem_of(request)
    counts = trials.counts(request)
    lacking = [name for name, need, there in _amounts(request, problem, trials) if need > there]
    loosened = chain.from_iterable(map(trials.nearest, _loosened(request, trials)))
    fewer = islice(trials.fewer(request, counts), MAX_REQUESTS_SHOWN // 2 if lacking else MAX_REQUESTS_SHOWN)
    room = chain.from_iterable(map(trials.nearest, _room(request, trials)))
    # Where slots are lacking, constraints are rarely the reason.
    found = chain(room, *((fewer, loosened) if lacking else (loosened, fewer)))
    offers = tuple(islice(found, MAX_REQUESTS_SHOWN))
    slots = "slots" if not lacking or lacking[0] in problem.types else lacking[0]
    constraint = slots if lacking else _binding_groups(request, trials)
    if offers and offers[0].binds:
        constraint = offers[0].binds
    # Of the roles whose constraint binds, else of all, that is named which lacks the fewest ranks.
    lacks = _lacking(problem, counts)
    bound = {problem.home[name] for name in offers[0].roles} if offers else ()
    bundle = max(bound or range(len(counts)), key=lambda b: (lacks[b] > 0, counts[b] > 0, -lacks[b], -b))
    stack = problem.bundles[bundle].stacks[0]
    role = stack.roles[0]
    needed, available = problem.bundles[bundle].least * stack.ranks, counts[bundle] * stack.ranks
    least = "at least " if role.least < role.count else ""
    besides = " besides the other roles" if len(problem.bundles) > 1 else ""
    why = "" if constraint in ("slots", *problem.grains) else f"{constraint}; "
    said = (
        f"{role.name} needs room for {least}{some(needed, 'rank')} and there is room for {available}{besides} "
        f"({why}{_amounts_said(request, problem, trials)})"
    )
    return Shortage(role.name, needed, available, constraint, said, offers)


def _lacking(problem: Problem, counts: Sequence[int]) -> list[int]:
    """By bundle, the ranks that are lacking when there is room for `counts` cells."""
    return [
        (bundle.least - count) * bundle.ranks for bundle, count in zip(problem.bundles, counts, strict=True)
    ]


def _binding_groups(request: PlacementRequest, trials: Trials) -> str:
    """All groups, if the request fits without them; else ``slots``."""
    free = replace(request, collocated=(), together=(), apart=(), isolated=())
    groups = [f"{kind} {both(group)}" for kind in GROUPS for group in getattr(request, kind)]
    return join(groups) if groups and trials.fit(free) else "slots"


def _several(request: PlacementRequest, trials: Trials) -> Iterator[Alternative]:
    """Several changes: constraints are dropped one after the other until that, with fewer ranks, is enough."""

    def enough(request: PlacementRequest) -> bool:
        return trials.smaller(request) is not None

    changed, said, binds = request, list[str](), list[str]()
    found = trials.smaller(request)
    while found is None:
        variants = next(
            (each for each in chain(_room(changed, trials), _loosened(changed, trials)) if each[0]), None
        )
        if variants is None:
            # Then there are more roles than slots.
            found = next(trials.more(changed), None) if said else None
            if found is None:
                return
            said, found = [*said, found.text], replace(found, text="")
            break
        values, made = variants
        last = next(trials.nearest(variants, enough), made(values[-1]))
        changed, found = last.request, trials.smaller(last.request)
        said.append(last.text)
        binds += [last.binds] if last.binds else []
    yield replace(found, text=both([found.text, *said] if found.text else said), binds=join(binds))


def _amounts(request: PlacementRequest, problem: Problem, trials: Trials) -> Iterator[tuple[str, int, int]]:
    """By dimension: how much is needed at least, and how much there is."""
    nodes = trials.nodes(request)
    for at, name in enumerate(problem.dimensions):
        need = sum(bundle.least * bundle.needs[at] for bundle in problem.bundles)
        if name in problem.grains:
            offers = [node.offer(name) for node in nodes]
            wholes = sum(bundle.least * bundle.wholes for bundle in problem.bundles) if name == "cpus" else 0
            need = need * problem.grains[name] + wholes * max((each or 0 for each in offers), default=0)
            if None not in offers:
                yield name, need, sum(each or 0 for each in offers)
        elif name != CPU:
            yield (
                name,
                -(-need // problem.unit),
                sum(each.type == name for node in nodes for each in node.devices),
            )


def _amounts_said(request: PlacementRequest, problem: Problem, trials: Trials) -> str:
    """``9 cuda slots are needed, 8 are there, 2 nodes with 4 each, 1 held back``."""
    nodes = trials.nodes(request)
    found = list(_amounts(request, problem, trials))
    said = []
    for name, need, there in found:
        if name in problem.types:
            shown, has = some(need, f"{name} slot"), str(there)
        else:
            shown, has = _amount(name, need), show_size(there) if name == "memory" else str(there)
            if name == "memory" and show_size(need) == has and need != there:
                # Sizes that differ by less than they are rounded.
                shown, has = f"{need} B of memory", f"{there} B"
            shown += f" ({_needers(request, name)})"
        said.append(f"{shown} {'is' if need == 1 else 'are'} needed, {has} are there")
    each = some(len(nodes), "node") if nodes else "no node is left"
    types = [name for name, *_ in found if name in problem.types]
    if len(types) == 1 and nodes:
        sizes = {sum(device.type == types[0] for device in node.devices) for node in nodes}
        each += f" with {'at most ' if len(sizes) > 1 else ''}{max(sizes)}{' each' if len(nodes) > 1 else ''}"
    held = min(request.spares, len(trials.like.keys() - request.tainted))
    unused = {"held back": held, "excluded": len(request.tainted)}
    return join([*said, each, *(f"{number} {why}" for why, number in unused.items() if number)])


def _amount(name: str, number: int | str) -> str:
    """``8 cpus``, ``all cpus``, ``64.0 GB of memory``, ``3 licenses``."""
    if name == "memory" and isinstance(number, int):
        return f"{show_size(number)} of memory"
    return some(number, "cpu") if name == "cpus" and isinstance(number, int) else f"{number} {name}"


def _needers(request: PlacementRequest, resource: str) -> str:
    """``engine 2 × 8, judge 4 × 1``: the roles that need a resource, and how much each of their ranks does."""
    roles = [role for role in request.roles if role.least and resource in role.needs]

    def share(role: RoleRequest) -> int:
        need = role.needs[resource]
        return role.least * (MANY if isinstance(need, str) else need)

    shown = sorted(roles, key=share, reverse=True)[:MAX_NAMES_SHOWN]
    each = [
        f"{role.name} {role.least} × {show_size(need) if resource == 'memory' and isinstance(need, int) else need}"
        for role in roles
        if role in shown and (need := role.needs[resource])
    ]
    return join([*each, *([some(len(roles) - len(shown), "more role")] if len(roles) > len(shown) else [])])
