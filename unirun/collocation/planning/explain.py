"""The reasons why a request does not fit, and similar requests that do, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

from msgspec.structs import replace

from unirun.collocation.inventory import CPU, Inventory
from unirun.collocation.planning.offers import (
    Offer,
    Trials,
    differences,
    offer,
    part_of,
    with_part,
    without_a_constraint,
)
from unirun.collocation.planning.problem import Problem, both, join, problem_of, some
from unirun.collocation.request import Request
from unirun.errors import Fault, PlacementError
from unirun.values import Value

OFFERS = 4
"""At most so many requests that fit are named."""


class Shortage(Value):
    """A shortage in words and numbers. Counts are ranks of `role`; each of `offers` fits."""

    role: str
    needed: int
    available: int
    constraint: str
    problem: str
    offers: tuple[Offer, ...]


def does_not_fit(request: Request, inventory: Inventory) -> PlacementError:
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


def shortages(request: Request, trials: Trials) -> list[Shortage]:
    """The shortage of `request`; when no single change is enough, then those of the roles that do not fit alone."""
    whole = _shortage(request, trials)
    alone: list[tuple[Request, Shortage]] = []
    if not whole.offers:
        problem = problem_of(request)
        parts = [part_of(request, bundle.names) for bundle in problem.bundles if len(problem.bundles) > 1]
        alone = [(part, _shortage(part, trials)) for part in parts if not trials.fit(part)]
        first = alone[0][1] if len(alone) > 1 else whole
        whole = replace(first, offers=tuple(_several(request, trials, alone)))
    more = trials.more(request)
    if more is not None:
        whole = replace(whole, offers=(*whole.offers[: OFFERS - 1], more))
    return [whole, *(each for _, each in alone if len(alone) > 1)]


def _shortage(request: Request, trials: Trials) -> Shortage:
    problem = problem_of(request)
    counts = trials.counts(request)
    lacking = any(need > there for _, need, there in _slots(request, problem, trials))
    ways = [
        trials.loosened(request),
        islice(trials.fewer(request, counts), OFFERS // 2 if lacking else OFFERS),
    ]
    # Where slots are lacking, constraints are rarely the reason.
    found = chain(trials.room(request), *(reversed(ways) if lacking else ways))
    offers = tuple(islice(found, OFFERS))
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


def _short(problem: Problem, counts: Sequence[int], offers: Sequence[Offer]) -> int:
    """The bundle to name: that of the role whose constraint binds, else that which lacks the fewest ranks."""

    def missing(bundle: int) -> int:
        return (problem.bundles[bundle].least - counts[bundle]) * problem.bundles[bundle].ranks

    for number, bundle in enumerate(problem.bundles):
        if offers and offers[0].role in bundle.names:
            return number
    return max(range(len(counts)), key=lambda b: (missing(b) > 0, counts[b] > 0, -missing(b), -b))


def _binding_groups(request: Request, trials: Trials) -> str:
    """All groups, if the request fits without them; else ``slots``."""
    free = replace(request, collocated=(), together=(), apart=(), isolated=())
    return join(each.binds for each in differences(request, free)) if trials.fit(free) else "slots"


def _several(request: Request, trials: Trials, alone: Sequence[tuple[Request, Shortage]]) -> Iterator[Offer]:
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


def _slots(request: Request, problem: Problem, trials: Trials) -> Iterator[tuple[str, int, int]]:
    """By type of device: how many are needed at least, and how many there are."""
    nodes = trials.nodes(request)
    for type in problem.types:
        if type != CPU:
            need = sum(bundle.least * bundle.demand().get(type, 0) for bundle in problem.bundles)
            there = sum(device.type == type for node in nodes for device in node.devices)
            yield type, -(-need // problem.unit), there


def _slots_said(request: Request, problem: Problem, trials: Trials) -> str:
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


def _remedy(offers: Sequence[Offer], where: str = "") -> str:
    """``actor=4 fits, or without separating actor and rollout, or adding 1 node``; empty without offers."""
    first, *others = [each.text for each in offers] or [""]
    return ", or ".join([f"{where}{first} fits", *others]) if first else ""


def _no_remedy(request: Request, trials: Trials) -> str:
    """The remedy when no change is enough."""
    problem = problem_of(request)
    none = [type for type in problem.types if not trials.most(type)]
    return f"use nodes with {both(none)} devices" if none else "use more nodes, or larger ones"
