"""From a problem and nodes to cells on nodes: how many of each bundle, then on which nodes.

Where there is little to place, dynamic programming over the nodes finds the best cells for every node. The state after
some nodes is the cells of each bundle that are left; the score is a sum over nodes, so only the best way to each state
counts. The work is (states) × (nodes) × (what fits on one node): little for a handful of ranks, and out of reach for
thousands, for which `fill` is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from operator import sub

from unirun.collocation.inventory import CPU, Node
from unirun.collocation.planning.fill import Filler, Score
from unirun.collocation.planning.nodes import Kinds, NodeKind
from unirun.collocation.planning.packer import Packer
from unirun.collocation.planning.problem import Cells, Problem, with_count

WORK = 150_000
"""Steps of a complete search: half a second or less."""

Choices = Mapping[NodeKind, Sequence[Cells]]
"""By kind of node, all cells that fit on it."""

Layer = dict[Cells, tuple[int, Cells, Cells]]
"""By cells that are left: the best score, the cells that were left before the last node, and those that it has."""


def solve(packer: Packer, nodes: Sequence[Node]) -> tuple[list[NodeKind], list[Cells]] | None:
    """The kind of each of the empty `nodes`, and its cells: as many as there is room for. None when too few fit.

    Complete and with the best score where that takes at most `WORK` steps.
    """
    problem = packer.problem
    for per_processor in processes(problem, nodes):
        kinds = Kinds(problem, per_processor).of(nodes)
        counts = most_cells(packer, kinds, problem.least, problem.most)
        if counts is not None:
            placed = distribute(packer, kinds, counts)
            if placed is not None:
                return kinds, placed
    return None


def processes(problem: Problem, nodes: Sequence[Node]) -> Iterator[int]:
    """The processes per processor, in the order in which they are tried: 1, 2, 4, … until all cells fit on one node.

    A host may run any number of processes, and they are spread as evenly as possible.
    """
    yield 1
    if CPU in problem.types:
        demand = sum(
            bundle.most * -(-bundle.demand().get(CPU, 0) // problem.unit) for bundle in problem.bundles
        )
        # Roles that are isolated have one NUMA node of a host.
        numas = (len(numa.cpus) for node in nodes for numa in node.numa if numa.cpus)
        least = min((*numas, *(max(len(node.cpus), 1) for node in nodes)), default=demand)
        number = 1
        while number * least < demand:
            number *= 2
            yield number


def distribute(
    packer: Packer, kinds: Sequence[NodeKind], counts: Cells, held: Cells | None = None
) -> list[Cells] | None:
    """For each node its cells, `counts` in all, or None. `held` are the cells that the nodes have already."""
    everything = counts if held is None else tuple(c + h for c, h in zip(counts, held, strict=True))
    score = Score(packer.problem, everything, len(kinds))
    small = choices(packer, kinds, counts)
    if small is not None:
        best = _best(kinds, small, counts, score)
        return None if best is None else _in_order(kinds, zip(kinds, best, (1,) * len(kinds), strict=True))
    runs = Filler(packer, kinds, counts, score).best()
    return None if runs is None else _in_order(kinds, runs)


def _in_order(kinds: Sequence[NodeKind], runs: Iterable[tuple[NodeKind, Cells, int]]) -> list[Cells]:
    """By node its cells. Among nodes of one kind, those with cells of the first bundles come first."""
    by_kind: dict[NodeKind, Counter[Cells]] = {}
    for kind, cells, number in runs:
        by_kind.setdefault(kind, Counter())[cells] += number
    turns = {
        kind: iter([cells for cells in sorted(found, reverse=True) for _ in range(found[cells])])
        for kind, found in by_kind.items()
    }
    return [next(turns[kind]) for kind in kinds]


def most_cells(packer: Packer, kinds: Sequence[NodeKind], least: Cells, most: Cells) -> Cells | None:
    """The number of cells of each bundle, from `least` to `most`, that can be placed; None when too few can.

    All bundles grow from `least` by equal parts of the difference, as long as there is room, then those that still can.
    So no role could have more without another having fewer. When `least` is `most`, `distribute` finds out.
    """
    if least == most:
        return most
    fits = feasible(packer, kinds, most)
    if fits(most):
        return most
    return _grow(least, most, fits) if fits(least) else None


def feasible(packer: Packer, kinds: Sequence[NodeKind], most: Cells) -> Callable[[Cells], bool]:
    """A function that says whether so many cells of each bundle, at most `most`, can be placed."""
    small = choices(packer, kinds, most)
    if small is not None:
        return _reachable(kinds, small, most).__contains__

    def fits(counts: Cells) -> bool:
        few = choices(packer, kinds, counts)
        if few is not None:
            return counts in _reachable(kinds, few, counts)
        return Filler(packer, kinds, counts, Score(packer.problem, counts, len(kinds))).possible()

    return fits


def _grow(least: Cells, most: Cells, fits: Callable[[Cells], bool]) -> Cells:
    """The greatest cells between `least`, which fit, and `most`, by equal parts of the difference."""
    counts = least
    growing = {number for number, (low, high) in enumerate(zip(least, most, strict=True)) if low < high}
    while growing:
        goal = tuple(most[number] if number in growing else at for number, at in enumerate(counts))
        before, counts = counts, towards(counts, goal, fits)
        more = {
            number: with_count(counts, number, counts[number] + 1)
            for number in sorted(growing)
            if counts[number] < most[number]
        }
        growing = {number for number, cells in more.items() if fits(cells)}
        if growing and counts == before:
            # Each could have one more, and not all of them: the first has it.
            counts = more[min(growing)]
            growing = {number for number in growing if counts[number] < most[number]}
    return counts


def towards(counts: Cells, goal: Cells, fits: Callable[[Cells], bool]) -> Cells:
    """The cells nearest to `goal` that fit, on the line from `counts`, which fit."""
    parts = max(map(sub, goal, counts))

    def at(part: int) -> Cells:
        return tuple(one + (other - one) * part // parts for one, other in zip(counts, goal, strict=True))

    return at(border(0, parts + 1, lambda part: fits(at(part))))


def border(good: int, bad: int, fits: Callable[[int], bool]) -> int:
    """The number nearest to `bad`, which does not fit, that does, when all between it and `good` do."""
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def choices(packer: Packer, kinds: Sequence[NodeKind], counts: Cells) -> Choices | None:
    """All cells that fit on each kind of node; None when a complete search would take more than `WORK` steps."""
    states = prod(count + 1 for count in counts)
    limit = WORK // (states * max(len(kinds), 1))
    found: dict[NodeKind, list[Cells]] = {}
    steps = 0
    for kind in kinds:
        if kind not in found:
            fitting = _fitting(packer, kind, counts, limit)
            if fitting is None:
                return None
            found[kind] = fitting
        steps += len(found[kind]) * states
        if steps > WORK:
            return None
    return found


def _fitting(packer: Packer, kind: NodeKind, counts: Cells, limit: int) -> list[Cells] | None:
    """All cells that fit, or None when they are more than `limit`. If some do not fit, more of them do not either."""
    found: list[Cells] = [(0,) * len(counts)]
    for bundle, count in enumerate(counts):
        for base in tuple(found):
            for number in range(1, count + 1):
                cells = with_count(base, bundle, number)
                if not packer.fits(kind, cells):
                    break
                found.append(cells)
                if len(found) > limit:
                    return None
    return found


def _reachable(kinds: Sequence[NodeKind], choices: Choices, counts: Cells) -> frozenset[Cells]:
    """All numbers of cells, up to `counts`, that can be placed."""
    states = {counts}
    for kind in kinds:
        states = {
            left
            for state in states
            for cells in choices[kind]
            if min(left := tuple(map(sub, state, cells))) >= 0
        }
    return frozenset(tuple(map(sub, counts, left)) for left in states)


def _best(kinds: Sequence[NodeKind], choices: Choices, counts: Cells, score: Score) -> list[Cells] | None:
    """For each node its cells, `counts` in all, with the best score; None when they cannot be placed.

    Of equal ones that with cells on earlier nodes.
    """
    values = {
        kind: [(cells, sum(cells), score.value(kind, cells) * score.positions) for cells in fitting]
        for kind, fitting in choices.items()
    }
    layers: list[Layer] = [{counts: (0, counts, counts)}]
    for number, kind in enumerate(kinds):
        layer: Layer = {}
        for state, (total, _, _) in layers[-1].items():
            for cells, size, value in values[kind]:
                left = tuple(map(sub, state, cells))
                if min(left) < 0:
                    continue
                after = total + value - number * size
                known = layer.get(left)
                if known is None or known[0] < after:
                    layer[left] = (after, state, cells)
        layers.append(layer)
    left = (0,) * len(counts)
    if left not in layers[-1]:
        return None
    found: list[Cells] = []
    for layer in reversed(layers[1:]):
        _, left, cells = layer[left]
        found.append(cells)
    return found[::-1]
