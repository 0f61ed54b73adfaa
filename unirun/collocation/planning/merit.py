"""How good a placement is, as a sum over nodes: so the best cells of a node do not depend on the other nodes'."""

from __future__ import annotations

from math import lcm

from unirun.collocation.planning.board import Room
from unirun.collocation.planning.problem import Cells, Problem

COARSE = 10**6
"""Into so many parts the squares are cut that say how much a role is kept together."""


class Merit:
    """Compares placements of `counts` cells, in integers, so that equals are equal.

    First counts what stays within nodes, then that each part of the job is on few of them, then that few are in use,
    then that roles are kept together. Each rank of a role talks as much with each rank of the other: of a pair's
    weight, the part x/K · y/L stays within a node that has x of the K cells of the one bundle and y of the L of the
    other.
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
        self.places = nodes * sum(counts) + 1

    def kept(self, cells: Cells) -> int:
        """The weight that stays within a node that has `cells`, times a number that makes it whole."""
        return sum(gain * cells[one] * cells[other] for one, other, gain in self._pairs)

    def pull(self, bundle: int, cells: Cells) -> float:
        """What one more cell of `bundle` adds to what stays within a node that has `cells`."""
        count = self._counts[bundle]
        pull = self._gains[bundle][bundle] * (2 * cells[bundle] + 1) / count
        for other, number in enumerate(cells):
            if number and other != bundle:
                pull += self._gains[bundle][other] * number / self._counts[other]
        return pull / count

    def touched(self, cells: Cells) -> int:
        """Of how many parts a node has something that has `cells`."""
        return sum(any(cells[bundle] for bundle in part) for part in self._parts)

    def value(self, room: Room, cells: Cells) -> int:
        """The merit of a node that gets `cells`, against its getting none. Greater is better, and they add up."""
        if not any(cells):
            return 0
        total = tuple(number + held for number, held in zip(cells, room.held, strict=True))
        kept = self.kept(total) - self.kept(room.held)
        touched = self.touched(total) - self.touched(room.held)
        opened = 0 if any(room.held) else 1
        spread = sum(
            COARSE * (number**2 - held**2) // count**2
            for number, held, count in zip(total, room.held, self._counts, strict=True)
        )
        return ((kept * self._touched - touched) * self._nodes - opened) * self._together + spread
