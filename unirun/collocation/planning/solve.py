"""From a problem and nodes to cells on nodes: how many of each bundle, then on which nodes.

Where there is little to place, dynamic programming over the nodes finds the best cells for every node. The state after
some nodes is the cells of each bundle that are left; the score is a sum over nodes, so only the best way to each state
counts. The work is (states) × (nodes) × (what fits on one node): little for a handful of ranks, and out of reach for
thousands, for which `fill` is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import lcm, prod
from operator import sub
from typing import NamedTuple

from unirun.collocation.inventory import CPU, Node
from unirun.collocation.planning.packer import Packer
from unirun.collocation.planning.problem import Cells, Kinds, NodeKind, Problem, with_count

# Cells for many nodes, by filling one node after the other: linear in the number of nodes, and not complete.
#
# Nodes of one kind that get the same cells are one *run*, so ten thousand nodes are a handful of steps. Some ways to
# fill nodes are tried, and the one with the highest score counts. Where none of them places all cells there may still
# be a placement, when nodes are nearly full and constraints bind; only a complete search can tell.

COARSE = 10**6
"""The resolution of the last criterion, how much a role is kept together."""

Rule = Callable[[Cells, Sequence[int]], Iterable[int]]
"""Given the cells of a node and those left to place: the bundles of which it may get a cell, the best first."""


class Score:
    """Compares placements of `counts` cells on `nodes` nodes, in integers, so that equal ones are equal.

    The criteria, in this order: traffic within nodes; each part of the job on few nodes; few nodes in use; the ranks of
    a role together. Each rank of a role talks as much with each rank of the other: of a pair's weight, x/K · y/L stays
    within a node that has x of the K cells of the one bundle and y of the L of the other.
    """

    def __init__(self, problem: Problem, counts: Cells, nodes: int) -> None:
        self._gains = problem.gains
        self._parts = problem.parts
        self._counts = [max(count, 1) for count in counts]
        pairs = [
            (one, other, gain, self._counts[one] * self._counts[other])
            for one, row in enumerate(problem.gains)
            for other, gain in enumerate(row[one:], one)
            if gain
        ]
        whole = lcm(*(size for *_, size in pairs))
        self._pairs = [(one, other, gain * (whole // size)) for one, other, gain, size in pairs]
        self._touched = nodes * len(problem.parts) + 1
        self._nodes = nodes + 1
        self._together = len(counts) * COARSE + 1
        self.positions = nodes * sum(counts) + 1

    def kept(self, cells: Cells) -> int:
        """The traffic within a node that has `cells`, times a constant that makes it an integer."""
        return sum(gain * cells[one] * cells[other] for one, other, gain in self._pairs)

    def pull(self, bundle: int, cells: Cells) -> float:
        """The affinity of one more cell of `bundle` to `cells`: the traffic that it adds within their node."""
        count = self._counts[bundle]
        pull = self._gains[bundle][bundle] * (2 * cells[bundle] + 1) / count
        for other, number in enumerate(cells):
            if number and other != bundle:
                pull += self._gains[bundle][other] * number / self._counts[other]
        return pull / count

    def touched(self, cells: Cells) -> int:
        """The number of parts that a node with `cells` has something of."""
        return sum(any(cells[bundle] for bundle in part) for part in self._parts)

    def value(self, kind: NodeKind, cells: Cells) -> int:
        """The contribution of a node to the score when it gets `cells`."""
        if not any(cells):
            return 0
        total = tuple(number + held for number, held in zip(cells, kind.held, strict=True))
        kept = self.kept(total) - self.kept(kind.held)
        touched = self.touched(total) - self.touched(kind.held)
        opened = 0 if any(kind.held) else 1
        spread = sum(
            COARSE * (number**2 - held**2) // count**2
            for number, held, count in zip(total, kind.held, self._counts, strict=True)
        )
        return ((kept * self._touched - touched) * self._nodes - opened) * self._together + spread


class NodeGroup(NamedTuple):
    """`number` nodes of one kind that get the same cells."""

    kind: NodeKind
    cells: Cells
    number: int

    @property
    def total(self) -> Cells:
        """The cells that such a node then has."""
        return tuple(number + held for number, held in zip(self.cells, self.kind.held, strict=True))


class Filler:
    """Fills nodes of `kinds` with `counts` cells in several ways."""

    def __init__(self, packer: Packer, kinds: Sequence[NodeKind], counts: Cells, score: Score) -> None:
        self._packer, self._counts, self._score = packer, counts, score
        self._problem = problem = packer.problem
        none = (0,) * len(counts)
        self._nodes = [NodeGroup(kind, none, number) for kind, number in Counter(kinds).items()]
        self._bundles = tuple(range(len(counts)))
        self._joined = {bundle for part in problem.parts for bundle in part}
        self._sizes = [sum(bundle.demand().values()) for bundle in problem.bundles]

    def best(self) -> list[NodeGroup] | None:
        """The result with the highest score, or None when no way places all cells."""
        score = self._score.value
        return max(
            self._ways(), key=lambda runs: sum(r.number * score(r.kind, r.cells) for r in runs), default=None
        )

    def possible(self) -> bool:
        """Return True if some way places all cells."""
        return next(self._ways(), None) is not None

    def _ways(self) -> Iterator[list[NodeGroup]]:
        """The results of all ways; bundles that need no slots come last, where their affinity is highest."""
        light = [bundle for bundle, size in enumerate(self._sizes) if not size]
        for way in self._heavy():
            runs = way
            for bundle in light:
                runs = None if runs is None else self._add_light(runs, bundle)
            if runs is not None:
                yield runs

    def _heavy(self) -> Iterator[list[NodeGroup] | None]:
        """Bundles that need slots: node by node, then part by part."""
        heavy = [bundle for bundle, size in enumerate(self._sizes) if size]
        # Bundles with one cell per node have the fewest choices; then the largest come first.
        largest = sorted(heavy, key=lambda b: (not self._problem.bundles[b].single, -self._sizes[b]))
        in_turns = (in_turn(self._by_affinity(heavy)), in_turn(largest))
        for rule in (*in_turns, self._by_pull(heavy), by_share(heavy)):
            yield self._fill(self._nodes, heavy, rule)
        for rule_of in (by_share, self._by_pull) if self._problem.parts else ():
            runs: list[NodeGroup] | None = self._nodes
            for part in self._parts(heavy):
                runs = None if runs is None else self._add_part(runs, part, rule_of(part))
            yield runs

    def _by_affinity(self, bundles: Sequence[int]) -> tuple[int, ...]:
        """The bundle with the most traffic, then always the one with the most traffic to those before it."""
        gains = self._problem.gains
        rest, order = list(bundles), list[int]()
        while rest:
            order.append(max(rest, key=lambda b: (sum(gains[b][c] for c in order), sum(gains[b]), -b)))
            rest.remove(order[-1])
        return tuple(order)

    def _by_pull(self, bundles: Sequence[int]) -> Rule:
        """Highest affinity to the cells that the node has."""
        pull = self._score.pull
        return lambda cells, _left: sorted(bundles, key=lambda b: (-pull(b, cells), cells[b], b))

    def _parts(self, heavy: Sequence[int]) -> list[tuple[int, ...]]:
        """The parts with the most traffic first, then the largest. Bundles in no part come last, and fill gaps."""
        gains = self._problem.gains
        parts = [tuple(b for b in part if b in heavy) for part in self._problem.parts]

        def order(part: tuple[int, ...]) -> tuple[int, int]:
            traffic = sum(gains[one][other] for one in part for other in part)
            return -traffic, -sum(self._sizes[bundle] * self._counts[bundle] for bundle in part)

        alone = [(bundle,) for bundle in heavy if bundle not in self._joined]
        return sorted(parts, key=order) + sorted(alone, key=order)

    def _add_part(
        self, runs: Sequence[NodeGroup], part: tuple[int, ...], rule: Rule
    ) -> list[NodeGroup] | None:
        """Cells of one part: on nodes that have some already, then where most fit, and the last on the fullest node.

        A bundle that is in no part goes to nodes in use.
        """
        counts = self._left(part)
        near = part if self._joined.issuperset(part) else self._bundles

        def far(run: NodeGroup) -> bool:
            return not any(run.total[bundle] for bundle in near)

        def room(run: NodeGroup) -> int:
            cells = self._fill_up(run, counts, rule)
            return sum(size * (a - b) for size, a, b in zip(self._sizes, cells, run.cells, strict=True))

        def free(run: NodeGroup) -> int:
            used = sum(size * number for size, number in zip(self._sizes, run.cells, strict=True))
            return run.kind.free.total() - used

        ordered = sorted(runs, key=lambda run: (far(run), -room(run), not any(run.total)))
        return self._fill(ordered, part, rule, last=lambda run: (far(run), free(run)))

    def _add_light(self, runs: Sequence[NodeGroup], bundle: int) -> list[NodeGroup] | None:
        """Cells of a bundle that needs no slots: on the nodes to which they have the highest affinity.

        Of equal ones, on those that have something of their part.
        """

        def key(run: NodeGroup) -> tuple[float, bool, bool]:
            total = run.total
            more = with_count(total, bundle, total[bundle] + 1)
            new = self._score.touched(more) != self._score.touched(total)
            return -self._score.pull(bundle, total), new, not any(total)

        return self._fill(sorted(runs, key=key), (bundle,), in_turn((bundle,)))

    def _left(self, bundles: Sequence[int]) -> list[int]:
        return [count if bundle in bundles else 0 for bundle, count in enumerate(self._counts)]

    def _fill(
        self,
        runs: Sequence[NodeGroup],
        bundles: Sequence[int],
        rule: Rule,
        last: Callable[[NodeGroup], tuple[bool, int]] | None = None,
    ) -> list[NodeGroup] | None:
        """`runs` with all cells of `bundles`, one node after the other; None when there is no room for some.

        With `last`, as soon as one node has room for all that is left, the least of such nodes by this key gets it.
        """
        left = self._left(bundles)
        waiting = list(runs)[::-1]
        done: list[NodeGroup] = []
        while any(left) and waiting:
            run = waiting.pop()
            if last is not None and self._holds(run, left):
                tight = [other for other in (run, *reversed(waiting)) if self._holds(other, left)]
                waiting.append(run)
                run = min(tight, key=last)
                waiting.remove(run)
            cells = self._fill_up(run, left, rule)
            taken = [after - before for after, before in zip(cells, run.cells, strict=True)]
            times = min([run.number, *(there // n for there, n in zip(left, taken, strict=True) if n)])
            left = [there - times * n for there, n in zip(left, taken, strict=True)]
            done.append(NodeGroup(run.kind, cells, times))
            if times < run.number:
                waiting.append(run._replace(number=run.number - times))
        return None if any(left) else done + waiting[::-1]

    def _holds(self, run: NodeGroup, left: Sequence[int]) -> bool:
        """Return True if a node of `run` has room for all that is left."""
        return self._packer.fits(run.kind, tuple(a + b for a, b in zip(run.cells, left, strict=True)))

    def _fill_up(self, run: NodeGroup, left: Sequence[int], rule: Rule) -> Cells:
        """The cells of a node of `run` when it gets as many of those left as the rule wants and it has room for."""
        cells = run.cells
        most = tuple(number + more for number, more in zip(cells, left, strict=True))
        while True:
            for bundle in rule(cells, left):
                if cells[bundle] < most[bundle]:
                    more = with_count(cells, bundle, cells[bundle] + 1)
                    if self._packer.fits(run.kind, more):
                        cells = more
                        break
            else:
                return cells


def in_turn(bundles: Sequence[int]) -> Rule:
    """All of the first bundle, then all of the second, and so on."""
    return lambda _cells, _left: bundles


def by_share(bundles: Sequence[int]) -> Rule:
    """Of each bundle the same share of what is left."""
    return lambda cells, left: sorted(
        bundles, key=lambda b: ((cells[b] + 1) / left[b] if left[b] else 2.0, b)
    )


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
