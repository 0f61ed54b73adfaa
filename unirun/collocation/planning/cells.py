"""A request, brought into the form in which it is solved: how many cells of each bundle are on which node.

Roles that share slots, rank by rank, are a *stack*. Stacks whose ranks must be on one node in a fixed proportion are a
*bundle*, and its smallest part that cannot be cut is a *cell*: of 4 actors together with 2 rewards, 2 actors and a
reward. A role by itself is a bundle with one stack, whose cells are its ranks. Larger cells come from `per_group`, and
from `per_node`: then a cell is what a node has, and no node has two. So every constraint between ranks is either within
a cell, or says which cells a node may have besides others, and a placement is a vector of cells for each node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import frexp, gcd, lcm, ldexp

from unirun.collocation.planning.checks import both, join, merged
from unirun.collocation.request import Request, RoleRequest, Ties
from unirun.errors import Fault
from unirun.values import Value

Cells = tuple[int, ...]
"""How many cells of each bundle."""

BITS = 80
"""Weights are integers of so many bits."""


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
        """What a rank of `role` has of each of its slots. Roles that ask for whole slots have equal parts."""
        return float(role.slots) if role.slots < 1 else 1 / len(self.roles)


class Bundle(Value):
    """Stacks with ranks on the same nodes: `least` to `most` cells; with `single`, no node has two of them."""

    stacks: tuple[Stack, ...]
    least: int
    most: int
    single: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The roles in it."""
        return tuple(role.name for stack in self.stacks for role in stack.roles)

    @property
    def ranks(self) -> int:
        """Ranks of all roles in a cell."""
        return sum(stack.ranks * len(stack.roles) for stack in self.stacks)

    def ranks_of(self, role: str) -> int:
        """Ranks of `role` in a cell."""
        return next(stack.ranks for stack in self.stacks if any(each.name == role for each in stack.roles))

    def demand(self) -> dict[str, int]:
        """Units of slots that a cell takes, by their type."""
        found: dict[str, int] = {}
        for stack in self.stacks:
            if stack.device is not None:
                need = stack.ranks * stack.width * stack.units
                found[stack.device] = found.get(stack.device, 0) + need
        return found


class Problem(Value):
    """What is to be solved. A slot has `unit` units. Stacks are numbered through all bundles.

    `apart[b]` are the bundles that no node has besides cells of b. `isolated[s]` are the stacks that no NUMA node has
    besides s, `distinct[s]` those that are on other slots than s. `gains[b][c]` is the weight between bundles b and c,
    in both directions of the pair, in integers. `parts` are bundles with roles that wait for each other, each in one.
    """

    bundles: tuple[Bundle, ...]
    unit: int
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
    def types(self) -> tuple[str, ...]:
        """The types of slots that it takes."""
        return tuple(sorted({stack.device for stack in self.stacks if stack.device is not None}))

    @property
    def countable(self) -> bool:
        """Whether cells fit on a node as soon as there are as many free slots as they take."""
        plain = all(stack.units == self.unit and stack.only is None for stack in self.stacks)
        return plain and not any(self.isolated)


def with_count(cells: Cells, bundle: int, count: int) -> Cells:
    """`cells` with `count` of one bundle."""
    return (*cells[:bundle], count, *cells[bundle + 1 :])


def compile_request(request: Request) -> tuple[Problem, list[Fault]]:
    """The problem that `request` states, and what of its bundles cannot be; the request has no other faults."""
    roles = {role.name: role for role in request.roles}
    unit = lcm(*(role.slots.denominator for role in request.roles))
    parts = [tuple(roles[name] for name in stack) for stack in merged(tuple(roles), request.collocated)]
    found = merged(tuple(roles), (*request.collocated, *request.together))
    faults: list[Fault] = []
    bundles = tuple(
        _bundle([stack for stack in parts if stack[0].name in names], unit, faults) for names in found
    )
    homes = {name: number for number, bundle in enumerate(bundles) for name in bundle.names}
    stacks = [stack for bundle in bundles for stack in bundle.stacks]
    places = {role.name: number for number, stack in enumerate(stacks) for role in stack.roles}
    problem = Problem(
        bundles,
        unit,
        _foes(request.apart, homes, len(bundles)),
        _foes(request.isolated, places, len(stacks)),
        _foes(request.together, places, len(stacks)),
        _gains(request.ties, homes, len(bundles)),
        _parts(request.ties, bundles, homes),
    )
    return problem, faults


def _bundle(parts: Sequence[tuple[RoleRequest, ...]], unit: int, faults: list[Fault]) -> Bundle:
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
    stacks = zip(parts, ranks, groups, strict=True)
    return Bundle(tuple(_stack(*each, unit) for each in stacks), bottom, top, bool(on_node))


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
