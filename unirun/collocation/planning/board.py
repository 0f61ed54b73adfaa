"""The places of a node while ranks are put on them, and the search that does so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from unirun.collocation.planning.islands import Steps
from unirun.collocation.planning.problem import Cells, Problem
from unirun.values import Value


class Place(NamedTuple):
    """A slot of a node: `number` among those of its type, its index there (`name`), what is free, who has the rest.

    `island` says, with `Room.steps`, how near it is to the others of its type.
    """

    type: str
    number: int
    name: str
    numa: int
    island: int
    free: int
    users: frozenset[int] = frozenset()


class Room(Value, eq=False):
    """What nodes of one kind have left. `held` are the cells that are there already and stay.

    `steps` are by type of slot. Rooms are compared by identity: there are few, and they are asked for often.
    """

    places: tuple[Place, ...]
    steps: dict[str, Steps]
    held: Cells


class Item(NamedTuple):
    """`ranks` ranks of a stack that are placed at once, each on `width` places of which it takes `units`.

    `wish` says which of the limits of `near` holds for all their places.
    """

    stack: int
    ranks: int
    width: int
    units: int
    wish: int = 0


Ranks = tuple[tuple[int, ...], ...]
"""The places of each rank of an item, as positions in `Room.places`; ranks by their first place."""


class Board:
    """The places of a room: what is free of each, and which stacks use it."""

    def __init__(self, problem: Problem, room: Room) -> None:
        self._problem, self.stacks, self.places = problem, problem.stacks, room.places
        self.free = [place.free for place in room.places]
        self.users = [dict.fromkeys(place.users, 1) for place in room.places]
        lists = [(number, stack.only) for number, stack in enumerate(self.stacks) if stack.only is not None]
        self.lists = [tuple(number for number, only in lists if place.name in only) for place in room.places]
        """By place: the stacks that ask for it by name. Others should not take it where they have a choice."""

    def take(self, item: Item, ranks: Ranks) -> None:
        """Put `item` on these places."""
        for place in (place for rank in ranks for place in rank):
            self.free[place] -= item.units
            self.users[place][item.stack] = self.users[place].get(item.stack, 0) + 1

    def give_back(self, item: Item, ranks: Ranks) -> None:
        """Take `item` from these places, where it is."""
        for place in (place for rank in ranks for place in rank):
            self.free[place] += item.units
            self.users[place][item.stack] -= 1
            if not self.users[place][item.stack]:
                del self.users[place][item.stack]

    def usable(self, item: Item, start: int) -> list[int]:
        """Where a rank of `item` may be, from the place `start` on."""
        stack = self.stacks[item.stack]
        foes = self._problem.isolated[item.stack]
        taken = self._numa_of(foes) if foes else frozenset()
        others = self._problem.distinct[item.stack]
        return [
            at
            for at, place in enumerate(self.places[start:], start)
            if place.type == stack.device
            and self.free[at] >= item.units
            and (stack.only is None or place.name in stack.only)
            and place.numa not in taken
            and others.isdisjoint(self.users[at])
        ]

    def _numa_of(self, stacks: frozenset[int]) -> frozenset[int]:
        return frozenset(
            place.numa
            for place, users in zip(self.places, self.users, strict=True)
            if not stacks.isdisjoint(users)
        )


Candidates = Callable[[int, int], Iterable[Ranks]]
"""Where an item, by its number, may be, the best first; its first place is the given one or a later one."""


def search(board: Board, items: Sequence[Item], candidates: Candidates, most: int) -> list[Ranks] | None:
    """Places for all `items`, from the first candidates with which all find one; None when none are found.

    Looks at every combination, up to `most` steps. The board is left as it was.
    """
    # One iterator over the candidates of each item that is placed, instead of recursion: nodes may have a thousand.
    trail: list[Iterator[Ranks]] = []
    chosen: list[Ranks] = []
    for _ in range(most):
        if len(chosen) == len(items):
            break
        number = len(chosen)
        if len(trail) == number:
            # Of equal items the later one has no earlier places, so no order of them is tried twice.
            same = number > 0 and items[number - 1] == items[number]
            trail.append(iter(candidates(number, chosen[-1][0][0] if same else 0)))
        ranks = next(trail[-1], None)
        if ranks is not None:
            board.take(items[number], ranks)
            chosen.append(ranks)
            continue
        trail.pop()
        if not trail:
            return None
        board.give_back(items[number - 1], chosen.pop())
    for item, ranks in zip(
        items, chosen, strict=False
    ):  # all, or as many as were placed when the steps ended
        board.give_back(item, ranks)
    return chosen if len(chosen) == len(items) else None
