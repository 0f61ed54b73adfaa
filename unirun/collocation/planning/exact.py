"""The best cells for every node, by dynamic programming over the nodes: complete, where there is little to place.

The state after some nodes is how many cells of each bundle are left; merit is a sum over nodes, so of all ways to a
state only the best counts. The work is (states) × (nodes) × (what fits on one node), which is small for a handful of
ranks and out of reach for thousands: `choices` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from unirun.collocation.planning.board import Room
from unirun.collocation.planning.packing import Packer
from unirun.collocation.planning.problem import Cells

WORK = 150_000
"""Steps that a search may take: a third of a second or less."""

Choices = Mapping[Room, Sequence[Cells]]
"""By kind of node: all that fits on it."""


def choices(packer: Packer, rooms: Sequence[Room], counts: Cells) -> Choices | None:
    """What fits on each kind of node, or None when a complete search would take more than `WORK` steps."""
    states = prod(count + 1 for count in counts)
    limit = WORK // (states * max(len(rooms), 1))
    found: dict[Room, list[Cells]] = {}
    steps = 0
    for room in rooms:
        if room not in found:
            fitting = _fitting(packer, room, counts, limit)
            if fitting is None:
                return None
            found[room] = fitting
        steps += len(found[room]) * states
        if steps > WORK:
            return None
    return found


def _fitting(packer: Packer, room: Room, counts: Cells, limit: int) -> list[Cells] | None:
    """All cells that fit into `room`. What does not fit does not fit with more either."""
    found: list[Cells] = [(0,) * len(counts)]
    for bundle, count in enumerate(counts):
        for base in tuple(found):
            for number in range(1, count + 1):
                cells = (*base[:bundle], number, *base[bundle + 1 :])
                if not packer.fits(room, cells):
                    break
                found.append(cells)
                if len(found) > limit:
                    return None
    return found


def reachable(rooms: Sequence[Room], choices: Choices, counts: Cells) -> frozenset[Cells]:
    """All numbers of cells, up to `counts`, that can be placed."""
    last = _layers(rooms, choices, counts, lambda _room, _cells: 0, 1)[-1]
    return frozenset(
        tuple(c - left for c, left in zip(counts, _decode(state, counts), strict=True)) for state in last
    )


def best(
    rooms: Sequence[Room], choices: Choices, counts: Cells, value: Callable[[Room, Cells], int], places: int
) -> list[Cells] | None:
    """For each node its cells, `counts` in all, with the most merit; None when there is no way to place them.

    Of equals the one whose cells are on earlier nodes; `places` is more than any sum of nodes' numbers over cells.
    """
    layers = _layers(rooms, choices, counts, value, places)
    found: list[Cells] = []
    state = 0
    if state not in layers[-1]:
        return None
    for layer in reversed(layers[1:]):
        _, state, cells = layer[state]
        found.append(cells)
    return found[::-1]


Layer = dict[int, tuple[int, int, Cells]]
"""By state: the most merit with which it is reached, from which state, and by which cells on the last node."""


def _layers(
    rooms: Sequence[Room], choices: Choices, counts: Cells, value: Callable[[Room, Cells], int], places: int
) -> list[Layer]:
    # A state is one integer: the cells left of each bundle in a field of bits, with a guard bit above it. Cells are
    # subtracted from all fields at once, and a guard that is gone says that more were taken than were left.
    guards = _encode(tuple(1 << count.bit_length() for count in counts), counts)
    worth = {
        room: [(_encode(cells, counts), sum(cells), value(room, cells) * places, cells) for cells in fitting]
        for room, fitting in choices.items()
    }
    none = (0,) * len(counts)
    layers: list[Layer] = [{_encode(counts, counts): (0, 0, none)}]
    for number, room in enumerate(rooms):
        layer: Layer = {}
        for state, (merit, _, _) in layers[-1].items():
            guarded = state | guards
            for code, size, gain, cells in worth[room]:
                left = guarded - code
                if left & guards != guards:
                    continue
                left ^= guards
                after = merit + gain - number * size
                known = layer.get(left)
                if known is None or known[0] < after:
                    layer[left] = (after, state, cells)
        layers.append(layer)
    return layers


def _encode(cells: Cells, counts: Cells) -> int:
    code = shift = 0
    for number, count in zip(cells, counts, strict=True):
        code |= number << shift
        shift += count.bit_length() + 1
    return code


def _decode(state: int, counts: Cells) -> Cells:
    found = []
    for count in counts:
        bits = count.bit_length() + 1
        found.append(state & ((1 << bits) - 1))
        state >>= bits
    return tuple(found)
