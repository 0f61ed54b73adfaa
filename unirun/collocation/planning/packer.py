"""What fits on one node, and on which of its places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from unirun.collocation.planning.cells import Cells, Problem
from unirun.collocation.planning.nodes import NodeKind
from unirun.collocation.planning.search import Board, Item, Ranks, first_places, search_near, splits
from unirun.collocation.slots import CPU

STEPS = 20_000
"""After so many steps cells count as not fitting. Only nodes with many shares of odd sizes need so many."""

Packing = list[list[tuple[int, ...]]]
"""By stack, the places of each of its ranks on the node."""


class Packer:
    """Answers what of a `problem` fits on kinds of nodes, and keeps the answers."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._stacks = problem.stacks
        self._home = [number for number, bundle in enumerate(problem.bundles) for _ in bundle.stacks]
        self._demands = [bundle.demand() for bundle in problem.bundles]
        self._countable = problem.countable
        self._known: dict[tuple[NodeKind, Cells], bool] = {}
        self._first: dict[object, NodeKind] = {}
        self._same: dict[NodeKind, NodeKind] = {}

    def fits(self, kind: NodeKind, cells: Cells) -> bool:
        """Whether a node of `kind` has room for `cells`, and all constraints hold among the cells it then has."""
        same = self._same.get(kind)
        if same is None:
            same = self._same[kind] = self._first.setdefault(kind.shape, kind)
        known = self._known.get((same, cells))
        if known is None:
            known = self._known[same, cells] = self._fits(kind, cells)
        return known

    def _fits(self, kind: NodeKind, cells: Cells) -> bool:
        there = [number + held for number, held in zip(cells, kind.held, strict=True)]
        present = {bundle for bundle, number in enumerate(there) if number}
        for bundle in present:
            if self.problem.bundles[bundle].single and there[bundle] > 1:
                return False
            if self.problem.apart[bundle] & present:
                return False
        need: Counter[str] = Counter()
        for number, demand in zip(cells, self._demands, strict=True):
            for type, units in demand.items():
                need[type] += number * units
        if any(units > kind.free[type] for type, units in need.items()):
            return False
        return self._countable or self._anywhere(kind, cells) is not None

    def pack(self, kind: NodeKind, cells: Cells) -> Packing:
        """Places for `cells`, which fit: near each other where there is a choice."""
        ranks = self._ranks(cells)
        found = search_near(self.problem, kind, ranks) if self._may_choose(kind) else None
        found = found or self._anywhere(kind, cells)
        if found is None:
            raise ValueError("these cells do not fit")
        packing: Packing = [
            [] if stack.width else [()] * number for stack, number in zip(self._stacks, ranks, strict=True)
        ]
        for item, places in sorted(found, key=lambda pair: pair[1]):
            packing[item.stack] += places
        return packing

    def _may_choose(self, kind: NodeKind) -> bool:
        """Whether the free slots differ in what they are near to, for a stack to which that matters."""
        islands = {
            type: {p.island for p in kind.places if p.free and p.type == type} for type in kind.distances
        }
        return any(
            stack.device is not None
            and len(islands.get(stack.device, ())) > 1
            and (stack.device != CPU or stack.width > 1 or stack.group > 1)
            for stack in self._stacks
        )

    def _ranks(self, cells: Cells) -> list[int]:
        """By stack, how many ranks `cells` have."""
        return [cells[home] * stack.ranks for stack, home in zip(self._stacks, self._home, strict=True)]

    def _anywhere(self, kind: NodeKind, cells: Cells) -> list[tuple[Item, Ranks]] | None:
        """Places for `cells`, near each other or not. Ranks that share no slot are one item: they may have any."""
        items: list[Item] = []
        for number, (stack, ranks) in enumerate(zip(self._stacks, self._ranks(cells), strict=True)):
            whole = stack.units == self.problem.unit
            if stack.width and ranks:
                item = Item(number, ranks if whole else 1, stack.width, stack.units)
                items += [item] if whole else [item] * ranks
        # The fewest choices first, then the largest shares.
        items.sort(key=lambda i: (self._stacks[i.stack].only is None, -i.units, i.stack))
        board = Board(self.problem, kind)

        def candidates(number: int, start: int) -> Iterator[Ranks]:
            return _candidates(self.problem, board, items[number], start)

        return board.search(items, candidates, STEPS)


def _candidates(problem: Problem, board: Board, item: Item, start: int) -> Iterator[Ranks]:
    """The places that `item` may have. Of places that can stand for each other only the first are tried."""
    shares = item.units < problem.unit
    alike: dict[object, list[int]] = {}
    for at in board.usable(item, start):
        numa = board.places[at].numa if any(problem.isolated) else 0
        users = (board.free[at], *sorted(board.users[at])) if shares else ()
        alike.setdefault((numa, board.lists[at], users), []).append(at)
    pools = list(alike.values())
    if shares:
        # The fullest first.
        for at in sorted((pool[0] for pool in pools), key=lambda at: (board.free[at], at)):
            yield ((at,),)
        return
    for split in splits(item.ranks * item.width, [len(pool) for pool in pools]):
        yield first_places([split], pools, item.width)
