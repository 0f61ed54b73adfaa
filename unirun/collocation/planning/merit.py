"""How good a placement is, as a sum over nodes: so the best cells of a node do not depend on the other nodes'."""

from __future__ import annotations

from unirun.collocation.planning.board import Room
from unirun.collocation.planning.problem import Cells, Problem

FINE = 10**9
"""Into so many parts the whole weight is cut: sums of integers do not depend on their order, as those of floats do."""
COARSE = 10**6


class Merit:
    """Compares placements of `counts` cells: what stays within nodes first, then few nodes, then roles kept together.

    Each rank of a role talks as much with each rank of the other: of a pair's weight, the part x/K · y/L stays within a
    node that has x of the K cells of the one bundle and y of the L of the other.
    """

    def __init__(self, problem: Problem, counts: Cells, nodes: int) -> None:
        self._gains = problem.gains
        self._counts = [max(count, 1) for count in counts]
        self._nodes = nodes + 1
        self._together = len(counts) * COARSE + 1
        self.places = nodes * sum(counts) + 1

    def kept(self, cells: Cells) -> float:
        """The part of all weight that stays within a node that has `cells`."""
        parts = [number / count for number, count in zip(cells, self._counts, strict=True)]
        return sum(
            self._gains[one][other] * part * parts[other]
            for one, part in enumerate(parts)
            if part
            for other in range(one, len(parts))
        )

    def pull(self, bundle: int, cells: Cells) -> float:
        """What one more cell of `bundle` adds to what stays within a node that has `cells`."""
        count = self._counts[bundle]
        pull = self._gains[bundle][bundle] * (2 * cells[bundle] + 1) / count
        for other, number in enumerate(cells):
            if number and other != bundle:
                pull += self._gains[bundle][other] * number / self._counts[other]
        return pull / count

    def value(self, room: Room, cells: Cells) -> int:
        """The merit of a node that gets `cells`, against its getting none. Greater is better, and they add up."""
        if not any(cells):
            return 0
        total = tuple(number + held for number, held in zip(cells, room.held, strict=True))
        kept = round(FINE * (self.kept(total) - self.kept(room.held)))
        opened = 0 if any(room.held) else 1
        spread = sum(
            COARSE * (number**2 - held**2) // count**2
            for number, held, count in zip(total, room.held, self._counts, strict=True)
        )
        return (kept * self._nodes - opened) * self._together + spread
