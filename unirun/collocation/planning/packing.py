"""What fits on one node, and on which of its slots: a search over places, complete up to `STEPS`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from unirun.collocation.planning.board import Board, Item, Ranks, Room, search
from unirun.collocation.planning.near import Near, near_items
from unirun.collocation.planning.pools import splits
from unirun.collocation.planning.problem import Cells, Problem
from unirun.collocation.slots import CPU

STEPS = 20_000
"""After so many steps a packing counts as impossible. Only a node with many shares of odd sizes gets there."""

Packing = list[list[tuple[int, ...]]]
"""By stack, and for each of its ranks on the node: its places, as positions in `Room.places`."""


class Packer:
    """Answers what fits on a node, and remembers what it was asked."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._stacks = problem.stacks
        self._home = [number for number, bundle in enumerate(problem.bundles) for _ in bundle.stacks]
        self._demands = [bundle.demand() for bundle in problem.bundles]
        self._countable = problem.countable
        self._known: dict[tuple[Room, Cells], bool] = {}
        self._free: dict[Room, dict[str, int]] = {}
        self._alike: dict[object, Room] = {}

    def alike(self, rooms: Sequence[Room]) -> list[Room]:
        """`rooms`, with the same one for all in which the same fits.

        Nodes whose devices have names of their own, as masks by UUID give them, are many kinds, and mostly it does not
        matter what slots are called until ranks are put on them.
        """
        same = {
            room: self._alike.setdefault((room.held, self._kind(room)), room) for room in dict.fromkeys(rooms)
        }
        return [same[room] for room in rooms]

    def _kind(self, room: Room) -> object:
        """What says, with the cells that are held, which cells fit into `room`."""
        if self._countable:
            return tuple(sorted(free_units(room).items()))
        names = any(stack.only is not None for stack in self._stacks)
        return tuple([(p.type, p.numa, p.free, p.users, p.name if names else "") for p in room.places])

    def fits(self, room: Room, cells: Cells) -> bool:
        """Whether `cells` fit into `room`, with all constraints between those that are there then."""
        key = (room, cells)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._admits(room, cells)
        return known

    def _admits(self, room: Room, cells: Cells) -> bool:
        there = [number + held for number, held in zip(cells, room.held, strict=True)]
        present = {bundle for bundle, number in enumerate(there) if number}
        for bundle in present:
            if self._problem.bundles[bundle].single and there[bundle] > 1:
                return False
            if self._problem.apart[bundle] & present:
                return False
        need: dict[str, int] = {}
        for number, demand in zip(cells, self._demands, strict=True):
            if number:
                for type, units in demand.items():
                    need[type] = need.get(type, 0) + number * units
        free = self._free.get(room)
        if free is None:
            free = self._free[room] = free_units(room)
        if any(units > free.get(type, 0) for type, units in need.items()):
            return False
        return self._countable or self._anywhere(room, self._ranks(cells)) is not None

    def pack(self, room: Room, cells: Cells) -> Packing:
        """The places of `cells`, which fit: near each other as far as `near` says, which never decides what fits."""
        ranks = self._ranks(cells)
        choice = self._may_choose(room)
        if self._countable and not choice:
            return self._in_turn(room, ranks)
        items = near_items(self._problem, ranks)
        found = Near(self._problem, room, items).search() if choice else None
        if found is None:
            items, found = self._items(ranks), self._anywhere(room, ranks)
        if found is None:
            raise ValueError("these cells do not fit")
        return self._by_stack(ranks, zip(items, found, strict=True))

    def _may_choose(self, room: Room) -> bool:
        """Whether it matters which of the free slots are taken: where they differ in what they are near to."""
        islands: dict[str, set[int]] = {}
        for place in room.places:
            if place.free:
                islands.setdefault(place.type, set()).add(place.island)
        return any(
            stack.device is not None
            and len(islands.get(stack.device, ())) > 1
            and (stack.device != CPU or stack.width > 1 or stack.group > 1)
            for stack in self._stacks
        )

    def _in_turn(self, room: Room, ranks: Sequence[int]) -> Packing:
        """One free slot after the other: all that it takes where any will do."""
        free = {
            type: iter([at for at, p in enumerate(room.places) if p.type == type and p.free])
            for type in self._problem.types
        }
        return [
            [
                () if stack.device is None else tuple(next(free[stack.device]) for _ in range(stack.width))
                for _ in range(number)
            ]
            for stack, number in zip(self._stacks, ranks, strict=True)
        ]

    def _ranks(self, cells: Cells) -> list[int]:
        """By stack: how many ranks `cells` have."""
        return [cells[home] * stack.ranks for stack, home in zip(self._stacks, self._home, strict=True)]

    def _anywhere(self, room: Room, ranks: Sequence[int]) -> list[Ranks] | None:
        """Places for the items of `_items`, wherever they may be."""
        items = self._items(ranks)
        board = Board(self._problem, room)
        return search(
            board, items, lambda number, start: _candidates(self._problem, board, items[number], start), STEPS
        )

    def _items(self, ranks: Sequence[int]) -> list[Item]:
        """What is placed at once: all ranks that have their slots to themselves, and each that shares one."""
        items: list[Item] = []
        for number, stack in enumerate(self._stacks):
            whole = stack.units == self._problem.unit
            if stack.width and ranks[number]:
                item = Item(number, ranks[number] if whole else 1, stack.width, stack.units)
                items += [item] if whole else [item] * ranks[number]
        # What has the fewest choices first, then the largest.
        return sorted(items, key=lambda i: (self._stacks[i.stack].only is None, -i.width * i.units, i.stack))

    def _by_stack(self, ranks: Sequence[int], chosen: Iterable[tuple[Item, Ranks]]) -> Packing:
        found: Packing = [
            [] if stack.width else [()] * number for stack, number in zip(self._stacks, ranks, strict=True)
        ]
        for item, places in sorted(chosen, key=lambda pair: pair[1]):
            found[item.stack] += places
        return found


def free_units(room: Room) -> dict[str, int]:
    """What is free in `room`, by type, in units of a slot."""
    found: dict[str, int] = {}
    for place in room.places:
        found[place.type] = found.get(place.type, 0) + place.free
    return found


def _candidates(problem: Problem, board: Board, item: Item, start: int) -> Iterator[Ranks]:
    """Where an item may be. Of places that can stand for each other only the first are tried."""
    shares = item.units < problem.unit
    kinds: dict[object, list[int]] = {}
    for at in board.usable(item, start):
        numa = board.places[at].numa if any(problem.isolated) else 0
        users = (board.free[at], *sorted(board.users[at])) if shares else ()
        kinds.setdefault((numa, board.lists[at], users), []).append(at)
    pools = list(kinds.values())
    if shares:
        # Where least is left.
        for at in sorted((pool[0] for pool in pools), key=lambda at: (board.free[at], at)):
            yield ((at,),)
        return
    for split in splits(item.ranks * item.width, [len(pool) for pool in pools]):
        places = sorted(at for pool, number in zip(pools, split, strict=True) for at in pool[:number])
        yield tuple(tuple(places[at : at + item.width]) for at in range(0, len(places), item.width))
