"""What fits on one node, and on which of its slots: a search over places, complete up to `STEPS`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from unirun.collocation.planning.problem import Cells, Problem, Stack

STEPS = 20_000
"""After so many steps a packing counts as impossible. Only a node with many shares of odd sizes gets there."""

LEVELS = (0, 1, 2)
"""What is tried in turn: whole groups near one NUMA node, then whole ranks, then anything."""


class Place(NamedTuple):
    """A slot of a node: `number` among those of its type, its index there (`name`), what is free, who has the rest."""

    type: str
    number: int
    name: str
    numa: int
    free: int
    users: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """What nodes of one kind have left. `held` are the cells that are there already and stay.

    Rooms are compared by identity: there are few, and they are asked for often.
    """

    places: tuple[Place, ...]
    held: Cells


class Item(NamedTuple):
    """Ranks of a stack that are placed at once: one, or a group. `near`: all its places are on one NUMA node."""

    stack: int
    places: int
    units: int
    near: bool


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
        return self._countable or self._search(room, cells, LEVELS[-1]) is not None

    def pack(self, room: Room, cells: Cells) -> Packing:
        """The places of `cells`, which fit: ranks, then groups, are near one NUMA node whenever all can be."""
        if self._countable and all(stack.width < 2 and stack.group == 1 for stack in self._stacks):
            return self._in_turn(room, cells)
        for level in LEVELS:
            found = self._search(room, cells, level)
            if found is not None:
                return found
        raise ValueError("these cells do not fit")

    def _in_turn(self, room: Room, cells: Cells) -> Packing:
        """One free slot after the other: all that it takes where a rank has one, and any will do."""
        free = {
            type: iter([at for at, p in enumerate(room.places) if p.type == type and p.free])
            for type in self._problem.types
        }
        return [
            [
                () if stack.device is None else (next(free[stack.device]),)
                for _ in range(stack.ranks * cells[home])
            ]
            for stack, home in zip(self._stacks, self._home, strict=True)
        ]

    def _search(self, room: Room, cells: Cells, level: int) -> Packing | None:
        items = self._items(cells, level)
        board = _Board(self._problem, self._stacks, room)
        # One iterator over the candidates of each item that is placed, instead of recursion: nodes may have a thousand.
        trail: list[Iterator[tuple[int, ...]]] = []
        chosen: list[tuple[int, ...]] = []
        steps = 0
        while len(chosen) < len(items):
            if len(trail) == len(chosen):
                item = items[len(chosen)]
                # Of equal items the later one has no earlier places, so no order of them is tried twice.
                same = bool(chosen) and items[len(chosen) - 1] == item
                trail.append(iter(board.candidates(item, chosen[-1][0] if same and item.places else 0)))
            steps += 1
            places = next(trail[-1], None) if steps <= STEPS else None
            if places is not None:
                board.take(items[len(chosen)], places)
                chosen.append(places)
                continue
            trail.pop()
            if not trail or steps > STEPS:
                return None
            board.give_back(items[len(chosen) - 1], chosen.pop())
        return self._by_stack(items, chosen)

    def _items(self, cells: Cells, level: int) -> list[Item]:
        items: list[Item] = []
        for number, stack in enumerate(self._stacks):
            ranks = cells[self._home[number]] * stack.ranks
            whole = stack.width > 0 and stack.units == self._problem.unit
            grouped = stack.group if level == 0 and whole else 1
            near = level < 2 and stack.width * grouped > 1
            items += [Item(number, stack.width * grouped, stack.units, near)] * (ranks // grouped)
        # What has the fewest choices first, then the largest.
        return sorted(
            items,
            key=lambda i: (self._stacks[i.stack].only is None, -i.places * i.units, i.stack),
        )

    def _by_stack(self, items: Sequence[Item], chosen: Sequence[tuple[int, ...]]) -> Packing:
        found: list[list[tuple[int, ...]]] = [[] for _ in self._stacks]
        for item, places in sorted(zip(items, chosen, strict=True), key=lambda pair: pair[1]):
            width = self._stacks[item.stack].width
            ranks = [places[at : at + width] for at in range(0, len(places), width)] if width else [()]
            found[item.stack] += ranks
        return found


def free_units(room: Room) -> dict[str, int]:
    """What is free in `room`, by type, in units of a slot."""
    found: dict[str, int] = {}
    for place in room.places:
        found[place.type] = found.get(place.type, 0) + place.free
    return found


class _Board:
    """The places of a room while items are put on them."""

    def __init__(self, problem: Problem, stacks: Sequence[Stack], room: Room) -> None:
        self._problem, self._stacks, self._places = problem, stacks, room.places
        self._free = [place.free for place in room.places]
        self._users = [dict.fromkeys(place.users, 1) for place in room.places]
        lists = [(number, stack.only) for number, stack in enumerate(stacks) if stack.only is not None]
        # Places of one kind can stand for each other, as long as as much is free of them and the same stacks use them.
        self._kinds = [
            (place.numa, tuple(number for number, only in lists if place.name in only))
            for place in room.places
        ]

    def take(self, item: Item, places: Sequence[int]) -> None:
        for place in places:
            self._free[place] -= item.units
            self._users[place][item.stack] = self._users[place].get(item.stack, 0) + 1

    def give_back(self, item: Item, places: Sequence[int]) -> None:
        for place in places:
            self._free[place] += item.units
            self._users[place][item.stack] -= 1
            if not self._users[place][item.stack]:
                del self._users[place][item.stack]

    def candidates(self, item: Item, start: int) -> list[tuple[int, ...]]:
        """Where `item` may be, the best first. Its first place is `start` or a later one."""
        if item.places == 0:
            return [()]
        stack = self._stacks[item.stack]
        foes = self._problem.isolated[item.stack]
        taken = self._numa_of(foes) if foes else frozenset()
        others = self._problem.distinct[item.stack]
        usable = [
            at
            for at, place in enumerate(self._places)
            if place.type == stack.device
            and self._free[at] >= item.units
            and (stack.only is None or place.name in stack.only)
            and place.numa not in taken
            and others.isdisjoint(self._users[at])
        ]
        if item.places == 1:
            return self._singles([at for at in usable if at >= start], item)
        return self._several(usable, item, start)

    def _numa_of(self, stacks: frozenset[int]) -> frozenset[int]:
        return frozenset(
            place.numa
            for place, users in zip(self._places, self._users, strict=True)
            if not stacks.isdisjoint(users)
        )

    def _singles(self, usable: Sequence[int], item: Item) -> list[tuple[int, ...]]:
        seen: dict[object, int] = {}
        for at in usable:
            kind = (self._kinds[at], self._free[at], tuple(sorted(self._users[at])))
            seen.setdefault(kind, at)
        # A share goes where least is left, a whole slot where it comes first.
        order = sorted(seen.values(), key=lambda at: (self._free[at], at))
        return [(at,) for at in order]

    def _several(self, usable: Sequence[int], item: Item, start: int) -> list[tuple[int, ...]]:
        kinds: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for at in usable:
            kinds.setdefault(self._kinds[at], []).append(at)
        pools = [kinds[kind] for kind in sorted(kinds)]
        room: dict[int, int] = {}
        for kind, pool in kinds.items():
            room[kind[0]] = room.get(kind[0], 0) + len(pool)
        if item.near:
            wholes = [numa for numa in sorted(room) if room[numa] >= item.places]
            parts = [[kinds[kind] for kind in sorted(kinds) if kind[0] == numa] for numa in wholes]
        else:
            parts = [pools]
        found = []
        for part in parts:
            for split in _splits(item.places, [len(pool) for pool in part]):
                places = [at for pool, number in zip(part, split, strict=True) for at in pool[:number]]
                chosen = tuple(sorted(places))
                numas = {self._places[at].numa for at in chosen}
                if chosen[0] >= start:
                    found.append((len(numas), sum(room[numa] for numa in numas), chosen))
        return [chosen for _, _, chosen in sorted(found)]


def _splits(total: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to take `total` from pools that have `limits`."""
    if sum(limits) < total:
        return
    *first, last = limits
    for head in product(*(range(min(limit, total), -1, -1) for limit in first)):
        if 0 <= total - sum(head) <= last:
            yield (*head, total - sum(head))
