"""From a problem and nodes to cells on nodes: how many of each bundle, then where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from unirun.collocation.inventory import Node
from unirun.collocation.planning.board import Room
from unirun.collocation.planning.exact import Choices, best, choices, reachable
from unirun.collocation.planning.fill import fill, fillable
from unirun.collocation.planning.merit import Merit
from unirun.collocation.planning.packing import Packer
from unirun.collocation.planning.problem import Cells, Problem
from unirun.collocation.planning.rooms import Rooms
from unirun.collocation.slots import CPU
from unirun.values import Value


class Solution(Value):
    """For each node its room and how many cells of each bundle it gets. `counts` are the sums."""

    rooms: list[Room]
    placed: list[Cells]
    counts: Cells


def solve(problem: Problem, nodes: Sequence[Node], packer: Packer) -> Solution | None:
    """Cells on empty `nodes`: as many as there is room for. None when the least do not fit.

    Complete, and with the most merit, when `exact.choices` finds it small enough; else `fill` does what it can.
    """
    for crowd in crowds(problem, nodes):
        rooms = Rooms(problem, crowd).of(nodes)
        counts = most_cells(problem, packer, rooms, *bounds(problem))
        if counts is not None:
            placed = place(problem, packer, rooms, counts)
            if placed is not None:
                return Solution(rooms, placed, counts)
    return None


def crowds(problem: Problem, nodes: Sequence[Node]) -> Iterator[int]:
    """How many processes a processor may have, in the order in which that is tried.

    There is no limit to the processes of a host, and they are spread as evenly as it takes.
    """
    yield 1
    if CPU in problem.types:
        demand = sum(
            bundle.most * -(-bundle.demand().get(CPU, 0) // problem.unit) for bundle in problem.bundles
        )
        # Roles that are isolated have one NUMA node of a host.
        parts = (len(numa.cpus) for node in nodes for numa in node.numa if numa.cpus)
        least = min((*parts, *(max(len(node.cpus), 1) for node in nodes)), default=demand)
        crowd = 1
        while crowd * least < demand:
            crowd *= 2
            yield crowd


def feasibility(problem: Problem, nodes: Sequence[Node]) -> Callable[[Cells], bool]:
    """Answers whether so many cells of each bundle find a place on empty `nodes`."""
    packer = Packer(problem)
    # What does not fit with the most processes per processor does not with fewer.
    *_, most = crowds(problem, nodes)
    rooms = Rooms(problem, most, counted=problem.countable).of(nodes)

    def fits(counts: Cells) -> bool:
        few = choices(packer, rooms, counts)
        if few is not None:
            return counts in reachable(rooms, few, counts)
        return fillable(packer, problem, rooms, counts, Merit(problem, counts, len(rooms)))

    return fits


def bounds(problem: Problem) -> tuple[Cells, Cells]:
    """The least and the most cells of each bundle."""
    return tuple(b.least for b in problem.bundles), tuple(b.most for b in problem.bundles)


def place(
    problem: Problem, packer: Packer, rooms: Sequence[Room], counts: Cells, held: Cells | None = None
) -> list[Cells] | None:
    """For each node its cells, `counts` in all. None when no way was found. `held` is what the rooms hold already."""
    rooms = packer.alike(rooms)
    everything = counts if held is None else tuple(c + h for c, h in zip(counts, held, strict=True))
    merit = Merit(problem, everything, len(rooms))
    small = choices(packer, rooms, counts)
    if small is not None:
        exact = best(rooms, small, counts, merit.value, merit.places)
        return None if exact is None else _in_order(rooms, zip(rooms, exact, (1,) * len(rooms), strict=True))
    runs = fill(packer, problem, rooms, counts, merit)
    return None if runs is None else _in_order(rooms, runs)


def _in_order(rooms: Sequence[Room], runs: Iterable[tuple[Room, Cells, int]]) -> list[Cells]:
    """Among nodes that are alike, those with the first roles come first."""
    by_room: dict[Room, dict[Cells, int]] = defaultdict(lambda: defaultdict(int))
    for room, cells, number in runs:
        by_room[room][cells] += number
    turns = {
        room: iter([cells for cells in sorted(found, reverse=True) for _ in range(found[cells])])
        for room, found in by_room.items()
    }
    return [next(turns[room]) for room in rooms]


def most_cells(
    problem: Problem, packer: Packer, rooms: Sequence[Room], least: Cells, most: Cells
) -> Cells | None:
    """How many cells of each bundle, from `least` to `most`, can be placed on `rooms`; None when too few can.

    All bundles grow from `least` by equal parts of what they may have more, as long as there is room, then those that
    still can. So no role could have more without another having fewer. Without a choice nothing is looked at: whether
    they fit is then seen when they are placed.
    """
    if least == most:
        return most
    fits = _feasible(problem, packer, packer.alike(rooms), most)
    if fits(most):
        return most
    return grow(least, most, fits) if fits(least) else None


def _feasible(
    problem: Problem, packer: Packer, rooms: Sequence[Room], most: Cells
) -> Callable[[Cells], bool]:
    small: Choices | None = choices(packer, rooms, most)
    if small is not None:
        return reachable(rooms, small, most).__contains__

    def fits(counts: Cells) -> bool:
        if fillable(packer, problem, rooms, counts, Merit(problem, counts, len(rooms))):
            return True
        few = choices(packer, rooms, counts)
        return few is not None and counts in reachable(rooms, few, counts)

    return fits


def grow(least: Cells, most: Cells, fits: Callable[[Cells], bool]) -> Cells:
    """The greatest cells between `least`, which fit, and `most` that fit, by equal parts of the difference."""
    counts = least
    growing = {number for number, (low, high) in enumerate(zip(least, most, strict=True)) if low < high}
    while growing:
        parts = max(most[number] - counts[number] for number in growing)
        goals = tuple(
            high if number in growing else at
            for number, (at, high) in enumerate(zip(counts, most, strict=True))
        )

        def after(part: int, base: Cells = counts, goals: Cells = goals, parts: int = parts) -> Cells:
            return tuple(at + (goal - at) * part // parts for at, goal in zip(base, goals, strict=True))

        low, high = 0, parts + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(after(middle)) else (low, middle)
        counts = after(low)
        more = {
            number: (*counts[:number], counts[number] + 1, *counts[number + 1 :])
            for number in sorted(growing)
            if counts[number] < most[number]
        }
        growing = {number for number, cells in more.items() if fits(cells)}
        if growing and low == 0:
            # Each could have one more and not all of them: the first one has it.
            counts = more[min(growing)]
            growing = {number for number in growing if counts[number] < most[number]}
    return counts
