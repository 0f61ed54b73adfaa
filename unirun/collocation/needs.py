"""The check that ranks which need processors and memory of their node do not need more than it has.

The planner places ranks by their slots. This looks at the result, node by node: a job that has room on other nodes is
refused as well, with a change of it that fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import lcm
from typing import Any, Literal

from msgspec.structs import replace

from unirun.collocation.inventory import Inventory, Node, Placement
from unirun.collocation.planning.problem import both, some
from unirun.errors import Fault, PlacementError
from unirun.spec.job import JobSpec, RoleSpec
from unirun.spec.read import show_size
from unirun.spec.roles import LEAST_MEMORY
from unirun.values import Value

Resource = Literal["cpus", "memory"]
RESOURCES: tuple[Resource, ...] = ("cpus", "memory")
Place = Callable[[JobSpec], Placement | None]
"""A function that gives the planner's placement of a job, None when it does not fit."""

OFFERS = 4
"""At most so many changes that fit are named."""
NAMES = 6
"""At most so many roles are named, those that need most."""
NODES = 3
"""At most so many nodes with a shortage are named."""


class NodeShortage(Value):
    """Ranks that need more of a resource than `node` has: `counts` by role. `available` is what it has."""

    node: Node
    resource: Resource
    counts: Mapping[str, int]
    needed: int
    available: int


class JobAlternative(Value):
    """A job that fits, and how it differs, in words."""

    spec: JobSpec
    text: str


def check_needs(spec: JobSpec, placement: Placement, inventory: Inventory, place: Place) -> None:
    """Raise `PlacementError` where ranks need more processors or memory than their node has.

    `place` finds out whether a change of the job fits.
    """
    found = list(islice(shortages(spec, placement, inventory), NODES))
    if not found:
        return
    offers = list(islice(_offers(spec, placement, inventory, place), OFFERS))
    texts = tuple(offer.text for offer in offers)
    remedy = ", or ".join([f"{texts[0]} fits", *texts[1:]]) if texts else "use larger nodes"
    first = found[0]
    problems = [_said(spec, each) for each in found]
    raise PlacementError(
        "\n".join(problems),
        remedy,
        role=_largest(spec, first),
        needed=first.needed,
        available=first.available,
        constraint=first.resource,
        nearest=texts,
        faults=tuple(
            Fault(_largest(spec, each), problem, remedy)
            for each, problem in zip(found, problems, strict=True)
        ),
    )


def shortages(spec: JobSpec, placement: Placement, inventory: Inventory) -> Iterator[NodeShortage]:
    """The nodes of which ranks need more than there is, in the order of the inventory. Unknown memory is enough."""
    for resource in RESOURCES:
        roles = {role.name: role for role in spec.roles if getattr(role, resource) is not None}
        there: dict[str, Counter[str]] = {}
        for name in roles:
            for host, count in Counter(each.node for each in placement.of_role(name)).items():
                there.setdefault(host, Counter())[name] = count
        for node in inventory.nodes if there else ():
            counts = there.get(node.name, Counter())
            needed = sum(count * need_of(roles[name], resource, node) for name, count in counts.items())
            available = room_of(node, resource)
            if available is not None and needed > available:
                yield NodeShortage(node, resource, dict(counts), needed, available)


def need_of(role: RoleSpec, resource: Resource, node: Node) -> int:
    """The processors of `node`, or the bytes, that a rank of `role` needs there."""
    if resource == "memory":
        return role.memory or 0
    return len(node.cpus) if role.cpus == "all" else role.cpus or 0


def room_of(node: Node, resource: Resource) -> int | None:
    """The processors or bytes of `node`; None when they are not known."""
    return len(node.cpus) if resource == "cpus" else node.memory or None


def shown_need(role: RoleSpec) -> str:
    """``8 cpus, 64.0 GB``; empty for a role that names neither."""
    cpus = [] if role.cpus is None else [_amount("cpus", role.cpus)]
    return ", ".join([*cpus, *([] if role.memory is None else [show_size(role.memory)])])


def _amount(resource: Resource, number: int | str) -> str:
    if isinstance(number, str):
        return f"{number} cpus"
    return show_size(number) if resource == "memory" else some(number, "cpu")


def _largest(spec: JobSpec, short: NodeShortage) -> str:
    """The role whose ranks need most on the node."""
    needs = {
        name: count * need_of(spec.role(name), short.resource, short.node)
        for name, count in short.counts.items()
    }
    return max(needs, key=lambda name: needs[name])


def _said(spec: JobSpec, short: NodeShortage) -> str:
    """``engine and judge need 20 cpus of node0 (engine 2 × 8, judge 4 × 1), and it has 16``."""
    needs = {name: need_of(spec.role(name), short.resource, short.node) for name in short.counts}
    names = sorted(needs, key=lambda name: -short.counts[name] * needs[name])[:NAMES]
    each = [
        f"{name} {short.counts[name]} × {_amount(short.resource, needs[name])}"
        for name in short.counts
        if name in names
    ]
    each += [some(len(needs) - NAMES, "more role")] if len(needs) > NAMES else []
    who = both(needs) if len(needs) <= NAMES else f"{len(needs)} roles"
    verb = "needs" if len(short.counts) == 1 else "need"
    amount = _amount(short.resource, short.needed)
    memory = " of memory" if short.resource == "memory" else ""
    has = _amount(short.resource, short.available)
    if has == amount:
        # Sizes that differ by less than they are rounded.
        amount, has = f"{short.needed} B", f"{short.available} B"
    return f"{who} {verb} {amount}{memory} of {short.node.name} ({', '.join(each)}), and it has {has}"


def _offers(
    spec: JobSpec, placement: Placement, inventory: Inventory, place: Place
) -> Iterator[JobAlternative]:
    """Jobs that fit and differ little: with ranks on more nodes, with smaller needs, with fewer ranks."""

    def fits(changed: JobSpec) -> bool:
        found = place(changed)
        return found is not None and next(shortages(changed, found, inventory), None) is None

    short = next(shortages(spec, placement, inventory))
    role = spec.role(_largest(spec, short))
    if len(inventory.nodes) > 1:
        found = (offer for offer in _spread(spec, role, short.counts) if fits(offer.spec))
        yield from islice(found, OFFERS // 2)
    smaller = _smaller(spec, placement, inventory)
    if smaller is not None:
        yield smaller
    step = lcm(role.per_node or 1, role.per_group or 1)
    tries = (_with_role(spec, role, count=count) for count in _fewer(role.count, step))
    fewer = next((each for each in tries if fits(each)), None)
    if fewer is not None:
        yield JobAlternative(fewer, f"{role.name}={fewer.role(role.name).count}")


def _spread(spec: JobSpec, role: RoleSpec, counts: Mapping[str, int]) -> Iterator[JobAlternative]:
    """Jobs with fewer ranks of `role` on a node, without one of the other roles there, or both."""
    sizes = [(f"{role.name} per_node {size}", size) for size in _divisors(role.count, counts[role.name])]
    others = [(f"separating {role.name} and {other}", other) for other in counts if other != role.name]
    for text, size in sizes:
        yield JobAlternative(_with_role(spec, role, per_node=size), text)
    for text, other in others:
        apart = replace(spec, separations=(*spec.separations, (role.name, other)))
        yield JobAlternative(apart, text)
        for also, size in sizes:
            yield JobAlternative(_with_role(apart, role, per_node=size), f"{text} with {also}")


def _divisors(count: int, below: int) -> list[int]:
    return [size for size in range(below - 1, 0, -1) if count % size == 0][:OFFERS]


def _fewer(count: int, step: int) -> Sequence[int]:
    """Smaller counts: those just below `count`, then half of it, a quarter and so on."""
    near = [count - number * step for number in range(1, 2 * OFFERS + 1)]
    halves = [(count >> power) // step * step for power in range(1, count.bit_length())]
    return [each for each in dict.fromkeys([*near, *halves]) if each > 0]


def _smaller(spec: JobSpec, placement: Placement, inventory: Inventory) -> JobAlternative | None:
    """With smaller needs, of the role with the greatest in each case; ranks stay where they are then."""
    words: dict[str, str] = {}
    changed = spec
    while (short := next(shortages(changed, placement, inventory), None)) is not None:
        name = _largest(changed, short)
        role = changed.role(name)
        number = short.counts[name]
        others = short.needed - number * need_of(role, short.resource, short.node)
        left = (short.available - others) // number
        text = str(left)
        if short.resource == "memory":
            left, text = _whole_size(left)
        if left < (LEAST_MEMORY if short.resource == "memory" else 1):
            return None
        words[f"{name} {short.resource}"] = text
        changed = _with_role(changed, role, **{short.resource: left})
    return JobAlternative(changed, both(f"{what} {text}" for what, text in words.items()))


def _whole_size(size: int) -> tuple[int, str]:
    """A size of at most `size` that is short in a job file, and how it is written there: ``31GB``, ``512MB``."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB")):
        if size >= 10 * unit:
            return size // unit * unit, f"{size // unit}{name}"
    return size, str(size)


def _with_role(spec: JobSpec, role: RoleSpec, **changes: Any) -> JobSpec:
    """`spec` with changes of one role; a smaller count is the least one as well where that was greater."""
    if "count" in changes and role.least is not None:
        changes["least"] = min(role.least, changes["count"])
    return replace(
        spec,
        roles=tuple(replace(each, **changes) if each.name == role.name else each for each in spec.roles),
    )
