"""From a problem and nodes to cells on nodes: how many of each bundle, then on which nodes.

One search does all of it. It gives one node after the other some cells, the best first, and goes back when cells are
left over, or to look for a higher score. The score is a sum over nodes, so only the best way on from each state counts,
and each state is looked at once. Of few nodes and cells all are tried, so that the result is the best there is, or a
proof that there is none. Of more, nodes that are alike are one step, a few rules say which cells are tried, and the
search goes back only some times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import lcm, prod
from operator import add, gt, mul, sub, truediv
from typing import Any, NamedTuple

from unirun.collocation.inventory import CPU, Node
from unirun.collocation.planning.packer import Packer
from unirun.collocation.planning.problem import Cells, NodeKind, Problem, total, with_count

COARSE = 10**6
"""The resolution of the last criterion, how much a role is kept together."""

WORK = 150_000
"""Steps of a search that tries everything: half a second or less."""

TURNS, TURNS_BACK = 48, 8
"""Steps of a search by rules, besides one for each group of nodes; and those for a higher score once a way is found."""

Rule = Callable[[Cells, Cells, int], Any]
"""A function that tells which bundle should get the next cell on a node, the one for which it is least: from the
cells of the node, those left to place, and the bundle."""

Pattern = Callable[["NodeGroup", Cells], Cells]
"""A function that gives the cells of a node of a group, from those that are left to place."""

Tries = Callable[["NodeGroup", Cells], Iterable[Cells]]
"""A function that gives all cells that are tried, the best first."""


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
        there = tuple(map(add, cells, kind.held))
        kept = self.kept(there) - self.kept(kind.held)
        touched = self.touched(there) - self.touched(kind.held)
        opened = 0 if any(kind.held) else 1
        spread: int = sum(
            COARSE * (number**2 - held**2) // count**2
            for number, held, count in zip(there, kind.held, self._counts, strict=True)
        )
        return ((kept * self._touched - touched) * self._nodes - opened) * self._together + spread


class NodeGroup(NamedTuple):
    """`number` nodes of one kind that have been given the same cells. `first` is the number of the first of them."""

    kind: NodeKind
    cells: Cells
    number: int
    first: int = 0

    @property
    def total(self) -> Cells:
        """All cells that such a node has."""
        return tuple(map(add, self.cells, self.kind.held))


class BestWay(NamedTuple):
    """The best way on from a state: its value, the nodes of the first step, and the way on from there."""

    value: int
    group: NodeGroup | None = None
    rest: BestWay | None = None


State = tuple[int, int, Cells]
"""A group by its number, how many of its nodes are done, and the cells that are left to place on all other nodes."""


class Branch:
    """A state of the search: the steps that are still to be tried, the one that is being tried, and the best so far.

    A step is nodes with their cells, and the state behind it.
    """

    def __init__(self, state: State, steps: Iterator[tuple[NodeGroup, State]]) -> None:
        self.state, self.steps = state, steps
        self.step: tuple[NodeGroup, State] | None = None
        self.best: BestWay | None = None


class Search:
    """Finds nodes of `kinds` for `counts` cells besides those `held`. With any, the first way is good enough."""

    def __init__(
        self, packer: Packer, kinds: Sequence[NodeKind], counts: Cells, held: Cells | None = None
    ) -> None:
        self._packer, self._kinds, self._counts = packer, kinds, counts
        self._problem = problem = packer.problem
        self._score = Score(problem, counts if held is None else tuple(map(add, counts, held)), len(kinds))
        self._values: dict[tuple[NodeKind, Cells], int] = {}
        self._needs = [bundle.needs for bundle in problem.bundles]
        self._every = choices(packer, kinds, counts)
        none = (0,) * len(counts)
        if self._every is None:
            first = 0
            self._groups = []
            for kind, number in Counter(kinds).items():
                first = kinds.index(kind, first)
                self._groups.append(NodeGroup(kind, none, number, first))
        else:
            self._groups = [NodeGroup(kind, none, 1, number) for number, kind in enumerate(kinds)]

    def best(self) -> list[Cells] | None:
        """By node its cells, with the highest score that is found; None when no way places all cells."""
        ways = list(self._ways(any_way=False))
        if not ways:
            return None
        return _in_order(self._kinds, max(ways, key=lambda groups: sum(map(self.value, groups))))

    def possible(self) -> bool:
        """Return True if some way places all cells."""
        return next(self._ways(any_way=True), None) is not None

    def value(self, group: NodeGroup) -> int:
        """The score of the nodes of `group`; of equal ones it is higher with cells on earlier nodes."""
        key = group.kind, group.cells
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = self._score.value(*key) * self._score.positions
        return group.number * (value - group.first * sum(group.cells))

    def _ways(self, any_way: bool) -> Iterator[list[NodeGroup]]:
        every = self._every
        if every is not None:
            found = self._search(self._groups, self._counts, lambda group, _: every[group.kind], any_way)
            if found is not None:
                yield found
            return
        # Bundles that may be on any node come last, where their affinity is highest.
        light = [
            bundle
            for bundle, each in enumerate(self._problem.bundles)
            if each.light and self._counts[bundle] and not self._problem.apart[bundle]
        ]
        heavy = tuple(0 if bundle in light else count for bundle, count in enumerate(self._counts))
        patterns = self._patterns(heavy)
        # Nodes in use come first, then those with the most room.
        slots = len(self._problem.types)
        groups = sorted(
            self._groups,
            key=lambda group: (not any(group.total), [-each for each in group.kind.offer[:slots]]),
        )
        for first in patterns:
            tries = partial(self._tries, [first, *(each for each in patterns if each is not first)])
            found = self._search(groups, heavy, tries, any_way)
            for bundle in light:
                found = None if found is None else self._with_light(found, bundle, any_way)
            if found is not None:
                yield found

    def _search(
        self, groups: Sequence[NodeGroup], counts: Cells, tries: Tries, any_way: bool
    ) -> list[NodeGroup] | None:
        """`groups` with `counts` more cells; None when no way was found."""
        room = [(0,) * len(self._problem.dimensions)]
        """By group: the offers of it and all behind it."""
        for group in reversed(groups):
            offer = map(sub, group.kind.offer, total(group.cells, group.kind.needs))
            room.insert(
                0, tuple(there + group.number * more for there, more in zip(room[0], offer, strict=True))
            )
        complete = self._every is not None
        most = WORK if complete else len(groups) + TURNS
        known: dict[State, BestWay | None] = {}
        path: list[Branch] = []

        def enter(state: State) -> None:
            at, _, left = state
            nonlocal most
            if not any(left):
                known[state] = BestWay(0)
                most = most if complete else min(most, TURNS_BACK)
            elif at == len(groups) or any(map(gt, total(left, self._needs), room[at])):
                known[state] = None
            else:
                path.append(Branch(state, self._steps(groups, state, tries)))

        start: State = (0, 0, counts)
        enter(start)
        while path:
            visit = path[-1]
            if visit.step is not None and (found := known[visit.step[1]]) is not None:
                step = visit.step[0]
                before = step._replace(cells=groups[visit.state[0]].cells)
                value = found.value + self.value(step) - self.value(before)
                if visit.best is None or value > visit.best.value:
                    visit.best = BestWay(value, step, found)
            over = most <= 0 or (any_way and visit.best is not None)
            visit.step = None if over else next(visit.steps, None)
            most -= 1
            if visit.step is None:
                known[visit.state] = visit.best
                path.pop()
            elif visit.step[1] not in known:
                enter(visit.step[1])
        found = known[start]
        return None if found is None else _all_groups(groups, found)

    def _steps(
        self, groups: Sequence[NodeGroup], state: State, tries: Tries
    ) -> Iterator[tuple[NodeGroup, State]]:
        """The next nodes with their cells, the best first, and the states behind them."""
        at, used, left = state
        group = groups[at]
        for cells in tries(group, left):
            taken = tuple(map(sub, cells, group.cells))
            times = min(
                [group.number - used, *(there // n for there, n in zip(left, taken, strict=True) if n)]
            )
            if times:
                rest = tuple(there - times * n for there, n in zip(left, taken, strict=True))
                done = used + times == group.number
                after = (at + 1, 0, rest) if done else (at, used + times, rest)
                yield NodeGroup(group.kind, cells, times, group.first + used), after

    def _tries(self, patterns: Sequence[Pattern], group: NodeGroup, left: Cells) -> Iterator[Cells]:
        """The results of `patterns`, each once; at last cells of one bundle only, and nothing."""
        found = set()
        none = (0,) * len(left)
        alone = (with_count(none, bundle, count) for bundle, count in enumerate(left) if count)
        last = (self._filled(_in_turn, group, own) for own in (*alone, none))
        for cells in chain((pattern(group, left) for pattern in patterns), last):
            if cells not in found:
                found.add(cells)
                yield cells

    def _patterns(self, counts: Cells) -> list[Pattern]:
        """The rules by which cells of bundles of which there are `counts` are chosen for a node."""
        gains, pull = self._problem.gains, self._score.pull
        bundles = [bundle for bundle, count in enumerate(counts) if count]
        offers = [group.number * amount for group in self._groups for amount in group.kind.offer]
        size = len(self._problem.dimensions)
        sums = [max(sum(offers[at::size]), 1) for at in range(size)]
        sizes = [max(map(truediv, needs, sums), default=0.0) for needs in self._needs]
        # The bundle with the most traffic, then always the one with the most traffic to those before it.
        rest, near, drawn, sums_of = list(bundles), list[int](), [0] * len(gains), list(map(sum, gains))
        while rest:
            near.append(max(rest, key=lambda b: (drawn[b], sums_of[b], -b)))
            rest.remove(near[-1])
            drawn = list(map(add, drawn, gains[near[-1]]))
        # Bundles with one cell per node have the fewest choices; then the largest come first.
        largest = sorted(bundles, key=lambda b: (not self._problem.bundles[b].single, -sizes[b]))

        def by_pull(cells: Cells, _left: Cells, bundle: int) -> Any:
            return -pull(bundle, cells), cells[bundle], bundle

        def by_share(cells: Cells, left: Cells, bundle: int) -> Any:
            return (cells[bundle] + 1) / left[bundle], bundle

        rules: list[Rule] = [
            lambda _cells, _left, bundle: near.index(bundle),
            lambda _cells, _left, bundle: largest.index(bundle),
            by_pull,
            by_share,
        ]
        found: list[Pattern] = [partial(self._filled, rule) for rule in rules]
        joined = {bundle for part in self._problem.parts for bundle in part}
        parts = [*self._problem.parts, *((bundle,) for bundle in bundles if bundle not in joined)]

        def traffic(part: Sequence[int]) -> tuple[float, float]:
            among = sum(gains[one][other] for one in part for other in part)
            return -among, -sum(sizes[bundle] * counts[bundle] for bundle in part)

        # Bundles in no part come last, and fill gaps.
        parts.sort(key=lambda part: (part[0] not in joined, traffic(part)))
        if joined:
            found += [partial(self._by_parts, rule, parts, sizes) for rule in (by_share, by_pull)]
        return found

    def _filled(self, rule: Rule, group: NodeGroup, left: Cells) -> Cells:
        """The cells of a node when it gets as many of those left as it has room for, one after the other by `rule`."""
        cells = group.cells
        most = tuple(map(add, cells, left))
        open_ = [bundle for bundle, count in enumerate(left) if count]
        while open_:
            bundle = min(open_, key=partial(rule, cells, left))
            more = with_count(cells, bundle, cells[bundle] + 1)
            fits = self._packer.fits(group.kind, more)
            cells = more if fits else cells
            if not fits or cells[bundle] == most[bundle]:
                open_.remove(bundle)
        return cells

    def _by_parts(
        self,
        rule: Rule,
        parts: Sequence[Sequence[int]],
        sizes: Sequence[float],
        group: NodeGroup,
        left: Cells,
    ) -> Cells:
        """Cells of one part only, if they fill the node; else the last cells of the largest, and of others with it."""
        own = [tuple(count if b in part else 0 for b, count in enumerate(left)) for part in parts]
        there = group.total
        near = [any(there[bundle] for bundle in part) for part in parts]
        if any(there) and not any(any(cells) for cells, here in zip(own, near, strict=True) if here):
            return group.cells
        order = sorted(range(len(parts)), key=lambda part: not near[part])
        for part in order:
            cells = self._filled(rule, group, own[part])
            if any(own[part]) and cells != tuple(map(add, group.cells, own[part])):
                return cells
        cells = group.cells
        for part in sorted(order, key=lambda part: (not near[part], -sum(map(mul, own[part], sizes)))):
            more = tuple(map(add, cells, own[part]))
            if self._packer.fits(group.kind, more):
                cells = more
        return cells

    def _with_light(self, groups: Sequence[NodeGroup], bundle: int, any_way: bool) -> list[NodeGroup] | None:
        """Cells of a bundle that needs nothing: on the nodes to which they have the highest affinity.

        Of equal ones, on those that have something of their part.
        """

        def key(group: NodeGroup) -> tuple[float, bool, bool]:
            there = group.total
            more = with_count(there, bundle, there[bundle] + 1)
            new = self._score.touched(more) != self._score.touched(there)
            return -self._score.pull(bundle, there), new, not any(there)

        counts = with_count((0,) * len(self._counts), bundle, self._counts[bundle])
        return self._search(sorted(groups, key=key), counts, partial(self._tries, ()), any_way)


def _in_turn(_cells: Cells, _left: Cells, bundle: int) -> int:
    """All cells of the first bundle, then all of the second, and so on."""
    return bundle


def _all_groups(groups: Sequence[NodeGroup], found: BestWay) -> list[NodeGroup]:
    """`groups` after the steps of `found`; those that they do not come to are as they were."""
    done: list[NodeGroup] = []
    at = used = 0
    step: BestWay | None = found
    while step is not None and step.group is not None:
        done.append(step.group)
        used += step.group.number
        if used == groups[at].number:
            at, used = at + 1, 0
        step = step.rest
    if used:
        group = groups[at]
        done.append(group._replace(number=group.number - used, first=group.first + used))
        at += 1
    return [*done, *groups[at:]]


def processes(problem: Problem, nodes: Sequence[Node]) -> Iterator[int]:
    """The processes per processor, in the order in which they are tried: 1, 2, 4, … until all cells fit on one node.

    A host may run any number of processes, and they are spread as evenly as possible.
    """
    yield 1
    if CPU in problem.types:
        at = problem.types.index(CPU)
        demand = sum(bundle.most * -(-bundle.needs[at] // problem.unit) for bundle in problem.bundles)
        # Roles that are isolated have one NUMA node of a host.
        numas = (len(cpus) for node in nodes for _, cpus in node.numa if cpus)
        least = min((*numas, *(max(len(node.cpus), 1) for node in nodes)), default=demand)
        number = 1
        while number * least < demand:
            number *= 2
            yield number


def _in_order(kinds: Sequence[NodeKind], groups: Iterable[NodeGroup]) -> list[Cells]:
    """By node its cells. Among nodes of one kind, those with cells of the first bundles come first."""
    by_kind: dict[NodeKind, Counter[Cells]] = {}
    for kind, cells, number, _ in groups:
        by_kind.setdefault(kind, Counter())[cells] += number
    turns = {
        kind: iter([cells for cells in sorted(found, reverse=True) for _ in range(found[cells])])
        for kind, found in by_kind.items()
    }
    return [next(turns[kind]) for kind in kinds]


def most_cells(packer: Packer, kinds: Sequence[NodeKind], least: Cells, most: Cells) -> Cells | None:
    """The number of cells of each bundle, from `least` to `most`, that can be placed; None when too few can.

    All bundles grow from `least` by equal parts of the difference, as long as there is room, then those that still can.
    So no role could have more without another having fewer. When `least` is `most`, `Search.best` finds out.
    """
    if least == most:
        return most

    def fits(counts: Cells) -> bool:
        return Search(packer, kinds, counts).possible()

    if fits(most):
        return most
    return grow(least, most, fits) if fits(least) else None


def grow(least: Cells, most: Cells, fits: Callable[[Cells], bool]) -> Cells:
    """The greatest cells between `least`, which fit, and `most`, by equal parts of the difference."""
    counts = least
    growing = {number for number, (low, high) in enumerate(zip(least, most, strict=True)) if low < high}
    while growing:
        goal = tuple(most[number] if number in growing else at for number, at in enumerate(counts))
        before, counts = counts, _towards(counts, goal, fits)
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


def _towards(counts: Cells, goal: Cells, fits: Callable[[Cells], bool]) -> Cells:
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


def choices(
    packer: Packer, kinds: Sequence[NodeKind], counts: Cells
) -> Mapping[NodeKind, Sequence[Cells]] | None:
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
            # Of equal ways the first counts, which has cells of the first bundles on the first nodes.
            found[kind] = sorted(fitting, reverse=True)
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
