"""Why a request does not fit, and what would: found by planning it again with one thing changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from unirun.collocation.inventory import Inventory, Node
from unirun.collocation.planning.faults import GROUPS, request_faults
from unirun.collocation.planning.packing import Packer
from unirun.collocation.planning.problem import Cells, Problem, compile_request
from unirun.collocation.planning.solve import possible
from unirun.collocation.planning.wording import both, join
from unirun.collocation.request import Request
from unirun.collocation.slots import CPU
from unirun.errors import Fault, PlacementError

UNDONE = {
    "apart": "without separating",
    "isolated": "without isolating",
    "together": "without keeping on one node",
    "collocated": "without collocating",
}
OFFERS = 4
"""So many changes are named; more would not be read."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """One thing that does not fit. Counts are ranks of `role`."""

    role: str
    needed: int
    available: int
    constraint: str
    problem: str
    nearest: tuple[str, ...]


def usable(request: Request, inventory: Inventory) -> tuple[tuple[Node, ...], tuple[str, ...]]:
    """The nodes that a plan may use, and the spares: the last of those that are not tainted."""
    sound = [node for node in inventory.nodes if node.name not in request.tainted]
    use = max(len(sound) - request.spares, 0)
    return tuple(sound[:use]), tuple(node.name for node in sound[use:])


def checked(request: Request) -> Problem:
    """The problem that `request` states. Raises `PlacementError` with everything that is wrong with it."""
    faults = request_faults(request)
    if not faults:
        problem, faults = compile_request(request)
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


def does_not_fit(request: Request, inventory: Inventory) -> PlacementError:
    """The error for a request without faults for which no placement was found.

    It has what one change would make fit; else, as it takes several, what stands in the way of each role by itself.
    """
    whole = _explain(request, inventory)
    if whole.nearest:
        return _error(whole, f"{'; '.join(f'{each} fits' for each in whole.nearest)}")
    problem, _ = compile_request(request)
    alone = [_only(request, bundle.names) for bundle in problem.bundles] if len(problem.bundles) > 1 else []
    short = [_explain(each, inventory) for each in alone if not _fits(each, inventory)]
    if not short:
        return _error(whole, "use more nodes")
    faults = tuple(
        Fault(each.role, each.problem, f"{each.nearest[0]} would fit alone" if each.nearest else "")
        for each in short
    )
    return _error(replace(short[0], problem="\n".join(map(str, faults)), nearest=()), "", faults)


def _error(shortage: Shortage, remedy: str, faults: tuple[Fault, ...] = ()) -> PlacementError:
    return PlacementError(
        shortage.problem,
        remedy,
        role=shortage.role,
        needed=shortage.needed,
        available=shortage.available,
        constraint=shortage.constraint,
        nearest=shortage.nearest,
        faults=faults or (Fault(shortage.role, shortage.problem, remedy),),
    )


def _only(request: Request, names: Sequence[str]) -> Request:
    """`request`, with the roles called `names` and no others."""

    def kept(groups: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        cut = (tuple(name for name in group if name in names) for group in groups)
        return tuple(group for group in cut if len(group) > 1)

    return replace(
        request,
        roles=tuple(role for role in request.roles if role.name in names),
        collocated=kept(request.collocated),
        together=kept(request.together),
        apart=kept(request.apart),
        isolated=kept(request.isolated),
        weights={},
    )


def _fits(request: Request, inventory: Inventory) -> bool:
    if request_faults(request):
        return False
    problem, faults = compile_request(request)
    nodes, _ = usable(request, inventory)
    return not faults and possible(problem, nodes, Packer(problem))


def _explain(request: Request, inventory: Inventory) -> Shortage:
    problem, _ = compile_request(request)
    counts = dict(_fewer(request, problem, inventory))
    others = [(what, offer) for what, offer, change in _changes(request) if _fits(change, inventory)]
    # What is short of room needs the most slots, unless one constraint alone is in the way.
    bundle = max(counts, key=lambda b: (counts[b] > 0, -_missing(problem, counts, b), b), default=0)
    role = problem.bundles[bundle].stacks[0].roles[0]
    ranks = problem.bundles[bundle].stacks[0].ranks
    needed, available = problem.bundles[bundle].least * ranks, counts.get(bundle, 0) * ranks
    fewer = [
        join(
            f"{role.name}={counts[b] * stack.ranks}"
            for stack in problem.bundles[b].stacks
            for role in stack.roles
        )
        for b in sorted(counts, key=lambda b: (_missing(problem, counts, b), b))
        if counts[b]
    ]
    nearest = tuple([*(offer for _, offer in others), *fewer][:OFFERS])
    constraint = others[0][0] if others else "slots"
    besides = " besides the other roles" if len(problem.bundles) > 1 else ""
    said = f"{role.name} needs room for {needed} ranks and there is room for {available}{besides}"
    slots = _slots_said(request, problem, inventory)
    return Shortage(role.name, needed, available, constraint, f"{said} ({constraint}; {slots})", nearest)


def _missing(problem: Problem, counts: dict[int, int], bundle: int) -> int:
    each = problem.bundles[bundle]
    return (each.least - counts[bundle]) * each.ranks


def _slots_said(request: Request, problem: Problem, inventory: Inventory) -> str:
    """``16 cuda slots are needed, 8 are there``."""
    nodes, spares = usable(request, inventory)
    said = []
    for type in problem.types:
        if type == CPU:
            continue
        need = sum(bundle.least * bundle.demand().get(type, 0) for bundle in problem.bundles)
        there = sum(device.type == type for node in nodes for device in node.devices)
        said.append(f"{-(-need // problem.unit)} {type} slots are needed, {there} are there")
    held = f", {len(spares)} held back" if spares else ""
    tainted = f", {len(request.tainted)} tainted" if request.tainted else ""
    return join([*said, f"{len(nodes)} nodes{held}{tainted}"])


def _fewer(request: Request, problem: Problem, inventory: Inventory) -> Iterator[tuple[int, int]]:
    """By bundle: with how many cells of it the request would fit, 0 if with none."""
    nodes, _ = usable(request, inventory)
    packer = Packer(problem)
    least = tuple(bundle.least for bundle in problem.bundles)

    def with_cells(bundle: int, cells: int) -> Cells:
        return (*least[:bundle], cells, *least[bundle + 1 :])

    for bundle, count in enumerate(least):
        low, high = 0, count
        while high - low > 1:
            middle = (low + high) // 2
            fits = possible(problem, nodes, packer, with_cells(bundle, middle))
            low, high = (middle, high) if fits else (low, middle)
        yield bundle, low


def _changes(request: Request) -> Iterator[tuple[str, str, Request]]:
    """Each with one constraint less: what it is, how that is said, and the request without it."""
    for kind in GROUPS[::-1]:
        groups = getattr(request, kind)
        for group in groups:
            rest: Any = {kind: tuple(other for other in groups if other is not group)}
            yield f"{kind} {both(group)}", f"{UNDONE[kind]} {both(group)}", replace(request, **rest)
    for at, role in enumerate(request.roles):
        before, after = request.roles[:at], request.roles[at + 1 :]
        if role.per_node is not None:
            divisors = [
                each for each in range(1, role.count + 1) if role.count % each == 0 and each != role.per_node
            ]
            for each in sorted(divisors, key=lambda each: abs(each - (role.per_node or 0))):
                other = replace(role, per_node=each)
                offer = f"{role.name} per_node {each}"
                yield (
                    f"{role.name} per_node {role.per_node}",
                    offer,
                    replace(request, roles=(*before, other, *after)),
                )
        for slots in range(int(role.slots) - 1, 0, -1):
            changed = replace(request, roles=(*before, replace(role, slots=Fraction(slots)), *after))
            yield f"{role.name} slots {role.slots}", f"{role.name} slots {slots}", changed
        if role.per_group is not None:
            other = replace(role, per_group=None)
            changed = replace(request, roles=(*before, other, *after))
            yield f"{role.name} per_group {role.per_group}", f"without per_group of {role.name}", changed
        if role.devices is not None:
            other = replace(role, devices=None)
            changed = replace(request, roles=(*before, other, *after))
            yield f"{role.name} devices {join(role.devices)}", f"any device for {role.name}", changed
    for spares in range(request.spares - 1, -1, -1):
        yield f"spares {request.spares}", f"spares {spares}", replace(request, spares=spares)
    for name in sorted(request.tainted):
        yield f"tainted {name}", f"node {name} untainted", replace(request, tainted=request.tainted - {name})
