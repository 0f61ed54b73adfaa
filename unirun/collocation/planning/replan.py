"""`replan`: a placement after nodes were lost, in which whoever need not move stays."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple, TypeVar, cast

from msgspec.structs import replace

from unirun.collocation.inventory import Inventory, Node
from unirun.collocation.placement import Assignment, Placement
from unirun.collocation.planning.board import Room
from unirun.collocation.planning.layout import Before, seated, seating
from unirun.collocation.planning.packing import Packer
from unirun.collocation.planning.plan import checked, crossing, in_order, note
from unirun.collocation.planning.problem import Bundle, Cells, Problem
from unirun.collocation.planning.rooms import Rooms
from unirun.collocation.planning.solve import bounds, crowds, most_cells, place
from unirun.collocation.planning.survivors import Homes, Survivors
from unirun.collocation.request import Request

T = TypeVar("T")

RELEASES = 4_000
"""How many nodes are looked at while it is searched which survivors have to move: (sets of them) × (nodes)."""


class Moved(NamedTuple):
    """Where the cells go that need a place, and where the others stay."""

    homes: Homes
    nodes: Sequence[Node]
    rooms: Sequence[Room]
    placed: Sequence[Cells]


def replan(request: Request, inventory: Inventory, previous: Placement, lost: frozenset[str]) -> Placement:
    """`previous`, a placement of this `request`, without the nodes `lost`.

    Ranks of lost nodes, of tainted ones, and on devices that are gone, move: to the spares if these have room for all,
    else to whatever is free. The others keep their nodes and slots, unless there is no other way; then those move that
    have the fewest ranks, as far as sets of them can be tried (`RELEASES`), else all of one node, of two, of four, and
    so on. Ranks that have to be on one node move together. Roles with a least number of ranks rather shrink than that a
    survivor moves; then the highest ranks that survive take the numbers that are missing, and stay where they are. A
    survivor keeps its local rank and mask when others join it. Raises `PlacementError` as `plan` does.
    """
    problem = checked(request)
    packer = Packer(problem)
    nodes = [node for node in inventory.nodes if node.name not in lost and node.name not in request.tainted]
    survivors = Survivors(problem, previous, nodes)
    # Spares first, so that of equal places theirs is taken.
    spares = frozenset(previous.spares)
    nodes.sort(key=lambda node: node.name not in spares)
    for homes in _stays(survivors, nodes):
        moved = _move(problem, packer, survivors, homes, nodes, spares)
        if moved is not None:
            return _result(request, problem, packer, survivors, moved, inventory)
    left = tuple(node for node in inventory.nodes if node.name not in lost)
    # Slow to import, and needed only when nothing fits.
    from unirun.collocation.planning.shortage import does_not_fit

    raise does_not_fit(replace(request, spares=0), Inventory(left))


def _stays(survivors: Survivors, nodes: Sequence[Node]) -> Iterator[Homes]:
    """Who may stay where, from all survivors to none; the sets of those who move have ever more ranks."""
    homes = survivors.homes
    yield homes
    bundles = survivors.problem.bundles
    cells = sorted(
        (bundles[bundle].ranks, bundle, -cell)
        for bundle, places in enumerate(homes)
        for cell, node in enumerate(places)
        if node is not None
    )
    tries = RELEASES // max(len(nodes), 1)
    heap: list[tuple[int, tuple[int, ...]]] = [(each[0], (number,)) for number, each in enumerate(cells)]
    while heap and tries:
        ranks, released = heappop(heap)
        yield _without(homes, {(cells[at][1], -cells[at][2]) for at in released})
        tries -= 1
        for further in range(released[-1] + 1, len(cells)):
            heappush(heap, (ranks + cells[further][0], (*released, further)))
    if heap:
        used = list(dict.fromkeys(node.name for node in nodes[::-1]))
        number = 1
        while number < 2 * len(used):
            gone = frozenset(used[:number])
            yield tuple(tuple(None if node in gone else node for node in places) for places in homes)
            number *= 2


def _without(homes: Homes, released: set[tuple[int, int]]) -> Homes:
    return tuple(
        tuple(None if (bundle, cell) in released else node for cell, node in enumerate(places))
        for bundle, places in enumerate(homes)
    )


def _move(
    problem: Problem,
    packer: Packer,
    survivors: Survivors,
    homes: Homes,
    nodes: Sequence[Node],
    spares: frozenset[str],
) -> Moved | None:
    """Places for the cells without one, when the others stay at `homes`."""
    held = tuple(len(cells) - cells.count(None) for cells in homes)
    least, most = (
        tuple(max(bound - there, 0) for bound, there in zip(each, held, strict=True))
        for each in bounds(problem)
    )
    wanted = [bundle for bundle, count in enumerate(most) if count]
    idle = [node for node in nodes if node.name in spares]
    for crowd in crowds(problem, nodes):
        makes = Rooms(problem, crowd)
        empty = makes.of(idle)
        counts: Cells | None = least
        if least == most and idle and (placed := place(problem, packer, empty, least, held)) is not None:
            return Moved(homes, idle, empty, placed)
        rooms = survivors.rooms(makes, nodes, homes, wanted)
        counts = most_cells(problem, packer, rooms, least, most)
        if counts is None:
            continue
        if idle and least != most and (placed := place(problem, packer, empty, counts, held)) is not None:
            return Moved(homes, idle, empty, placed)
        placed = place(problem, packer, rooms, counts, held)
        if placed is not None:
            return Moved(homes, nodes, rooms, placed)
    return None


def _result(
    request: Request,
    problem: Problem,
    packer: Packer,
    survivors: Survivors,
    moved: Moved,
    inventory: Inventory,
) -> Placement:
    new = [sum(cells[bundle] for cells in moved.placed) for bundle in range(len(problem.bundles))]
    by_role: dict[str, list[Assignment | None]] = {}
    homes: list[list[str | None]] = []
    for bundle, cells, number in zip(problem.bundles, moved.homes, new, strict=True):
        changes = _changes(cells, number)
        total = len(cells) - cells.count(None) + number
        homes.append(
            _changed(cells, total, {to: None if of is None else cells[of] for to, of in changes.items()})
        )
        for name in bundle.names:
            by_role[name] = _stayed(survivors.by_role[name], bundle.ranks_of(name), total, changes)
        _close_up(by_role, bundle.names, _left(survivors, bundle, cells))
    _join(problem, packer, moved, by_role, homes)
    counts = [Counter(cells) for cells in homes]
    used = list(dict.fromkeys(node for count in counts for node in count))
    there: Counter[Cells] = Counter(zip(*(map(count.get, used, repeat(0)) for count in counts), strict=True))
    taken = frozenset(used)
    idle = [n.name for n in inventory.nodes if n.name in survivors.names and n.name not in taken]
    spares = tuple(idle[max(len(idle) - request.spares, 0) :])
    lost = crossing(request, problem, there, [len(cells) for cells in homes])
    # All have a place now.
    full = cast(dict[str, list[Assignment]], by_role)
    return Placement(in_order(request, full), note(request, problem, there, spares, lost), spares, lost)


def _changes(homes: Sequence[str | None], new: int) -> dict[int, int | None]:
    """The numbers that change hands when `new` cells join: by number, the cell that takes it, None for a new one.

    A role that shrinks gives up the numbers at its end, and who has them takes those that are missing.
    """
    total = len(homes) - homes.count(None) + new
    open_ = [cell for cell, node in enumerate(homes[:total]) if node is None]
    open_ += range(len(homes), total)
    over = [cell for cell in range(total, len(homes)) if homes[cell] is not None]
    return dict.fromkeys(open_) | dict(zip(open_, over, strict=False))


def _changed(before: Sequence[T | None], total: int, changes: Mapping[int, T | None]) -> list[T | None]:
    """The first `total` of `before`, with `changes` by their numbers."""
    found: list[T | None] = [*before[:total]]
    found += [None] * (total - len(found))
    for number, each in changes.items():
        found[number] = each
    return found


def _stayed(
    before: Sequence[Assignment], size: int, total: int, changes: Mapping[int, int | None]
) -> list[Assignment | None]:
    """By rank: who stays, of a role with `size` ranks in each of `total` cells."""
    moves: dict[int, Assignment | None] = {}
    for number, cell in changes.items():
        for at in range(size):
            rank = number * size + at
            moves[rank] = None if cell is None else replace(before[cell * size + at], rank=rank)
    return _changed(before, total * size, moves)


def _left(survivors: Survivors, bundle: Bundle, homes: Sequence[str | None]) -> set[str]:
    """The sound nodes where cells of `bundle` were that have no home now."""
    return {
        was.node
        for cell, node in enumerate(homes)
        if node is None
        for name in bundle.names
        for was in survivors.by_role[name][cell * bundle.ranks_of(name) : (cell + 1) * bundle.ranks_of(name)]
        if was.node in survivors.names
    }


def _close_up(by_role: dict[str, list[Assignment | None]], names: Sequence[str], nodes: set[str]) -> None:
    """Number the local ranks on `nodes` without gaps, and take the devices that were left from the masks."""
    for name in names if nodes else ():
        there: dict[str, list[Assignment]] = defaultdict(list)
        for each in by_role[name]:
            if each is not None and each.node in nodes:
                there[each.node].append(each)
        for group in there.values():
            group.sort(key=attrgetter("local_rank"))
            own = tuple(index for each in group for index in each.own)
            for number, each in enumerate(group):
                shared = each.devices is not None and each.devices != each.own
                by_role[name][each.rank] = replace(
                    each, local_rank=number, devices=own if shared else each.devices
                )


def _join(
    problem: Problem,
    packer: Packer,
    moved: Moved,
    by_role: dict[str, list[Assignment | None]],
    homes: list[list[str | None]],
) -> None:
    """Give the cells that are placed the numbers that are open, in the order of the nodes, and their ranks seats."""
    there = _there(moved, by_role)
    open_ = [iter([number for number, node in enumerate(cells) if node is None]) for cells in homes]
    for node, room, cells in zip(moved.nodes, moved.rooms, moved.placed, strict=True):
        if not any(cells):
            continue
        numbers = [[next(turn) for _ in range(each)] for turn, each in zip(open_, cells, strict=True)]
        for bundle, own in enumerate(numbers):
            for number in own:
                homes[bundle][number] = node.name
        for role, bundle, size, seats in seating(problem, packer, room, cells, there.get(node.name)):
            for seat in seats:
                rank = numbers[bundle][seat.cell] * size + seat.rank
                by_role[role][rank] = seated(role, rank, node.name, seat)


def _there(moved: Moved, by_role: dict[str, list[Assignment | None]]) -> dict[str, Before]:
    """By node that somebody joins: the devices of those who are there."""
    joined = {
        node.name
        for node, room, cells in zip(moved.nodes, moved.rooms, moved.placed, strict=True)
        if any(cells) and any(room.held)
    }
    found: dict[str, dict[str, list[Assignment]]] = defaultdict(lambda: defaultdict(list))
    for name, ranks in by_role.items() if joined else ():
        for each in ranks:
            if each is not None and each.node in joined:
                found[each.node][name].append(each)
    return {
        node: {
            name: [a.own for a in sorted(group, key=attrgetter("local_rank"))]
            for name, group in roles.items()
        }
        for node, roles in found.items()
    }
