"""Cells for many nodes, by filling one after the other: linear in the number of nodes, and not complete.

Nodes of one kind that get the same cells are one *run*, so ten thousand nodes are a handful of steps. Several rules for
what a node gets are tried, and the best result counts. What no rule can place may still have a place, when nodes are
nearly full and constraints bind; only `exact` can tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, permutations

from unirun.collocation.planning.board import Room
from unirun.collocation.planning.merit import Merit
from unirun.collocation.planning.packing import Packer
from unirun.collocation.planning.parts import by_parts
from unirun.collocation.planning.problem import Cells, Problem
from unirun.collocation.planning.runs import Rule, Run, by_pull, by_share, fill_up, in_turn, take

ORDERS = 24
"""How many orders of the bundles that keep others off their nodes are tried."""


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
    kinds = _kinds(problem, rooms)
    light = [number for number, bundle in enumerate(problem.bundles) if bundle.light]
    heavy = tuple(0 if bundle.light else count for bundle, count in zip(problem.bundles, counts, strict=True))
    ways = chain(
        (_fill(packer, kinds, heavy, rule) for rule in _rules(problem, merit)),
        by_parts(packer, problem, kinds, heavy, merit),
    )
    for way in ways:
        runs = way
        for bundle in light:
            runs = _attach(packer, runs, bundle, counts[bundle], merit) if runs is not None else None
        if runs is not None:
            yield runs


def _by_orders(packer: Packer, problem: Problem, rooms: Sequence[Room], counts: Cells) -> Iterator[list[Run]]:
    kinds = _kinds(problem, rooms)
    for order in _orders(problem):
        runs = _fill(packer, kinds, counts, in_turn(order))
        if runs is not None:
            yield runs


def _kinds(problem: Problem, rooms: Sequence[Room]) -> list[Run]:
    """All nodes, without cells."""
    none = (0,) * len(problem.bundles)
    return [Run(room, none, number) for room, number in Counter(rooms).items()]


def _rules(problem: Problem, merit: Merit) -> Iterable[Rule]:
    bundles = tuple(range(len(problem.bundles)))
    yield in_turn(bundles)
    yield in_turn(_chain(problem))
    yield by_pull(bundles, merit)
    yield by_share(bundles)


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


def _fill(packer: Packer, kinds: Sequence[Run], counts: Cells, rule: Rule) -> list[Run] | None:
    left = list(counts)
    runs: list[Run] = []
    for kind in kinds:
        rest = kind
        while rest.number:
            cells = fill_up(packer, rest.room, rest.cells, left, rule)
            times, left = take(rest, cells, left)
            runs.append(Run(rest.room, cells, times))
            rest = rest._replace(number=rest.number - times)
    return None if any(left) else runs


def _attach(packer: Packer, runs: list[Run], bundle: int, count: int, merit: Merit) -> list[Run] | None:
    """`runs` with `count` cells of a bundle that needs no slots, on the nodes that they talk most with.

    Of equal ones, on those that have what they wait for.
    """

    def pull(run: Run) -> tuple[float, bool, bool]:
        total = run.total
        near = merit.touched(_with(total, bundle, 1)) == merit.touched(total)
        return merit.pull(bundle, total), near, any(total)

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
