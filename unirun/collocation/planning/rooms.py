"""What the nodes of an inventory have for a problem: nodes that are alike have the same room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from unirun.collocation.inventory import Node
from unirun.collocation.planning.board import Place, Room
from unirun.collocation.planning.islands import Steps, islands
from unirun.collocation.planning.problem import Cells, Problem
from unirun.collocation.slots import CPU, number_of_slots, slots_of

_type = attrgetter("type")
_ALIKE = tuple(map(attrgetter, ("type", "index", "numa", "links")))


def devices_of(node: Node) -> tuple[object, ...]:
    """What the devices of a node are to the planner: the same where nodes are alike."""
    return tuple([tuple(map(each, node.devices)) for each in _ALIKE])


class Taken(NamedTuple):
    """A slot that is in use by a rank of a stack, and how much of it."""

    type: str
    name: str
    stack: int
    units: int


class Rooms:
    """Makes rooms, one for all nodes that are alike. `crowd` is how many processes a processor may have.

    With `counted`, a room has one place of each type with all that is free: enough where no more than numbers counts.
    """

    def __init__(self, problem: Problem, crowd: int, counted: bool = False) -> None:
        self._problem, self._crowd, self._counted = problem, crowd, counted
        self._empty: dict[object, Room] = {}
        self._used: dict[object, Room] = {}
        self._none: Cells = (0,) * len(problem.bundles)

    def of(self, nodes: Iterable[Node]) -> list[Room]:
        """The rooms of empty `nodes`, in their order."""
        accelerators = any(type != CPU for type in self._problem.types)
        cpus = CPU in self._problem.types
        found: list[Room] = []
        before: Node | None = None
        last: object = None
        room: Room | None = None
        for node in nodes:
            if node is before and room is not None:
                found.append(room)
                continue
            # Node after node is alike mostly, and to see that is less work than to look it up.
            before, kind = (
                node,
                (devices_of(node) if accelerators else (), (node.cpus, node.numa) if cpus else ()),
            )
            if kind != last:
                last, room = kind, self._empty.get(kind)
            if room is None:
                room = self._empty[kind] = self._empty_room(node)
            found.append(room)
        return found

    def _empty_room(self, node: Node) -> Room:
        if self._counted:
            counts = zip(self._problem.types, self._units(node), strict=True)
            return Room(tuple(Place(type, 0, "", 0, 0, units) for type, units in counts), {}, self._none)
        places: list[Place] = []
        steps: dict[str, Steps] = {}
        for type in self._problem.types:
            slots = slots_of(node, type, self._crowd)
            of, steps[type] = islands(slots, [device for device in node.devices if device.type == type])
            places += [
                Place(type, number, slot.index, slot.numa, island, self._problem.unit)
                for number, (slot, island) in enumerate(zip(slots, of, strict=True))
            ]
        return Room(tuple(places), steps, self._none)

    def units(self, nodes: Iterable[Node]) -> list[tuple[int, ...]]:
        """What empty `nodes` have of each type of slots, in the order of `Problem.types`: far less work than rooms."""
        found = []
        known: dict[object, tuple[int, ...]] = {}
        for node in nodes:
            kind = (tuple(map(_type, node.devices)), len(node.cpus))
            units = known.get(kind)
            if units is None:
                units = known[kind] = self._units(node)
            found.append(units)
        return found

    def _units(self, node: Node) -> tuple[int, ...]:
        return tuple(
            self._problem.unit * number_of_slots(node, type, self._crowd) for type in self._problem.types
        )

    def left(self, room: Room, held: Cells, taken: Sequence[Taken]) -> Room:
        """`room`, when the cells `held` are there, on the slots `taken`."""
        if not any(held):
            return room
        kind = (room, held, tuple(taken))
        left = self._used.get(kind)
        if left is None:
            left = self._used[kind] = Room(tuple(_less(room.places, taken)), room.steps, held)
        return left

    def full(self, held: Cells) -> Room:
        """A room in which nothing is left beside the cells `held`."""
        return self._used.setdefault(held, Room((), {}, held))


def _less(places: Iterable[Place], taken: Iterable[Taken]) -> Iterator[Place]:
    use: dict[tuple[str, str], list[Taken]] = {}
    for each in taken:
        use.setdefault((each.type, each.name), []).append(each)
    for place in places:
        here = use.get((place.type, place.name), ())
        free = place.free - sum(each.units for each in here)
        yield place._replace(free=free, users=frozenset(each.stack for each in here))
