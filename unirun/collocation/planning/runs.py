"""Nodes that are alike and get the same cells, and the rules by which a node gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from unirun.collocation.planning.board import Room
from unirun.collocation.planning.merit import Merit
from unirun.collocation.planning.packing import Packer
from unirun.collocation.planning.problem import Cells


class Run(NamedTuple):
    """`number` nodes of one kind that get the same cells."""

    room: Room
    cells: Cells
    number: int

    @property
    def total(self) -> Cells:
        """What such a node has then, with what it had."""
        return tuple(number + held for number, held in zip(self.cells, self.room.held, strict=True))


Rule = Callable[[Cells, Sequence[int]], Iterable[int]]
"""Given what a node has and what is left to place: the bundles of which it may get a cell, the best first."""


def in_turn(bundles: tuple[int, ...]) -> Rule:
    """All of the first bundle, then all of the second, and so on."""
    return lambda _cells, _left: bundles


def by_pull(bundles: Sequence[int], merit: Merit) -> Rule:
    """What talks most with that which is there."""
    return lambda cells, _left: sorted(bundles, key=lambda b: (-merit.pull(b, cells), cells[b], b))


def by_share(bundles: Sequence[int]) -> Rule:
    """Of each bundle the same share of what is left."""
    return lambda cells, left: sorted(
        bundles, key=lambda b: ((cells[b] + 1) / left[b] if left[b] else 2.0, b)
    )


def fill_up(packer: Packer, room: Room, cells: Cells, left: Sequence[int], rule: Rule) -> Cells:
    """What a node has that has `cells`, when it gets as much of what is left as the rule wants and finds place."""
    most = tuple(number + more for number, more in zip(cells, left, strict=True))
    while True:
        for bundle in rule(cells, left):
            if cells[bundle] < most[bundle]:
                more = (*cells[:bundle], cells[bundle] + 1, *cells[bundle + 1 :])
                if packer.fits(room, more):
                    cells = more
                    break
        else:
            return cells


def take(run: Run, cells: Cells, left: Sequence[int]) -> tuple[int, list[int]]:
    """How many nodes of `run` can get `cells` instead of what they have, and what is left of `left` then."""
    taken = [after - before for after, before in zip(cells, run.cells, strict=True)]
    times = min([run.number, *(there // each for there, each in zip(left, taken, strict=True) if each)])
    return times, [there - times * each for there, each in zip(left, taken, strict=True)]
