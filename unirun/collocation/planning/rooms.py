"""What the nodes of an inventory have for a problem: nodes that are alike have the same room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from unirun.collocation.inventory import Node
from unirun.collocation.planning.packing import Place, Room
from unirun.collocation.planning.problem import Cells, Problem
from unirun.collocation.slots import CPU, slots_of

_alike = attrgetter("type", "index", "numa")


class Taken(NamedTuple):
    """A slot that is in use by a rank of a stack, and how much of it."""

    type: str
    name: str
    stack: int
    units: int


class Rooms:
    """Makes rooms, one for all nodes that are alike. `crowd` is how many processes a processor may have."""

    def __init__(self, problem: Problem, crowd: int) -> None:
        self._problem, self._crowd = problem, crowd
        self._empty: dict[object, Room] = {}
        self._used: dict[object, Room] = {}
        self._none: Cells = (0,) * len(problem.bundles)

    def of(self, nodes: Iterable[Node]) -> list[Room]:
        """The rooms of empty `nodes`, in their order."""
        accelerators = any(type != CPU for type in self._problem.types)
        cpus = CPU in self._problem.types
        found = []
        for node in nodes:
            devices = tuple(map(_alike, node.devices)) if accelerators else ()
            kind = (devices, (node.cpus, node.numa) if cpus else ())
            room = self._empty.get(kind)
            if room is None:
                room = self._empty[kind] = Room(self._places(node), self._none)
            found.append(room)
        return found

    def _places(self, node: Node) -> tuple[Place, ...]:
        return tuple(
            Place(type, number, slot.index, slot.numa, self._problem.unit)
            for type in self._problem.types
            for number, slot in enumerate(slots_of(node, type, self._crowd))
        )

    def left(self, room: Room, held: Cells, taken: Sequence[Taken] | None) -> Room:
        """`room`, when the cells `held` are there, on the slots `taken`; with None, there is nothing left of it."""
        if not any(held):
            return room
        kind = (room, held, None if taken is None else tuple(taken))
        left = self._used.get(kind)
        if left is None:
            places = () if taken is None else tuple(_less(room.places, taken))
            left = self._used[kind] = Room(places, held)
        return left


def _less(places: Iterable[Place], taken: Iterable[Taken]) -> Iterator[Place]:
    use: dict[tuple[str, str], list[Taken]] = {}
    for each in taken:
        use.setdefault((each.type, each.name), []).append(each)
    for place in places:
        here = use.get((place.type, place.name), ())
        free = place.free - sum(each.units for each in here)
        yield place._replace(free=free, users=frozenset(each.stack for each in here))
