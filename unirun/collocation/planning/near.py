"""Slots that are near each other, for ranks that may have any: a preference, by which nothing fits less or more.

Three things are wished: that the slots of one rank are near each other, that those of a group of ranks are
(`per_group`), and that those of all ranks that a role has on a node are. Each is limited in turn, by the farthest two
slots: first all are as near as each could be by itself; then the limits are let go one step after the other, those of
roles before those of groups, and those of ranks at last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

from unirun.collocation.planning.board import Board, Item, Ranks, Room, search
from unirun.collocation.planning.pools import Counts, Pools, ground
from unirun.collocation.planning.problem import Problem
from unirun.collocation.slots import CPU

RANK, GROUP, ROLE = range(3)
"""The wishes, by the number of their limit."""

STEPS = 100
"""Steps that a search within some limits may take beside the one that each item needs."""


Far = tuple[int, int]
"""How far the farthest two slots of a rank of an item are from each other, and of all its slots."""


class Choice(NamedTuple):
    """Places for an item, the better the less.

    `cost` grows with how far all pairs are: within ranks first, then among them all, then to others of the stack.
    """

    cost: tuple[int, int, int]
    around: tuple[int, ...]
    places: Ranks
    far: Far


def near_items(problem: Problem, ranks: Sequence[int]) -> list[Item]:
    """What is placed at once when there are `ranks` of each stack: whole groups; of roles without groups all ranks."""
    items: list[Item] = []
    for number, stack in enumerate(problem.stacks):
        if not ranks[number] or not stack.width:
            continue
        whole = stack.units == problem.unit
        size, wish = 1, RANK
        if whole and stack.group > 1:
            size, wish = stack.group, GROUP
        elif whole and stack.width == 1 and stack.device != CPU:
            # Processes on CPUs may be anywhere: what is near each other shares caches and memory.
            size, wish = ranks[number], ROLE
        items += [Item(number, size, stack.width, stack.units, wish)] * (ranks[number] // size)

    def asked(item: Item) -> int:
        return item.units * item.width * (1 if item.wish == ROLE else item.ranks)

    # What has the fewest choices first, then the largest that has to be there at once.
    return sorted(items, key=lambda i: (problem.stacks[i.stack].only is None, -asked(i), i.stack))


class Near:
    """Finds places for `items` in a room."""

    def __init__(self, problem: Problem, room: Room, items: Sequence[Item]) -> None:
        self._board, self._items = Board(problem, room), items
        self._ground = {type: ground(steps, len(room.places)) for type, steps in room.steps.items()}
        # Of the stack of each item: the places that are still needed when its turn comes.
        self._needs = [
            sum(i.ranks * i.width for i in items[number:] if i.stack == item.stack)
            for number, item in enumerate(items)
        ]

    def search(self) -> list[Ranks] | None:
        """Places for each item, as near as can be found; None when none were found."""
        best: dict[Item, Far] = {}
        for number, item in enumerate(self._items):
            if item not in best:
                far = [choice.far for choice in self._choices(number, 0)]
                if not far:
                    return None
                best[item] = min(rank for rank, _ in far), min(whole for _, whole in far)
        for limits in self._limits(best):
            within = partial(self._within, dict(zip(best, limits, strict=True)))
            found = search(self._board, self._items, within, STEPS + len(self._items))
            if found is not None:
                return found
        return None

    def _limits(self, best: Mapping[Item, Far]) -> Iterable[tuple[Far, ...]]:
        """How far each item may be, in the order of `best`, which it may be in any case."""
        levels = sorted({level for item in best for level in self._ground[self._type(item)].levels})
        limits = [0, 0, 0]
        found = {tuple(best.values()): None}
        for wish, level in product((ROLE, GROUP, RANK), levels):
            limits[wish] = level
            allowed = (
                (max(rank, limits[RANK]), max(whole, limits[item.wish]))
                for item, (rank, whole) in best.items()
            )
            found[tuple(allowed)] = None
        return found

    def _within(self, limits: Mapping[Item, Far], number: int, start: int) -> Iterator[Ranks]:
        rank, whole = limits[self._items[number]]
        for choice in self._choices(number, start):
            if choice.far[0] <= rank and choice.far[1] <= whole:
                yield choice.places

    def _choices(self, number: int, start: int) -> list[Choice]:
        """Where an item may be, from the place `start` on, the best first."""
        item = self._items[number]
        usable = self._board.usable(item, start)
        single = item.width == 1 and item.wish == RANK
        return sorted(self._singles(item, usable) if single else self._sets(number, usable))

    def _singles(self, item: Item, usable: Sequence[int]) -> Iterator[Choice]:
        """A share goes where least is left, then near to the others of its stack; on CPUs where it comes first."""
        board = self._board
        kinds: dict[tuple[object, ...], int] = {}
        for at in usable:
            users = tuple(sorted(board.users[at]))
            kinds.setdefault((board.places[at].island, board.lists[at], board.free[at], users), at)
        away = self._away(item)
        for at in kinds.values():
            yield Choice((board.free[at], away.get(board.places[at].island, 0), 0), (), ((at,),), (0, 0))

    def _sets(self, number: int, usable: Sequence[int]) -> Iterator[Choice]:
        item, board = self._items[number], self._board
        kinds: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for at in usable:
            kinds.setdefault((board.places[at].island, board.lists[at]), []).append(at)
        pools = Pools(
            self._ground[self._type(item)],
            [island for island, _ in kinds],
            [len(kind) for kind in kinds.values()],
        )
        away = self._away(item)
        for counts in pools.sets(item.ranks * item.width):
            cost, parts = pools.divided(counts, item.width) if item.width > 1 else (0, (counts,))
            mates = sum(count * away.get(island, 0) for count, (island, _) in zip(counts, kinds, strict=True))
            yield Choice(
                (cost, pools.cost(counts), mates),
                # Ranks that may be anywhere come in the order of the slots, where it is all the same.
                () if item.wish == ROLE else pools.around(counts, self._needs[number]),
                _places(parts, list(kinds.values()), item.width),
                (max(map(pools.far, parts)) if item.width > 1 else 0, pools.far(counts)),
            )

    def _away(self, item: Item) -> Mapping[int, int]:
        """By island: how far a slot of it is from those that the stack of `item` has already."""
        mates = Counter(
            place.island
            for place, users in zip(self._board.places, self._board.users, strict=True)
            if item.stack in users
        )
        if not mates or self._type(item) == CPU:
            return {}
        return {
            island: sum(number * row[other] for other, number in mates.items())
            for island, row in enumerate(self._ground[self._type(item)].weights)
        }

    def _type(self, item: Item) -> str:
        return self._board.stacks[item.stack].device or ""


def _places(parts: Sequence[Counts], pools: Sequence[Sequence[int]], width: int) -> Ranks:
    """The first places of `pools`, as many of each as each of `parts` has, in ranks of `width`."""
    first = [iter(pool) for pool in pools]
    found = []
    for part in parts:
        places = sorted(next(turn) for turn, number in zip(first, part, strict=True) for _ in range(number))
        found += [tuple(places[at : at + width]) for at in range(0, len(places), width)]
    return tuple(sorted(found))
