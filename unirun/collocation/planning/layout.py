"""From cells on nodes to ranks on slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from unirun.collocation.placement import Assignment
from unirun.collocation.planning.board import Room
from unirun.collocation.planning.packing import Packer
from unirun.collocation.planning.problem import Cells, Problem
from unirun.collocation.slots import CPU

Before = Mapping[str, Sequence[tuple[str, ...]]]
"""By role: the devices of each of its ranks that a node has already, by their local ranks."""


class Seat(NamedTuple):
    """What a rank gets that a node's cells put there. Cell `cell` of those on the node, rank `rank` of the cell."""

    cell: int
    rank: int
    slot: int
    local_rank: int
    devices: tuple[str, ...] | None
    own: tuple[str, ...]
    share: float
    numa: int


class Seats(NamedTuple):
    """The seats of one role on a node. A cell of its bundle has `ranks` of them."""

    role: str
    bundle: int
    ranks: int
    seats: tuple[Seat, ...]


def seating(
    problem: Problem, packer: Packer, room: Room, cells: Cells, before: Before | None = None
) -> list[Seats]:
    """Who gets which slots on a node with `room` that gets `cells`. Ranks are in the order of their slots."""
    packing = packer.pack(room, cells)
    found = []
    number = 0
    for bundle, each in enumerate(problem.bundles):
        for stack in each.stacks:
            if cells[bundle]:
                for role in stack.roles:
                    there = (before or {}).get(role.name, ())
                    seats = _seats(room, packing[number], stack.ranks, stack.device, stack.share(role), there)
                    found.append(Seats(role.name, bundle, stack.ranks, tuple(seats)))
            number += 1
    return found


def _seats(
    room: Room,
    places: Sequence[tuple[int, ...]],
    ranks: int,
    device: str | None,
    share: float,
    before: Sequence[tuple[str, ...]],
) -> Iterator[Seat]:
    owns = [tuple(room.places[at].name for at in each) for each in places]
    mask: tuple[str, ...] | None = None
    masked = device not in (None, CPU)
    if masked:
        devices = tuple(index for own in (*before, *owns) for index in own)
        # With one device per rank, cuda:{LOCAL_RANK} names the rank's own among all of its role's.
        if len(devices) == len(set(devices)) == len(before) + len(owns):
            mask = devices
    for number, (own, at) in enumerate(zip(owns, places, strict=True)):
        numas = {room.places[each].numa for each in at}
        yield Seat(
            number // ranks,
            number % ranks,
            room.places[at[0]].number if at else -1,
            len(before) + number,
            (mask or own) if masked else None,
            own,
            share,
            numas.pop() if len(numas) == 1 else -1,
        )


def seated(role: str, rank: int, node: str, seat: Seat) -> Assignment:
    """`role:rank` on a seat of `node`."""
    _, _, slot, local_rank, devices, own, share, numa = seat
    return Assignment(role, rank, node, slot, local_rank, devices, None, own, share, numa)


def assign(
    problem: Problem, packer: Packer, nodes: Sequence[str], rooms: Sequence[Room], placed: Sequence[Cells]
) -> dict[str, list[Assignment]]:
    """By role, in the order of the nodes, every rank's place. Cells are numbered through the nodes."""
    found: dict[str, list[Assignment]] = {role.name: [] for stack in problem.stacks for role in stack.roles}
    known: dict[tuple[Room, Cells], list[Seats]] = {}
    first = [0] * len(problem.bundles)
    for node, room, cells in zip(nodes, rooms, placed, strict=True):
        if not any(cells):
            continue
        kind = (room, cells)
        template = known.get(kind)
        if template is None:
            template = known[kind] = seating(problem, packer, room, cells)
        for role, bundle, ranks, seats in template:
            base = first[bundle]
            add = found[role].append
            for seat in seats:
                add(seated(role, (base + seat.cell) * ranks + seat.rank, node, seat))
        first = [start + number for start, number in zip(first, cells, strict=True)]
    return found
