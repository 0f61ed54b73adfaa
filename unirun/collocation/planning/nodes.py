"""Node kinds: the free slots of nodes and their distances, computed once for all nodes that are alike.

Slots that are equally near to all others, and nearest to each other, form an
*island*: each pair of an NVLink bridge is one, and so are the GPUs of a NUMA node behind NVSwitch. The distance of two
slots is then a lookup in a small matrix, as a node has few islands, however many slots it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from unirun.collocation.inventory import (
    CPU,
    NEARNESS,
    Assignment,
    Device,
    Node,
    Slot,
    number_of_slots,
    slots_of,
)
from unirun.collocation.planning.problem import Cells, Problem
from unirun.values import Value

Distances = tuple[tuple[int, ...], ...]
"""By two islands: the distance of a slot of the one from a slot of the other, 0 for the nearest.

It is twice the index in `NEARNESS`, plus 1 for slots of two NUMA nodes: of equal links, one within a NUMA node is
nearer. The diagonal is the distance of two slots of one island.
"""

_DEVICE = tuple(map(attrgetter, ("type", "index", "numa", "links")))


class KindSlot(NamedTuple):
    """A slot of a kind: `number` among those of its type on the node, `free` units, and the stacks that use the others.

    `name` is its index on the node where a role asks for devices by index, and empty otherwise.
    """

    type: str
    number: int
    name: str
    numa: int
    island: int
    free: int
    users: frozenset[int] = frozenset()


class NodeKind(Value, eq=False, dict=True, gc=True):
    """The free slots of nodes of one kind. `held` are the cells that are there already and stay.

    `distances` are by type of slot. Kinds are compared by identity, because they are keys of many lookups.
    """

    slots: tuple[KindSlot, ...]
    distances: dict[str, Distances]
    held: Cells
    component: int = 0

    @cached_property
    def free(self) -> Counter[str]:
        """The free units, by type of slot."""
        found: Counter[str] = Counter()
        for slot in self.slots:
            found[slot.type] += slot.free
        return found

    @cached_property
    def shape(self) -> object:
        """Equal for kinds on which the same cells fit, however near each other their slots are."""
        slots = sorted((s.type, s.numa, s.name, s.free, tuple(sorted(s.users))) for s in self.slots)
        return self.held, self.component, tuple(slots)


class Kinds:
    """Finds the kinds of nodes. Each processor counts as `per_processor` slots."""

    def __init__(self, problem: Problem, per_processor: int) -> None:
        self._problem, self._per_processor = problem, per_processor
        self._named = any(stack.only is not None for stack in problem.stacks)
        self._known: dict[object, NodeKind] = {}
        self._none: Cells = (0,) * len(problem.bundles)

    def of(self, nodes: Sequence[Node]) -> list[NodeKind]:
        """The kinds of empty `nodes`, in their order."""
        devices = any(type != CPU for type in self._problem.types)
        cpus = CPU in self._problem.types

        def key(node: Node) -> object:
            return node.component, described(node) if devices else (), (node.cpus, node.numa) if cpus else ()

        found: dict[int, NodeKind] = {}
        # Explanations repeat one node for all that are alike. Neighbours mostly are, and a comparison is fast.
        for same, group in groupby({id(node): node for node in nodes}.values(), key):
            alike = list(group)
            kind = self._known.get(same)
            if kind is None:
                kind = self._known[same] = self._empty(alike[0])
            found |= {id(node): kind for node in alike}
        return [found[id(node)] for node in nodes]

    def _empty(self, node: Node) -> NodeKind:
        found: list[KindSlot] = []
        distances: dict[str, Distances] = {}
        for type in self._problem.types:
            slots = slots_of(node, type, self._per_processor)
            devices = [device for device in node.devices if device.type == type]
            of, distances[type] = _islands(slots, devices)
            found += [
                KindSlot(
                    type, number, slot.index if self._named else "", slot.numa, island, self._problem.unit
                )
                for number, (slot, island) in enumerate(zip(slots, of, strict=True))
            ]
        # Devices may have names of their own on each node, as with masks by UUID: these nodes are of one kind.
        same = (tuple(found), tuple(distances.values()), node.component)
        return self._known.setdefault(same, NodeKind(same[0], distances, self._none, node.component))

    def units(self, node: Node) -> Counter[str]:
        """The units that empty `node` has, by type of slot: far less work than its kind."""
        unit = self._problem.unit
        return Counter(
            {type: unit * number_of_slots(node, type, self._per_processor) for type in self._problem.types}
        )

    def left(
        self, node: Node, kind: NodeKind, held: Cells, taken: Sequence[tuple[int, Assignment]]
    ) -> NodeKind:
        """The kind of `node`, empty of `kind`, when it has the cells `held`: ranks `taken`, each with its stack."""
        if not any(held):
            return kind
        stacks = self._problem.stacks
        users: dict[tuple[str | None, str], list[int]] = {}
        for stack, each in taken:
            for name in each.own:
                users.setdefault((stacks[stack].device, name), []).append(stack)
        slots = []
        for slot, name in zip(kind.slots, names_of(node, kind), strict=True):
            here = users.get((slot.type, name), ())
            free = slot.free - sum(stacks[stack].units for stack in here)
            slots.append(slot._replace(free=free, users=frozenset(here)))
        same = (kind, held, tuple(slots))
        return self._known.setdefault(same, NodeKind(same[2], kind.distances, held, kind.component))

    def full(self, held: Cells, component: int) -> NodeKind:
        """A kind of a component with nothing left beside the cells `held`."""
        return self._known.setdefault((held, component), NodeKind((), {}, held, component))


def described(node: Node) -> tuple[object, ...]:
    """The devices of `node` as far as they matter to the planner; equal for nodes that are alike."""
    return tuple([tuple(map(each, node.devices)) for each in _DEVICE])


def names_of(node: Node, kind: NodeKind) -> tuple[str, ...]:
    """The index of each slot of `kind` on `node`, as device masks have it."""
    names: dict[str, list[str]] = {}
    for device in node.devices:
        names.setdefault(device.type, []).append(device.index)
    return tuple(str(p.number) if p.type == CPU else names[p.type][p.number] for p in kind.slots)


def _islands(slots: Sequence[Slot], devices: Sequence[Device]) -> tuple[Sequence[int], Distances]:
    """The island of each slot, and the distances. `devices` are those of `slots`, in the same order; none for CPUs.

    Where the driver reports no link, the distance follows from the NUMA nodes.
    """
    told = [dict(device.links) for device in devices]
    numas = [slot.numa for slot in slots]

    def distance(one: int, other: int) -> int:
        same = numas[one] == numas[other]
        said = [told[a].get(devices[b].index) for a, b in ((one, other), (other, one)) if told]
        # Each device reports its link to the other one; the nearer counts.
        near = min((NEARNESS.index(each) for each in said if each in NEARNESS), default=None)
        return 2 * (NEARNESS.index("numa" if same else "system") if near is None else near) + (not same)

    kinds: list[object] = [*numas]
    rows: list[list[int]] = []
    if any(told):
        every = range(len(slots))
        rows = [[distance(one, other) for other in every] for one in every]
        for at, row in enumerate(rows):
            # As far from itself as from its nearest: then the rows of slots of one island are equal.
            row[at] = min((far for other, far in enumerate(row) if other != at), default=0)
        kinds = [(numa, *row) for numa, row in zip(numas, rows, strict=True)]
    number = {kind: island for island, kind in enumerate(dict.fromkeys(kinds))}
    first = [kinds.index(kind) for kind in number]
    distances = tuple(
        tuple(rows[one][other] if rows else distance(one, other) for other in first) for one in first
    )
    return [number[kind] for kind in kinds], distances
