"""How near the slots of a node are to each other: told once for all slots that are alike in it.

Slots that are equally near to all others, and nearest to each other, are an *island*: of NVLink pairs each pair is one,
behind NVSwitch those of a NUMA node are one. How far two slots are from each other is then a small matrix of *steps*
between islands, of which a node has a few, however many slots it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from unirun.collocation.inventory import NEARNESS, Device
from unirun.collocation.slots import Slot

Steps = tuple[tuple[int, ...], ...]
"""By two islands: how far their slots are from each other, from 0, the nearest; of an island with itself, within it.

Even is on one NUMA node, odd is between two: of equally good links the one that stays on a NUMA node is nearer.
"""


class Islands(NamedTuple):
    """Of slots of one type: the island of each, by their order, and how far it is between islands."""

    of: tuple[int, ...]
    steps: Steps


def islands(slots: Sequence[Slot], devices: Sequence[Device]) -> Islands:
    """The islands of `slots`, in the order of their first slots. `devices` are theirs, in the same order; of CPUs none.

    Links of which the driver does not tell are as near as the NUMA nodes say.
    """
    if any(device.links for device in devices):
        return _by_links(slots, devices)
    numas = list(dict.fromkeys(slot.numa for slot in slots))
    number = {numa: island for island, numa in enumerate(numas)}
    steps = tuple(tuple(_step(_by_numa(a, b), a, b) for b in numas) for a in numas)
    return Islands(tuple(number[slot.numa] for slot in slots), steps)


def _by_links(slots: Sequence[Slot], devices: Sequence[Device]) -> Islands:
    rows = _rows(slots, devices)
    for at, row in enumerate(rows):
        # As far from itself as the nearest: so the rows of those that are nearest to each other can be equal.
        row[at] = min((step for other, step in enumerate(row) if other != at), default=0)
    kinds = [(slot.numa, *row) for slot, row in zip(slots, rows, strict=True)]
    number = {kind: island for island, kind in enumerate(dict.fromkeys(kinds))}
    first = [kinds.index(kind) for kind in number]
    steps = tuple(tuple(rows[one][other] for other in first) for one in first)
    return Islands(tuple(number[kind] for kind in kinds), steps)


def _rows(slots: Sequence[Slot], devices: Sequence[Device]) -> list[list[int]]:
    """How far each slot is from each; 0 from itself. Of what two devices say of each other, the nearer counts."""
    told: list[Mapping[str, str]] = [dict(device.links) for device in devices]
    rows = [[0] * len(slots) for _ in slots]
    for a, one in enumerate(slots):
        for b in range(a):
            other = slots[b]
            said = [near for near in (told[a].get(other.index), told[b].get(one.index)) if near in NEARNESS]
            near = min(said, key=NEARNESS.index, default=_by_numa(one.numa, other.numa))
            rows[a][b] = rows[b][a] = _step(near, one.numa, other.numa)
    return rows


def _by_numa(one: int, other: int) -> str:
    return "numa" if one == other else "system"


def _step(near: str, one: int, other: int) -> int:
    return 2 * NEARNESS.index(near) + (one != other)
