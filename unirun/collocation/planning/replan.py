"""`replan`: a placement after nodes were lost, in which whoever need not move stays."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple

from unirun.collocation.inventory import Inventory, Node
from unirun.collocation.placement import Assignment, Placement
from unirun.collocation.planning.layout import seating
from unirun.collocation.planning.packing import Packer, Room
from unirun.collocation.planning.plan import crossing, in_order, note
from unirun.collocation.planning.problem import Cells, Problem
from unirun.collocation.planning.rooms import Rooms
from unirun.collocation.planning.shortage import checked, does_not_fit
from unirun.collocation.planning.solve import bounds, crowds, most_cells, place
from unirun.collocation.planning.survivors import Homes, Survivors
from unirun.collocation.request import Request

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
    so on. Roles with a least number of ranks rather shrink than that a survivor moves; then the highest ranks that
    survive take the numbers that are missing, and stay where they are. A survivor keeps its local rank and mask when
    others join it. Raises `PlacementError` as `plan` does.
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
            return _result(request, problem, packer, survivors, moved, inventory, nodes)
    left = tuple(node for node in inventory.nodes if node.name not in lost)
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
    held = survivors.standing(homes)
    least, most = (
        tuple(max(bound - there, 0) for bound, there in zip(each, held, strict=True))
        for each in bounds(problem)
    )
    idle = [node for node in nodes if node.name in spares]
    for crowd in crowds(problem, nodes):
        makes = Rooms(problem, crowd)
        empty = makes.of(idle)
        counts: Cells | None = least
        if least == most and idle and (placed := place(problem, packer, empty, least, held)) is not None:
            return Moved(homes, idle, empty, placed)
        rooms = survivors.rooms(makes, nodes, homes)
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
    nodes: Sequence[Node],
) -> Placement:
    by_role, final = _seated(problem, packer, survivors, moved)
    there: dict[str | None, list[int]] = {}
    for bundle, cells in enumerate(final):
        for node, number in Counter(cells).items():
            there.setdefault(node, [0] * len(final))[bundle] = number
    sound = {node.name for node in nodes}
    held_back = [n.name for n in inventory.nodes if n.name in sound and n.name not in there]
    spares = tuple(held_back[max(len(held_back) - request.spares, 0) :])
    counts = tuple(len(cells) for cells in final)
    lost = crossing(request.weights, problem, [tuple(cells) for cells in there.values()], counts)
    said = note(request, problem, len(there), spares, lost)
    return Placement(in_order(request, by_role), said, spares, lost)


def _seated(
    problem: Problem, packer: Packer, survivors: Survivors, moved: Moved
) -> tuple[dict[str, list[Assignment]], list[list[str | None]]]:
    """Every role's assignments by rank, and the node of every cell of each bundle."""
    new = [sum(cells[bundle] for cells in moved.placed) for bundle in range(len(problem.bundles))]
    numbering = [_numbered(cells, number) for cells, number in zip(moved.homes, new, strict=True)]
    targets = {node.name for node, cells in zip(moved.nodes, moved.placed, strict=True) if any(cells)}
    by_role = _stayed(problem, survivors, moved.homes, numbering)
    # Only where somebody joins does it matter who is there already.
    there: dict[str, dict[str, list[Assignment]]] = defaultdict(lambda: defaultdict(list))
    for name, ranks in by_role.items():
        for each in ranks.values():
            if each.node in targets:
                there[each.node][name].append(each)
    final: list[dict[int, str | None]] = [
        {number: homes[cell] for number, cell in slots.items() if cell is not None}
        for slots, homes in zip(numbering, moved.homes, strict=True)
    ]
    open_ = [iter([number for number, cell in slots.items() if cell is None]) for slots in numbering]
    for node, room, cells in zip(moved.nodes, moved.rooms, moved.placed, strict=True):
        if not any(cells):
            continue
        before = {
            name: [each.own for each in sorted(ranks, key=lambda a: a.local_rank)]
            for name, ranks in there[node.name].items()
        }
        numbers = [[next(turn) for _ in range(each)] for turn, each in zip(open_, cells, strict=True)]
        for bundle, own in enumerate(numbers):
            final[bundle] |= dict.fromkeys(own, node.name)
        for role, bundle, ranks_per_cell, seats in seating(problem, packer, room, cells, before):
            for seat in seats:
                rank = numbers[bundle][seat.cell] * ranks_per_cell + seat.rank
                by_role[role][rank] = Assignment(
                    role,
                    rank,
                    node.name,
                    seat.slot,
                    seat.local_rank,
                    seat.devices,
                    None,
                    seat.own,
                    seat.share,
                    seat.numa,
                )
    ordered = {name: [ranks[rank] for rank in range(len(ranks))] for name, ranks in by_role.items()}
    return ordered, [[cells[number] for number in range(len(cells))] for cells in final]


def _numbered(homes: Sequence[str | None], new: int) -> dict[int, int | None]:
    """By its number then: the cell that has it now, None for a new one. Those that stay keep theirs, if they can."""
    total = len(homes) - homes.count(None) + new
    found: dict[int, int | None] = dict.fromkeys(range(total))
    over = []
    for cell, node in enumerate(homes):
        if node is not None:
            if cell < total:
                found[cell] = cell
            else:
                over.append(cell)
    missing = (number for number, cell in list(found.items()) if cell is None)
    # From the highest, so that a shrinking role gives up the numbers at its end.
    found |= dict(zip(missing, over[::-1], strict=False))
    return found


def _stayed(
    problem: Problem, survivors: Survivors, homes: Homes, numbering: Sequence[Mapping[int, int | None]]
) -> dict[str, dict[int, Assignment]]:
    """By role and rank: who stays. Where others of a role have left a node, local ranks close up."""
    found: dict[str, dict[int, Assignment]] = {}
    for bundle, each in enumerate(problem.bundles):
        left = {
            was.node
            for name in each.names
            for was in _of_cells(survivors, name, each.ranks_of(name), homes[bundle])
        }
        for name in each.names:
            size = each.ranks_of(name)
            before = survivors.by_role[name]
            ranks = {
                number * size + at: before[cell * size + at]
                for number, cell in numbering[bundle].items()
                if cell is not None
                for at in range(size)
            }
            found[name] = {
                rank: was if was.rank == rank else replace(was, rank=rank) for rank, was in ranks.items()
            }
            _close_up(found[name], left)
    return found


def _of_cells(
    survivors: Survivors, role: str, size: int, homes: Sequence[str | None]
) -> Iterator[Assignment]:
    """The assignments of the cells that have no home now."""
    ranks = survivors.by_role[role]
    for cell, node in enumerate(homes):
        if node is None:
            yield from ranks[cell * size : (cell + 1) * size]


def _close_up(ranks: dict[int, Assignment], nodes: set[str]) -> None:
    """Number the local ranks of a role on `nodes` without gaps, and take the devices that were left from the masks."""
    there: dict[str, list[Assignment]] = defaultdict(list)
    for each in ranks.values():
        if each.node in nodes:
            there[each.node].append(each)
    for group in there.values():
        group.sort(key=lambda each: each.local_rank)
        own = tuple(index for each in group for index in each.own)
        for number, each in enumerate(group):
            shared = each.devices is not None and each.devices != each.own
            ranks[each.rank] = replace(each, local_rank=number, devices=own if shared else each.devices)
