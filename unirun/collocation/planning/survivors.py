"""What of a placement stands after a loss, in cells: where each is, and what it holds of its node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

from unirun.collocation.inventory import Node
from unirun.collocation.placement import Assignment, Placement
from unirun.collocation.planning.packing import Room
from unirun.collocation.planning.problem import Bundle, Cells, Problem
from unirun.collocation.planning.rooms import Rooms, Taken
from unirun.collocation.slots import CPU

Homes = tuple[tuple[str | None, ...], ...]
"""By bundle, and by the number of the cell: its node, None when the cell has no place."""


class Survivors:
    """The cells of `previous` that are whole, on `nodes` that are sound.

    A cell with a rank whose slots its node has no more, or with ranks on several nodes, does not stand.
    """

    def __init__(self, problem: Problem, previous: Placement, nodes: Sequence[Node]) -> None:
        self.problem = problem
        self.by_role: dict[str, list[Assignment]] = {
            role.name: [] for stack in problem.stacks for role in stack.roles
        }
        for each in previous.assignments:
            if each.role in self.by_role:
                self.by_role[each.role].append(each)
        for ranks in self.by_role.values():
            ranks.sort(key=attrgetter("rank"))
        self._nodes = {node.name: node for node in nodes}
        self._gone = self._without_slots()
        self.homes: Homes = tuple(self._homes(bundle) for bundle in problem.bundles)

    def _without_slots(self) -> frozenset[tuple[str, int]]:
        """The ranks whose devices are no longer among those of their nodes."""
        known: dict[str, frozenset[str]] = {}
        for name, node in self._nodes.items():
            known[name] = frozenset([device.index for device in node.devices])
        devices = {
            role.name: stack.device not in (None, CPU)
            for stack in self.problem.stacks
            for role in stack.roles
        }
        return frozenset(
            (name, each.rank)
            for name, ranks in self.by_role.items()
            if devices[name]
            for each in ranks
            if each.node in known and not known[each.node].issuperset(each.own)
        )

    def _homes(self, bundle: Bundle) -> tuple[str | None, ...]:
        columns = [self._column(role.name, stack.ranks) for stack in bundle.stacks for role in stack.roles]
        cells = min(len(column) for column in columns)
        if all(column == columns[0] for column in columns):
            return tuple(columns[0])
        return tuple(
            column[0] if all(node == column[0] for node in column) else None
            for column in zip(*(column[:cells] for column in columns), strict=True)
        )

    def _column(self, role: str, ranks: int) -> list[str | None]:
        """By cell: the sound node on which all its ranks of `role` are."""
        gone = {rank for name, rank in self._gone if name == role}
        nodes = [
            each.node if each.node in self._nodes and each.rank not in gone else None
            for each in self.by_role[role]
        ]
        if ranks == 1:
            return nodes
        cells = (nodes[at : at + ranks] for at in range(0, len(nodes) - ranks + 1, ranks))
        return [cell[0] if len(set(cell)) == 1 else None for cell in cells]

    def standing(self, homes: Homes) -> Cells:
        """How many cells of each bundle have a place."""
        return tuple(len(cells) - cells.count(None) for cells in homes)

    def rooms(self, rooms: Rooms, nodes: Sequence[Node], homes: Homes) -> list[Room]:
        """What `nodes` have left beside the cells at `homes`."""
        taken = self._taken(homes)
        held: dict[str, list[int]] = {}
        for bundle, cells in enumerate(homes):
            for node in cells:
                if node is not None:
                    if node not in held:
                        held[node] = [0] * len(homes)
                    held[node][bundle] += 1
        return [
            rooms.left(room, tuple(held[node.name]), taken.get(node.name, ())) if node.name in held else room
            for node, room in zip(nodes, rooms.of(nodes), strict=True)
        ]

    def _taken(self, homes: Homes) -> Mapping[str, Sequence[Taken]]:
        found: dict[str, list[Taken]] = {}
        number = 0
        for bundle, cells in zip(self.problem.bundles, homes, strict=True):
            for stack in bundle.stacks:
                if stack.device is not None:
                    # Collocated roles have the same slots: the first one's count for all.
                    ranks = self.by_role[stack.roles[0].name]
                    known: dict[tuple[str, ...], tuple[Taken, ...]] = {}
                    for cell, node in enumerate(cells):
                        if node is None:
                            continue
                        for each in ranks[cell * stack.ranks : (cell + 1) * stack.ranks]:
                            slots = known.get(each.own)
                            if slots is None:
                                slots = tuple(
                                    Taken(stack.device, index, number, stack.units) for index in each.own
                                )
                                known[each.own] = slots
                            if node in found:
                                found[node] += slots
                            else:
                                found[node] = [*slots]
                number += 1
        return found
