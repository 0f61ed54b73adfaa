"""What of a placement stands after a loss, in cells: where each is, and what it holds of its node.

A hundred thousand ranks stand where a few move: whole columns of them are looked at, and single ones where it matters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, groupby, repeat
from operator import attrgetter

from unirun.collocation.inventory import Node
from unirun.collocation.placement import Assignment, Placement
from unirun.collocation.planning.board import Room
from unirun.collocation.planning.problem import Bundle, Cells, Problem
from unirun.collocation.planning.rooms import Rooms, Taken
from unirun.collocation.slots import CPU

Homes = tuple[Sequence[str | None], ...]
"""By bundle, and by the number of the cell: its node, None when the cell has no place."""

_node = attrgetter("node")
_own = attrgetter("own")
_index = attrgetter("index")


class Survivors:
    """The cells of `previous` that are whole, on `nodes` that are sound.

    A cell with a rank whose slots its node has no more, or with ranks on several nodes, does not stand.
    """

    def __init__(self, problem: Problem, previous: Placement, nodes: Sequence[Node]) -> None:
        self.problem = problem
        self.by_role: dict[str, list[Assignment]] = {
            role.name: [] for stack in problem.stacks for role in stack.roles
        }
        for name, ranks in groupby(previous.assignments, attrgetter("role")):
            if name in self.by_role:
                self.by_role[name] += ranks
        for each in self.by_role.values():
            each.sort(key=attrgetter("rank"))
        self.names = frozenset(node.name for node in nodes)
        gone = self._without_slots(nodes)
        self.homes: Homes = tuple(self._homes(bundle, gone) for bundle in problem.bundles)

    def _without_slots(self, nodes: Sequence[Node]) -> frozenset[tuple[str, int]]:
        """The ranks whose devices are no longer among those of their nodes."""
        alike: dict[tuple[str, ...], frozenset[str]] = {}
        devices: dict[str, frozenset[str]] = {}
        for node in nodes:
            names = tuple(map(_index, node.devices))
            devices[node.name] = alike[names] if names in alike else alike.setdefault(names, frozenset(names))
        everywhere = frozenset[str]().union(*alike.values()).intersection(*alike.values())
        found: set[tuple[str, int]] = set()
        for stack in self.problem.stacks:
            if stack.device in (None, CPU):
                continue
            # Collocated roles have the same slots: the first one's count for all.
            name = stack.roles[0].name
            ranks = self.by_role[name]
            if everywhere.issuperset(chain.from_iterable(set(map(_own, ranks)))):
                # What every node has is there, wherever a rank is.
                continue
            kinds = set(zip(map(devices.get, map(_node, ranks)), map(_own, ranks), strict=True))
            if any(there is not None and not there.issuperset(own) for there, own in kinds):
                gone = (a.rank for a in ranks if not devices.get(a.node, {*a.own}).issuperset(a.own))
                found |= {(name, rank) for rank in gone}
        return frozenset(found)

    def _homes(self, bundle: Bundle, gone: Collection[tuple[str, int]]) -> Sequence[str | None]:
        columns = [
            self._column(role.name, stack.ranks, gone) for stack in bundle.stacks for role in stack.roles
        ]
        first = columns[0]
        if any(column != first for column in columns):
            first = [
                cell[0] if len(set(cell)) == 1 else None
                for cell in zip(*columns, strict=False)  # a role that lacks ranks has fewer whole cells
            ]
        return [node if node in self.names else None for node in first]

    def _column(self, role: str, ranks: int, gone: Collection[tuple[str, int]]) -> list[str | None]:
        """By cell: the node on which all its ranks of `role` are."""
        nodes: list[str | None] = list(map(_node, self.by_role[role]))
        if gone:
            nodes = [None if (role, rank) in gone else node for rank, node in enumerate(nodes)]
        if ranks == 1:
            return nodes
        cells = (nodes[at : at + ranks] for at in range(0, len(nodes) - ranks + 1, ranks))
        return [cell[0] if len(set(cell)) == 1 else None for cell in cells]

    def rooms(self, rooms: Rooms, nodes: Sequence[Node], homes: Homes, wanted: Collection[int]) -> list[Room]:
        """What `nodes` have left beside the cells at `homes`, for cells of the bundles `wanted`.

        Of a node that is too full for any of them nothing is left, whichever slots are free.
        """
        counts = [Counter(cells) for cells in homes]
        names = [node.name for node in nodes]
        helds: Iterable[Cells] = zip(*(map(count.get, names, repeat(0)) for count in counts), strict=True)
        kinds = list(zip(rooms.units(nodes), helds, strict=True))
        full = {
            (units, held): rooms.full(held)
            for units, held in set(kinds)
            if not _may_have(self.problem, units, held, wanted)
        }
        found = list(map(full.get, kinds))
        open_: dict[str, list[Taken]] = {
            name: [] for name, room in zip(names, found, strict=True) if room is None
        }
        self._take(homes, open_)
        empty = iter(rooms.of(node for node in nodes if node.name in open_))
        return [
            room or rooms.left(next(empty), held, open_[name])
            for name, room, (_, held) in zip(names, found, kinds, strict=True)
        ]

    def _take(self, homes: Homes, open_: Mapping[str, list[Taken]]) -> None:
        """Add to the nodes `open_` what the cells at `homes` have of them."""
        number = 0
        for bundle, cells in zip(self.problem.bundles, homes, strict=True):
            here = [(cell, node) for cell, node in enumerate(cells) if node in open_]
            for stack in bundle.stacks:
                ranks = self.by_role[stack.roles[0].name]
                for cell, node in here:
                    for each in ranks[cell * stack.ranks : (cell + 1) * stack.ranks]:
                        if stack.device is not None and node is not None:
                            open_[node] += [
                                Taken(stack.device, name, number, stack.units) for name in each.own
                            ]
                number += 1


def _may_have(problem: Problem, units: Sequence[int], held: Cells, wanted: Collection[int]) -> bool:
    """Whether a node that has `units` of each type, and `held` of them in use, has enough left for a cell."""
    demands = [bundle.demand() for bundle in problem.bundles]
    left = {
        type: there - sum(number * demand.get(type, 0) for number, demand in zip(held, demands, strict=True))
        for type, there in zip(problem.types, units, strict=True)
    }
    return any(all(left[type] >= need for type, need in demands[bundle].items()) for bundle in wanted)
