"""Cells for many nodes, by filling one after the other: linear in the number of nodes, and not complete.

Nodes of one kind that get the same cells are one *run*, so ten thousand nodes are a handful of steps. Several rules for
what a node gets are tried, and the best result counts. What no rule can place may still have a place, when nodes are
nearly full and constraints bind; only `exact` can tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, permutations
from typing import NamedTuple

from unirun.collocation.planning.board import Room
from unirun.collocation.planning.merit import Merit
from unirun.collocation.planning.packing import Packer
from unirun.collocation.planning.problem import Cells, Problem

ORDERS = 24
"""How many orders of the bundles that keep others off their nodes are tried."""


class Run(NamedTuple):
    """`number` nodes of one kind that get the same cells."""

    room: Room
    cells: Cells
    number: int


Rule = Callable[[Cells, list[int]], Iterable[int]]
"""Given what a node has and what is left to place: the bundles of which it may get a cell, the best first."""


def fill(
    packer: Packer, problem: Problem, rooms: Sequence[Room], counts: Cells, merit: Merit
) -> list[Run] | None:
    """The best of what the rules find for `counts`, or None when none of them places all."""
    found = list(_by_rules(packer, problem, rooms, counts, merit))
    if found:
        return max(found, key=lambda runs: sum(r.number * merit.value(r.room, r.cells) for r in runs))
    return next(_by_orders(packer, problem, rooms, counts), None)


def fillable(packer: Packer, problem: Problem, rooms: Sequence[Room], counts: Cells, merit: Merit) -> bool:
    """Whether `fill` finds anything; the first that is found is enough."""
    ways = chain(_by_rules(packer, problem, rooms, counts, merit), _by_orders(packer, problem, rooms, counts))
    return next(ways, None) is not None


def _by_rules(
    packer: Packer, problem: Problem, rooms: Sequence[Room], counts: Cells, merit: Merit
) -> Iterator[list[Run]]:
    kinds = list(Counter(rooms).items())
    light = [number for number, bundle in enumerate(problem.bundles) if bundle.light]
    heavy = tuple(0 if bundle.light else count for bundle, count in zip(problem.bundles, counts, strict=True))
    for rule in _rules(problem, merit):
        runs = _fill(packer, kinds, heavy, rule)
        for bundle in light:
            runs = _attach(packer, runs, bundle, counts[bundle], merit) if runs is not None else None
        if runs is not None:
            yield runs


def _by_orders(packer: Packer, problem: Problem, rooms: Sequence[Room], counts: Cells) -> Iterator[list[Run]]:
    kinds = list(Counter(rooms).items())
    for order in _orders(problem):
        runs = _fill(packer, kinds, counts, _in_turn(order))
        if runs is not None:
            yield runs


def _rules(problem: Problem, merit: Merit) -> Iterable[Rule]:
    bundles = range(len(problem.bundles))

    def by_pull(cells: Cells, left: list[int]) -> Iterable[int]:
        return sorted(bundles, key=lambda b: (-merit.pull(b, cells), cells[b], b))

    def by_part(cells: Cells, left: list[int]) -> Iterable[int]:
        return sorted(bundles, key=lambda b: ((cells[b] + 1) / left[b] if left[b] else 2.0, b))

    yield _in_turn(tuple(bundles))
    yield _in_turn(_chain(problem))
    yield by_pull
    yield by_part


def _chain(problem: Problem) -> tuple[int, ...]:
    """The bundle that talks most, then always the one that talks most with those before it."""
    rest = list(range(len(problem.bundles)))
    order: list[int] = []
    while rest:
        order.append(
            max(rest, key=lambda b: (sum(problem.gains[b][c] for c in order), sum(problem.gains[b]), -b))
        )
        rest.remove(order[-1])
    return tuple(order)


def _orders(problem: Problem) -> Iterable[tuple[int, ...]]:
    """First what needs no slots, as it may need nodes to itself, then what there is one of on a node, then the largest.

    Then the same with those that keep others off their nodes before all, in every order.
    """
    bundles = problem.bundles
    sizes = [sum(bundle.demand().values()) for bundle in bundles]
    order = sorted(
        range(len(bundles)), key=lambda b: (not bundles[b].light, not bundles[b].single, -sizes[b], b)
    )
    yield tuple(order)
    first = [bundle for bundle in order if problem.apart[bundle]]
    rest = [bundle for bundle in order if not problem.apart[bundle]]
    yield from ((*head, *rest) for head in islice(permutations(first), ORDERS if first else 0))


def _in_turn(order: tuple[int, ...]) -> Rule:
    return lambda _cells, _left: order


def _fill(packer: Packer, kinds: Sequence[tuple[Room, int]], counts: Cells, rule: Rule) -> list[Run] | None:
    left = list(counts)
    runs: list[Run] = []
    for room, number in kinds:
        while number:
            cells = _one_node(packer, room, left, rule)
            taken = [(each, of) for each, of in zip(cells, left, strict=True) if each]
            times = min([number, *(of // each for each, of in taken)])
            runs.append(Run(room, cells, times))
            left = [of - times * each for each, of in zip(cells, left, strict=True)]
            number -= times
    return None if any(left) else runs


def _one_node(packer: Packer, room: Room, left: list[int], rule: Rule) -> Cells:
    cells = (0,) * len(left)
    while True:
        for bundle in rule(cells, left):
            if cells[bundle] < left[bundle]:
                more = (*cells[:bundle], cells[bundle] + 1, *cells[bundle + 1 :])
                if packer.fits(room, more):
                    cells = more
                    break
        else:
            return cells


def _attach(packer: Packer, runs: list[Run], bundle: int, count: int, merit: Merit) -> list[Run] | None:
    """`runs` with `count` cells of a bundle that needs no slots, on the nodes that they talk most with."""

    def pull(run: Run) -> tuple[float, bool]:
        total = tuple(a + b for a, b in zip(run.cells, run.room.held, strict=True))
        return merit.pull(bundle, total), any(total)

    left = count
    found: list[Run] = []
    for run in sorted(runs, key=pull, reverse=True):
        most = left if left and packer.fits(run.room, _with(run.cells, bundle, left)) else min(left, 1)
        if not most or not packer.fits(run.room, _with(run.cells, bundle, most)):
            found.append(run)
            continue
        times = min(run.number, left // most)
        left -= times * most
        found.append(Run(run.room, _with(run.cells, bundle, most), times))
        if times < run.number:
            found.append(Run(run.room, run.cells, run.number - times))
    return None if left else found


def _with(cells: Cells, bundle: int, number: int) -> Cells:
    return (*cells[:bundle], cells[bundle] + number, *cells[bundle + 1 :])
