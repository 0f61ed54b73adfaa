"""Cells for many nodes, part by part: roles that wait for each other are packed on as few nodes as they need.

Where `fill` goes from node to node, here one part after the other looks for its nodes. Which comes first matters, so
two orders are tried. That the sum over all parts is least is not promised: that is a problem of packing bins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from unirun.collocation.planning.merit import Merit
from unirun.collocation.planning.packing import Packer, free_units
from unirun.collocation.planning.problem import Cells, Problem
from unirun.collocation.planning.runs import Rule, Run, by_pull, by_share, fill_up, take


class Part(NamedTuple):
    """Bundles that are packed as one: with roles that wait for each other, or `alone`."""

    bundles: tuple[int, ...]
    alone: bool


def by_parts(
    packer: Packer, problem: Problem, kinds: Sequence[Run], counts: Cells, merit: Merit
) -> Iterator[list[Run]]:
    """What is found for `counts` in each of some ways; nothing for a job without parts."""
    for order in _orders(problem, counts) if problem.parts else ():
        for rules in (
            [by_share(part.bundles) for part in order],
            [by_pull(part.bundles, merit) for part in order],
        ):
            runs: list[Run] | None = list(kinds)
            for part, rule in zip(order, rules, strict=True):
                runs = None if runs is None else _pack(packer, problem, runs, part, counts, rule)
            if runs is not None:
                yield runs


def _orders(problem: Problem, counts: Cells) -> list[tuple[Part, ...]]:
    """The heaviest part first, and the largest. Who waits for nobody comes last: there are gaps to fill then."""
    joined = {bundle for part in problem.parts for bundle in part}
    alone = [Part((bundle,), True) for bundle in range(len(counts)) if bundle not in joined]
    parts = [*(Part(part, False) for part in problem.parts), *alone]
    sizes = _sizes(problem)

    def size(part: Part) -> int:
        return sum(sizes[bundle] * counts[bundle] for bundle in part.bundles)

    def weight(part: Part) -> int:
        return sum(problem.gains[one][other] for one in part.bundles for other in part.bundles)

    heaviest = sorted(parts, key=lambda part: (part.alone, -weight(part), -size(part)))
    largest = sorted(parts, key=lambda part: (part.alone, -size(part), -weight(part)))
    return list(dict.fromkeys((tuple(heaviest), tuple(largest))))


def _sizes(problem: Problem) -> list[int]:
    """By bundle: the units that a cell takes."""
    return [sum(bundle.demand().values()) for bundle in problem.bundles]


def _pack(
    packer: Packer, problem: Problem, runs: Sequence[Run], part: Part, counts: Cells, rule: Rule
) -> list[Run] | None:
    """`runs` with the cells of `part`: where it is already, then where most of it fits, and the last where it is tight.

    A role that waits for nobody fills the nodes that are in use.
    """
    sizes = _sizes(problem)
    left = [count if bundle in part.bundles else 0 for bundle, count in enumerate(counts)]
    if not any(left):
        return list(runs)

    def far(run: Run) -> bool:
        total = run.total
        return not any(total) if part.alone else not any(total[bundle] for bundle in part.bundles)

    def room(run: Run) -> int:
        cells = fill_up(packer, run.room, run.cells, left, rule)
        return sum(size * (a - b) for size, a, b in zip(sizes, cells, run.cells, strict=True))

    def free(run: Run) -> int:
        used = sum(size * number for size, number in zip(sizes, run.cells, strict=True))
        return sum(free_units(run.room).values()) - used

    # The last first.
    waiting = sorted(runs, key=lambda run: (far(run), -room(run), not any(run.total)))[::-1]
    done: list[Run] = []
    while any(left) and waiting:
        run = waiting.pop()
        if _holds(packer, run, left):
            tight = (other for other in (run, *reversed(waiting)) if _holds(packer, other, left))
            waiting.append(run)
            run = min(tight, key=lambda other: (far(other), free(other)))
            waiting.remove(run)
        cells = fill_up(packer, run.room, run.cells, left, rule)
        times, left = (0, left) if cells == run.cells else take(run, cells, left)
        if times:
            done.append(Run(run.room, cells, times))
            if times < run.number:
                waiting.append(run._replace(number=run.number - times))
        else:
            done.append(run)
    return None if any(left) else done + waiting


def _holds(packer: Packer, run: Run, left: Sequence[int]) -> bool:
    """Whether all that is left fits on one node of `run`."""
    return packer.fits(run.room, tuple(a + b for a, b in zip(run.cells, left, strict=True)))
