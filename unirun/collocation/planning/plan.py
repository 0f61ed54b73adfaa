"""`plan`: a placement from a request and an inventory. `replan`: the same after nodes were lost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple, TypeVar, cast

from msgspec.structs import replace

from unirun.collocation.inventory import (
    CPU,
    Assignment,
    Inventory,
    Node,
    Placement,
    PlacementRequest,
    RoleRequest,
)
from unirun.collocation.planning.packer import Packer
from unirun.collocation.planning.problem import (
    GROUPS,
    Bundle,
    Cells,
    Kinds,
    NodeKind,
    Problem,
    Stack,
    both,
    join,
    names_of,
    problem_of,
    some,
)
from unirun.collocation.planning.solve import distribute, most_cells, processes, solve

# Roles that may be on any node: they need no slot, and no constraint and no edge names them.
#
# They are not part of the search, so that the other roles are where they would be without them, and a hundred of them
# cost nothing. Their ranks go to the first node in use.


def searched(request: PlacementRequest) -> PlacementRequest:
    """`request` without the roles that may be anywhere."""
    groups = [group for kind in GROUPS for group in getattr(request, kind)]
    named = {name for group in (*groups, *request.ties.weights) for name in group}
    named |= {name for part in request.ties.parts if len(part) > 1 for name in part}

    def bound(role: RoleRequest) -> bool:
        needs = (role.device, role.devices, role.per_node, role.component)
        return role.name in named or any(need is not None for need in needs)

    roles = tuple(role for role in request.roles if bound(role))
    return request if len(roles) == len(request.roles) else replace(request, roles=roles)


def none_in_use(request: PlacementRequest, usable: Sequence[str]) -> Placement:
    """The placement of a request without roles: only spares, the last of the nodes."""
    return Placement((), "", tuple(usable[max(len(usable) - request.spares, 0) :]))


def with_the_others(
    request: PlacementRequest, placement: Placement, usable: Sequence[str], previous: Placement | None = None
) -> Placement | None:
    """`placement`, of the roles that were `searched`, with the ranks of all other roles of `request`.

    Where they are in `previous` they stay, if that node is one of the `usable`. None when there is no node for them.
    """
    known = {role.name for role in searched(request).roles}
    others = [role for role in request.roles if role.name not in known]
    if not others:
        return placement
    idle = [name for name in usable if name not in placement.spares]
    if previous is not None:
        # After a loss, nodes that were held back are there to be used, and before all others.
        idle = sorted(usable, key=lambda name: name not in previous.spares)
    home = next(iter(placement.nodes or idle), None)
    ranks = {role.name: _ranks(role, frozenset(usable), home, previous) for role in others}
    if any(len(ranks[role.name]) < role.least for role in others):
        return None
    found = tuple(
        [each for role in request.roles for each in ranks.get(role.name) or placement.of_role(role.name)]
    )
    used = {each.node for each in found}
    spares = tuple(name for name in placement.spares if name not in used)
    # Without roles that were searched, nothing has been said yet.
    said = [f"{some(len(used), 'node')} in use", *([f"{join(spares)} held back"] if spares else [])]
    return replace(placement, assignments=found, spares=spares, note=placement.note or "; ".join(said))


def _ranks(
    role: RoleRequest, usable: frozenset[str], home: str | None, previous: Placement | None
) -> list[Assignment]:
    """The ranks of `role`: those that may stay where they were, and the others at `home`. Local ranks have no gaps."""
    before = () if previous is None else previous.of_role(role.name)
    stay = {each.rank: each for each in before if each.node in usable}
    found: dict[int, Assignment] = {}
    there: dict[str, int] = {}
    ranks = range(role.count if home is not None else 0)
    # Survivors come first, in the order of their local ranks, which they keep where none has left.
    for rank in sorted(
        ranks, key=lambda rank: (rank not in stay, stay[rank].local_rank if rank in stay else rank)
    ):
        node = stay[rank].node if rank in stay else home or ""
        number = there[node] = there.get(node, -1) + 1
        seat = stay.get(rank) or Assignment(role.name, rank, node, -1, number)
        found[rank] = seat if seat.local_rank == number else replace(seat, local_rank=number)
    return [found[rank] for rank in ranks]


Before = Mapping[str, Sequence[tuple[str, ...]]]
"""By role, the devices of each of its ranks that are on a node already, by local rank."""


def seating(
    packer: Packer, node: Node, kind: NodeKind, cells: Cells, before: Before | None = None
) -> dict[str, list[Assignment]]:
    """By role, the assignments of the ranks of `cells` on `node`, which is of `kind`, in slot order, from rank 0."""
    names = names_of(node, kind)
    found = {}
    for stack, slots in zip(packer.problem.stacks, packer.pack(kind, cells), strict=True):
        for role in stack.roles if slots else ():
            there = (before or {}).get(role.name, ())
            found[role.name] = list(_seats(kind, names, slots, stack, role, there))
    return found


def _seats(
    kind: NodeKind,
    names: Sequence[str],
    slots: Sequence[tuple[int, ...]],
    stack: Stack,
    role: RoleRequest,
    before: Sequence[tuple[str, ...]],
) -> Iterator[Assignment]:
    owns = [tuple(names[at] for at in each) for each in slots]
    mask: tuple[str, ...] | None = None
    masked = stack.device not in (None, CPU)
    if masked:
        devices = tuple(index for own in (*before, *owns) for index in own)
        # With one device per rank, cuda:{LOCAL_RANK} names the rank's own among all of its role's.
        if len(devices) == len(set(devices)) == len(before) + len(owns):
            mask = devices
    for number, (own, at) in enumerate(zip(owns, slots, strict=True)):
        numas = {kind.slots[each].numa for each in at}
        yield Assignment(
            role=role.name,
            rank=number,
            node="",
            slot=kind.slots[at[0]].number if at else -1,
            local_rank=len(before) + number,
            devices=(mask or own) if masked else None,
            own=own,
            share=stack.share(role),
            numa=numas.pop() if len(numas) == 1 else -1,
        )


def assign(
    packer: Packer, nodes: Sequence[Node], kinds: Sequence[NodeKind], placed: Sequence[Cells]
) -> dict[str, list[Assignment]]:
    """By role, the assignments of all ranks, in the order of the nodes."""
    found: dict[str, list[Assignment]] = {name: [] for name in packer.problem.home}
    known: dict[tuple[object, ...], dict[str, list[Assignment]]] = {}
    for node, kind, cells in zip(nodes, kinds, placed, strict=True):
        if not any(cells):
            continue
        key = (kind, cells, *[device.index for device in node.devices])
        seats_of = known.get(key)
        if seats_of is None:
            seats_of = known[key] = seating(packer, node, kind, cells)
        for role, seats in seats_of.items():
            ranks = found[role]
            ranks += [replace(seat, rank=rank, node=node.name) for rank, seat in enumerate(seats, len(ranks))]
    return found


def plan(request: PlacementRequest, inventory: Inventory) -> Placement:
    """Place all ranks of `request` on `inventory`. Deterministic.

    Every constraint is kept. The criteria are, in this order: little traffic between nodes; each group of roles that
    wait for each other on few nodes; few nodes in use; the ranks of a role together. Nodes are in the order of the
    inventory, ranks in that of nodes and slots. Small problems (up to `solve.WORK` steps: some ten ranks on some nodes)
    are solved to the optimum; for larger ones nodes are filled by a few rules, and the best result is taken. Roles that
    may be `anywhere` do not change where others are.

    Raises `PlacementError`, with all faults of the request, or with the constraint that binds and requests that fit.
    """
    placement = find(request, inventory)
    if placement is None:
        # Slow to import, and needed only when nothing fits.
        from unirun.collocation.planning.offers import does_not_fit

        raise does_not_fit(short_of(request), inventory)
    return placement


def short_of(request: PlacementRequest) -> PlacementRequest:
    """The part of `request`, which does not fit, that is the reason: roles that may be anywhere need but a node."""
    rest = searched(request)
    return rest if any(role.least for role in rest.roles) else request


def find(request: PlacementRequest, inventory: Inventory) -> Placement | None:
    """The placement of `plan`, or None when nothing fits, without the search for an explanation, which takes longer."""
    sound = [node for node in inventory.nodes if node.name not in request.tainted]
    rest = searched(request)
    names = [node.name for node in sound]
    placement = _searched(rest, sound) if rest.roles else none_in_use(rest, names)
    return None if placement is None else with_the_others(request, placement, names)


def _searched(request: PlacementRequest, sound: Sequence[Node]) -> Placement | None:
    """The placement of roles that have needs, on nodes of which the last are the spares."""
    problem = problem_of(request)
    packer = Packer(problem)
    use = max(len(sound) - request.spares, 0)
    nodes, spares = sound[:use], tuple(node.name for node in sound[use:])
    solution = solve(packer, nodes)
    if solution is None:
        return None
    kinds, placed = solution
    by_role = assign(packer, nodes, kinds, placed)
    there = Counter(cells for cells in placed if any(cells))
    lost = crossing(request, problem, there)
    return Placement(in_order(request, by_role), note(request, problem, there, spares, lost), spares, lost)


def in_order(
    request: PlacementRequest, by_role: Mapping[str, Sequence[Assignment]]
) -> tuple[Assignment, ...]:
    """All assignments, roles in the order of the request."""
    return tuple([a for role in request.roles for a in by_role[role.name]])


def crossing(request: PlacementRequest, problem: Problem, there: Mapping[Cells, int]) -> float:
    """Bytes per step between nodes. `there`: how many nodes have which cells."""
    home = problem.home
    counts = [sum(cells[b] * number for cells, number in there.items()) for b in range(len(problem.bundles))]
    lost = 0.0
    for (one, other), weight in sorted(request.ties.weights.items()):
        a, b = home[one], home[other]
        pairs = counts[a] * counts[b]
        within = sum(cells[a] * cells[b] * number for cells, number in there.items())
        # In integers first, so that the result is 0 and not nearly 0 when all is on one node.
        lost += weight * (pairs - within) / pairs if pairs else 0.0
    return lost


def note(
    request: PlacementRequest,
    problem: Problem,
    there: Mapping[Cells, int],
    spares: Sequence[str],
    lost: float,
) -> str:
    """The decision in words. `there`: how many nodes have which cells."""
    nodes = sum(there.values())
    words = [f"{some(nodes, 'node')} in use"]
    for stack in problem.stacks:
        if len(stack.roles) > 1:
            shares = [f"{stack.share(role):.3g}" for role in stack.roles]
            words.append(f"{both(role.name for role in stack.roles)} share slots, {both(shares)} of each")
    words += [f"{both(group)} on the same nodes" for group in request.together]
    words += [f"{both(group)} on different nodes" for group in request.apart]
    words += [f"{both(group)} on different NUMA nodes" for group in request.isolated]
    words += _parts(request, problem, there)
    if spares:
        words.append(f"{join(spares)} held back")
    if total := sum(sorted(request.ties.weights.values())):
        words.append(f"{100 * lost / total:.0f} % of what roles exchange goes between nodes")
    return "; ".join(words)


def _parts(request: PlacementRequest, problem: Problem, there: Mapping[Cells, int]) -> Iterator[str]:
    """The groups of roles that wait for each other, and need slots, which are on fewer nodes than are in use."""
    heavy = {role.name for role in request.roles if role.device is not None}
    home = problem.home
    for part in request.ties.parts:
        names = [name for name in part if name in heavy]
        bundles = {home[name] for name in names}
        nodes = sum(number for cells, number in there.items() if any(cells[bundle] for bundle in bundles))
        if len(names) > 1 and nodes < sum(there.values()):
            yield f"{both(names)}, which wait for each other, on {some(nodes, 'node')}"


# `replan`: a placement after nodes were lost, in which ranks stay where they are unless they have to move.
#
# A hundred thousand ranks stay where a few move, so whole columns of them are handled at once.

T = TypeVar("T")

_type = attrgetter("type")

RELEASES = 4_000
"""The work of the search for survivors that have to move: (sets of them that are tried) × (nodes)."""

Homes = tuple[Sequence[str | None], ...]
"""By bundle, and by the number of the cell: its node, or None when the cell has none."""


class Moved(NamedTuple):
    """The cells that are placed on `nodes`, and the homes of those that stay."""

    homes: Homes
    nodes: Sequence[Node]
    kinds: Sequence[NodeKind]
    placed: Sequence[Cells]


def replan(
    request: PlacementRequest, inventory: Inventory, previous: Placement, lost: frozenset[str]
) -> Placement:
    """`previous`, a placement of this `request`, without the nodes `lost`.

    Ranks of lost or tainted nodes, and on devices that are gone, move: to the spares if these have room for all, else
    to whatever is free. The others keep their nodes and slots unless there is no other way; then sets of survivors with
    the fewest ranks move, as far as such sets can be tried (`RELEASES`), else all of one node, of two, of four, and so
    on. Ranks that have to be on one node move together. An elastic role shrinks before a survivor moves; then the
    survivors with the highest ranks take the missing numbers, and stay where they are. A survivor keeps its local rank
    and mask when others join it. Roles that may be `anywhere` go to nodes that are in use. Raises `PlacementError` as
    `plan` does.
    """
    nodes = [node for node in inventory.nodes if node.name not in lost and node.name not in request.tainted]
    rest = searched(request)
    names = [node.name for node in nodes]
    placement = _searched_again(rest, inventory, previous, nodes) if rest.roles else none_in_use(rest, names)
    whole = None if placement is None else with_the_others(request, placement, names, previous)
    if whole is not None:
        return whole
    left = tuple(node for node in inventory.nodes if node.name not in lost)
    # Slow to import, and needed only when nothing fits.
    from unirun.collocation.planning.offers import does_not_fit

    raise does_not_fit(replace(short_of(request), spares=0), Inventory(left))


def _searched_again(
    request: PlacementRequest, inventory: Inventory, previous: Placement, nodes: Sequence[Node]
) -> Placement | None:
    """The placement of roles that have needs on those `nodes` that are left; None when they do not fit."""
    problem = problem_of(request)
    packer = Packer(problem)
    survivors = _Survivors(problem, previous, nodes)
    # Spares first, so that they are preferred to equal nodes.
    spares = frozenset(previous.spares)
    nodes = sorted(nodes, key=lambda node: node.name not in spares)
    kinds = [Kinds(problem, number) for number in processes(problem, nodes)]
    for homes in _stays(survivors, nodes):
        moved = _move(packer, kinds, survivors, homes, nodes, spares)
        if moved is not None:
            return _result(request, packer, survivors, moved, inventory)
    return None


class _Survivors:
    """The cells of `previous` that are whole: all ranks on one of `nodes`, and all their slots still there."""

    def __init__(self, problem: Problem, previous: Placement, nodes: Sequence[Node]) -> None:
        self.problem = problem
        self.by_role = {name: previous.of_role(name) for name in problem.home}
        self.names = frozenset(node.name for node in nodes)
        devices = {node.name: frozenset([device.index for device in node.devices]) for node in nodes}
        # Collocated roles have the same slots, so the first role counts for all.
        gone = {
            (each.role, each.rank)
            for stack in problem.stacks
            if stack.device not in (None, CPU)
            for each in self.by_role[stack.roles[0].name]
            if each.node in devices and not devices[each.node].issuperset(each.own)
        }
        self.homes: Homes = tuple(self._homes(bundle, gone) for bundle in problem.bundles)

    def _homes(self, bundle: Bundle, gone: Collection[tuple[str, int]]) -> Sequence[str | None]:
        columns = [
            self._column(role.name, stack.ranks, gone) for stack in bundle.stacks for role in stack.roles
        ]
        first = columns[0]
        if any(column != first for column in columns):
            # A role that lacks ranks has fewer whole cells.
            first = [cell[0] if len(set(cell)) == 1 else None for cell in zip(*columns, strict=False)]
        return [node if node in self.names else None for node in first]

    def _column(self, role: str, ranks: int, gone: Collection[tuple[str, int]]) -> list[str | None]:
        """By cell, the node on which all its ranks of `role` are."""
        nodes: list[str | None] = [each.node for each in self.by_role[role]]
        if gone:
            nodes = [None if (role, rank) in gone else node for rank, node in enumerate(nodes)]
        if ranks == 1:
            return nodes
        cells = (nodes[at : at + ranks] for at in range(0, len(nodes) - ranks + 1, ranks))
        return [cell[0] if len(set(cell)) == 1 else None for cell in cells]

    def left(
        self, kinds: Kinds, nodes: Sequence[Node], homes: Homes, wanted: Collection[int]
    ) -> list[NodeKind]:
        """The kinds of `nodes` with the cells at `homes` on them.

        A node that is too full for any cell of the bundles `wanted` is full, whichever of its slots are free.
        """
        counts = [Counter(cells) for cells in homes]
        names = [node.name for node in nodes]
        helds: Iterable[Cells] = zip(*(map(count.get, names, repeat(0)) for count in counts), strict=True)
        sizes = [(tuple(map(_type, node.devices)), len(node.cpus), node.component) for node in nodes]
        pairs = list(zip(sizes, helds, strict=True))
        demands = [bundle.demand() for bundle in self.problem.bundles]

        def is_full(node: Node, held: Cells) -> bool:
            left = kinds.units(node)
            for number, demand in zip(held, demands, strict=True):
                left.subtract({type: number * units for type, units in demand.items()})
            return not any(
                all(left[type] >= units for type, units in demands[bundle].items()) for bundle in wanted
            )

        alike = dict(zip(pairs, nodes, strict=True))
        full = {
            pair: kinds.full(pair[1], node.component)
            for pair, node in alike.items()
            if is_full(node, pair[1])
        }
        found = list(map(full.get, pairs))
        open_ = [node for node, kind in zip(nodes, found, strict=True) if kind is None]
        taken: dict[str, list[tuple[int, Assignment]]] = {node.name: [] for node in open_}
        self._take(homes, taken)
        empty = iter(kinds.of(open_))
        return [
            kind or kinds.left(node, next(empty), held, taken[node.name])
            for node, kind, (_, held) in zip(nodes, found, pairs, strict=True)
        ]

    def left_by(self, bundle: Bundle, homes: Sequence[str | None]) -> set[str]:
        """The nodes on which there were cells of `bundle` that have no home."""
        return {
            was.node
            for cell in [cell for cell, node in enumerate(homes) if node is None]
            for stack in bundle.stacks
            for role in stack.roles
            for was in self.by_role[role.name][cell * stack.ranks : (cell + 1) * stack.ranks]
            if was.node in self.names
        }

    def _take(self, homes: Homes, taken: Mapping[str, list[tuple[int, Assignment]]]) -> None:
        """Add the ranks of the cells at `homes`, each with its stack, for the nodes in `taken`."""
        number = 0
        for bundle, cells in zip(self.problem.bundles, homes, strict=True):
            here = [(cell, node) for cell, node in enumerate(cells) if node is not None and node in taken]
            for stack in bundle.stacks:
                ranks = self.by_role[stack.roles[0].name]
                for cell, node in here:
                    own = ranks[cell * stack.ranks : (cell + 1) * stack.ranks]
                    taken[node] += [(number, each) for each in own]
                number += 1


def _stays(survivors: _Survivors, nodes: Sequence[Node]) -> Iterator[Homes]:
    """The survivors that may stay, from all to none; the sets of those that move have ever more ranks."""
    homes = survivors.homes
    yield homes
    bundles = survivors.problem.bundles
    cells = sorted(
        (bundles[bundle].ranks, bundle, -cell)
        for bundle, column in enumerate(homes)
        for cell, node in enumerate(column)
        if node is not None
    )
    tries = RELEASES // max(len(nodes), 1)
    heap: list[tuple[int, tuple[int, ...]]] = [(each[0], (number,)) for number, each in enumerate(cells)]
    while heap and tries:
        ranks, released = heappop(heap)
        gone = {(cells[at][1], -cells[at][2]) for at in released}
        yield tuple(
            tuple(None if (bundle, cell) in gone else node for cell, node in enumerate(column))
            for bundle, column in enumerate(homes)
        )
        tries -= 1
        for further in range(released[-1] + 1, len(cells)):
            heappush(heap, (ranks + cells[further][0], (*released, further)))
    number = 1
    while heap and number < 2 * len(nodes):
        names = {node.name for node in nodes[-number:]}
        yield tuple(tuple(None if node in names else node for node in column) for column in homes)
        number *= 2


def _move(
    packer: Packer,
    kinds: Iterable[Kinds],
    survivors: _Survivors,
    homes: Homes,
    nodes: Sequence[Node],
    spares: frozenset[str],
) -> Moved | None:
    """Nodes for the cells without a home, when the others stay at `homes`; None when they do not fit."""
    problem = survivors.problem
    held = tuple(len(cells) - cells.count(None) for cells in homes)
    least, most = (
        tuple(max(bound - there, 0) for bound, there in zip(each, held, strict=True))
        for each in (problem.least, problem.most)
    )
    wanted = [bundle for bundle, count in enumerate(most) if count]
    idle = [node for node in nodes if node.name in spares]
    for each in kinds:
        empty = each.of(idle)
        if least == most and idle and (placed := distribute(packer, empty, least, held)) is not None:
            return Moved(homes, idle, empty, placed)
        there = survivors.left(each, nodes, homes, wanted)
        counts = most_cells(packer, there, least, most)
        if counts is None:
            continue
        if idle and least != most and (placed := distribute(packer, empty, counts, held)) is not None:
            return Moved(homes, idle, empty, placed)
        placed = distribute(packer, there, counts, held)
        if placed is not None:
            return Moved(homes, nodes, there, placed)
    return None


def _result(
    request: PlacementRequest,
    packer: Packer,
    survivors: _Survivors,
    moved: Moved,
    inventory: Inventory,
) -> Placement:
    problem = packer.problem
    by_role: dict[str, list[Assignment | None]] = {}
    homes: list[list[str | None]] = []
    for number, (bundle, cells) in enumerate(zip(problem.bundles, moved.homes, strict=True)):
        total = len(cells) - cells.count(None) + sum(each[number] for each in moved.placed)
        taken = _taken_numbers(cells, total)
        homes.append(_renumbered(cells, 1, total, taken))
        for name in bundle.names:
            size = bundle.ranks_of(name)
            ranks: list[Assignment | None] = _renumbered(survivors.by_role[name], size, total, taken)
            for rank in [number * size + at for number in taken for at in range(size)]:
                each = ranks[rank]
                ranks[rank] = None if each is None else replace(each, rank=rank)
            by_role[name] = ranks
        _close_up(by_role, bundle.names, survivors.left_by(bundle, cells))
    _join(packer, moved, by_role, homes)
    counts = [Counter(cells) for cells in homes]
    used = list(dict.fromkeys(node for count in counts for node in count))
    there: Counter[Cells] = Counter(zip(*(map(count.get, used, repeat(0)) for count in counts), strict=True))
    free = survivors.names.difference(used)
    idle = [n.name for n in inventory.nodes if n.name in free]
    spares = tuple(idle[max(len(idle) - request.spares, 0) :])
    lost = crossing(request, problem, there)
    # All ranks are placed now.
    full = cast(dict[str, list[Assignment]], by_role)
    return Placement(in_order(request, full), note(request, problem, there, spares, lost), spares, lost)


def _taken_numbers(homes: Sequence[str | None], total: int) -> dict[int, int | None]:
    """By number, the cell that takes it, or None for a new cell; numbers that stay with their cell are not in it.

    When fewer than before are left, the cells with the highest numbers take those that are missing.
    """
    missing = [cell for cell, node in enumerate(homes[:total]) if node is None]
    missing += range(len(homes), total)
    over = [cell for cell in range(total, len(homes)) if homes[cell] is not None]
    return dict.fromkeys(missing) | dict(zip(missing, over, strict=False))


def _renumbered(
    before: Sequence[T | None], size: int, total: int, taken: Mapping[int, int | None]
) -> list[T | None]:
    """`before`, which has `size` entries for each cell, for `total` cells when numbers are `taken`."""
    found: list[T | None] = [*before[: total * size]]
    found += [None] * (total * size - len(found))
    for number, cell in taken.items():
        own = [None] * size if cell is None else before[cell * size : (cell + 1) * size]
        found[number * size : (number + 1) * size] = own
    return found


def _on(nodes: Collection[str], ranks: Sequence[Assignment | None]) -> dict[str, list[Assignment]]:
    """By node in `nodes`, those of `ranks` on it, by local rank."""
    found: dict[str, list[Assignment]] = defaultdict(list)
    for each in ranks if nodes else ():
        if each is not None and each.node in nodes:
            found[each.node].append(each)
    return {node: sorted(there, key=attrgetter("local_rank")) for node, there in found.items()}


def _close_up(by_role: dict[str, list[Assignment | None]], names: Sequence[str], nodes: set[str]) -> None:
    """Number the local ranks on `nodes` without gaps, and take the devices of those that left from the masks."""
    for name in names:
        for there in _on(nodes, by_role[name]).values():
            own = tuple(index for each in there for index in each.own)
            for number, each in enumerate(there):
                shared = each.devices is not None and each.devices != each.own
                devices = own if shared else each.devices
                by_role[name][each.rank] = replace(each, local_rank=number, devices=devices)


def _join(
    packer: Packer,
    moved: Moved,
    by_role: dict[str, list[Assignment | None]],
    homes: list[list[str | None]],
) -> None:
    """Give the cells that are placed the missing numbers, in the order of the nodes, and their ranks seats."""
    home = packer.problem.home
    placed = [each for each in zip(moved.nodes, moved.kinds, moved.placed, strict=True) if any(each[2])]
    joined = {node.name for node, kind, _ in placed if any(kind.held)}
    there = {name: _on(joined, ranks) for name, ranks in by_role.items()}
    missing = [iter([number for number, node in enumerate(cells) if node is None]) for cells in homes]
    for node, kind, cells in placed:
        numbers = [[next(turn) for _ in range(each)] for turn, each in zip(missing, cells, strict=True)]
        for bundle, own in enumerate(numbers):
            for number in own:
                homes[bundle][number] = node.name
        before = {name: [each.own for each in ranks.get(node.name, ())] for name, ranks in there.items()}
        for role, seats in seating(packer, node, kind, cells, before).items():
            bundle = home[role]
            size = packer.problem.bundles[bundle].ranks_of(role)
            for number, seat in enumerate(seats):
                rank = numbers[bundle][number // size] * size + number % size
                by_role[role][rank] = replace(seat, rank=rank, node=node.name)
