"""`plan`: a placement from a request and an inventory. `replan`: the same with the ranks of a placement as pins.

In both, cells that have a home stay there, and the search finds nodes for the others; at first, none has a home.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import chain, repeat
from operator import add, attrgetter, le, sub
from typing import cast

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
    total,
)
from unirun.collocation.planning.solve import Search, most_cells, processes
from unirun.errors import PlacementError
from unirun.spec.read import some

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
        return role.name in named or bool(role.needs) or any(need is not None for need in needs)

    roles = tuple(role for role in request.roles if bound(role))
    return request if len(roles) == len(request.roles) else replace(request, roles=roles)


def with_the_others(
    request: PlacementRequest, placement: Placement, usable: Sequence[str], previous: Placement | None
) -> Placement | None:
    """`placement`, of the roles that were `searched`, with the ranks of all other roles of `request`.

    Where they are in `previous` they stay, if that node is one of the `usable`. None when there is no node for them.
    """
    known = {role.name for role in searched(request).roles}
    others = [role for role in request.roles if role.name not in known]
    if not others:
        return placement
    # After a loss, nodes that were held back are there to be used, and before all others.
    held_back = placement.spares if previous is None else ()
    idle = sorted(usable, key=lambda name: previous is None or name not in previous.spares)
    not_here = {*held_back, *request.closed}
    home = next((name for name in (*placement.nodes, *idle) if name not in not_here), None)
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
    packer: Packer, node: Node, kind: NodeKind, cells: Cells, before: Before
) -> dict[str, list[Assignment]]:
    """By role, the assignments of the ranks of `cells` on `node`, which is of `kind`, in slot order, from rank 0."""
    names = names_of(node, kind)
    found = {}
    for stack, slots in zip(packer.problem.stacks, packer.pack(kind, cells), strict=True):
        for role in stack.roles if slots else ():
            found[role.name] = list(_seats(kind, names, slots, stack, role, before[role.name]))
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


def plan(request: PlacementRequest, inventory: Inventory) -> Placement:
    """Place all ranks of `request` on `inventory`. Deterministic.

    Every constraint is kept. The criteria are, in this order: little traffic between nodes; each group of roles that
    wait for each other on few nodes; few nodes in use; the ranks of a role together. Nodes are in the order of the
    inventory, ranks in that of nodes and slots. Small problems (up to `solve.WORK` steps: some ten ranks on some nodes)
    are solved to the optimum; for larger ones cells are tried by a few rules, and the best result is taken. Roles that
    may be `anywhere` do not change where others are.

    Raises `PlacementError`, with all faults of the request, or with the constraint that binds and requests that fit.
    """
    placement = find(request, inventory)
    if placement is None:
        # Slow to import, and needed only when nothing fits.
        from unirun.collocation.planning.offers import does_not_fit

        raise does_not_fit(short_of(request), inventory)
    return placement


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
    `plan` does; with nodes that are closed it has no explanation.
    """
    placement = find(request, inventory, previous, lost)
    if placement is None and request.closed:
        problem, first = f"there is no room outside of {join(sorted(request.closed))}", request.roles[0]
        raise PlacementError(problem, role=first.name, needed=first.least, available=0)
    if placement is None:
        from unirun.collocation.planning.offers import does_not_fit

        left = tuple(node for node in inventory.nodes if node.name not in lost)
        raise does_not_fit(replace(short_of(request), spares=0), Inventory(left))
    return placement


def short_of(request: PlacementRequest) -> PlacementRequest:
    """The part of `request`, which does not fit, that is the reason: roles that may be anywhere need but a node."""
    rest = searched(request)
    return rest if any(role.least for role in rest.roles) else request


def find(
    request: PlacementRequest,
    inventory: Inventory,
    previous: Placement | None = None,
    lost: frozenset[str] = frozenset(),
) -> Placement | None:
    """The placement of `plan`, or of `replan`; None when nothing fits, without the search for an explanation."""
    sound = [node for node in inventory.nodes if node.name not in lost and node.name not in request.tainted]
    rest = searched(request)
    names = [node.name for node in sound if node.name not in request.closed]
    nothing = Placement((), "", tuple(names[max(len(names) - request.spares, 0) :]))
    placement = _searched(rest, previous, sound) if rest.roles else nothing
    usable = [node.name for node in sound]
    return None if placement is None else with_the_others(request, placement, usable, previous)


def _searched(
    request: PlacementRequest, previous: Placement | None, sound: Sequence[Node]
) -> Placement | None:
    """The placement of roles that have needs on `sound` nodes; None when they do not fit."""
    problem = problem_of(request)
    packer = Packer(problem)
    pins = _Pins(problem, previous or Placement((), ""), sound)
    spares = frozenset() if previous is None else frozenset(previous.spares)
    # At first the last nodes are held back. After a loss they come first, so that they are preferred to equal nodes.
    open_ = [node for node in sound if node.name not in request.closed]
    nodes = open_[: max(len(open_) - request.spares, 0)] if previous is None else open_
    nodes = sorted(nodes, key=lambda node: node.name not in spares) if spares else nodes
    kinds = [Kinds(problem, number) for number in processes(problem, nodes)]
    for homes in _stays(pins, nodes):
        placed = _move(packer, kinds, pins, homes, nodes, spares)
        if placed is not None:
            return _result(request, packer, pins, homes, placed, open_)
    return None


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


# Pins: ranks of a placement stay where they are unless they have to move.
#
# A hundred thousand ranks stay where a few move, so whole columns of them are handled at once.

_type = attrgetter("type")

RELEASES = 4_000
"""The work of the search for survivors that have to move: (sets of them that are tried) × (nodes)."""

Homes = tuple[Sequence[str | None], ...]
"""By bundle, and by the number of the cell: its node, or None when the cell has none."""


Placed = list[tuple[Node, NodeKind, Cells]]
"""The cells that nodes get besides those that stay."""


class _Pins:
    """The cells of `previous` that are whole: all ranks on one of `nodes`, all their slots still there, and none that
    roles before them have. A role that had ended has left its slots to others, and may be back."""

    def __init__(self, problem: Problem, previous: Placement, nodes: Sequence[Node]) -> None:
        self.problem = problem
        self.by_role = {name: previous.of_role(name) for name in problem.home}
        self.names = frozenset(node.name for node in nodes)
        there = nodes if previous.assignments else ()
        devices = {node.name: frozenset([device.index for device in node.devices]) for node in there}
        # Collocated roles have the same slots, so the first role counts for all.
        gone = {
            (each.role, each.rank)
            for stack in problem.stacks
            if stack.device not in (None, CPU)
            for each in self.by_role[stack.roles[0].name]
            if each.node in devices and not devices[each.node].issuperset(each.own)
        }
        gone |= self._crowded(problem) if previous.assignments else set()
        self.homes: Homes = tuple(self._homes(bundle, gone) for bundle in problem.bundles)

    def _crowded(self, problem: Problem) -> set[tuple[str, int]]:
        """The ranks for which there is not enough left of a slot, by the first role of each stack."""
        used, crowded = defaultdict[tuple[str, str | None, str], int](int), set[tuple[str, int]]()
        for stack in problem.stacks:
            device, room = stack.device, problem.unit - stack.units
            for each in self.by_role[stack.roles[0].name] if device is not None else ():
                slots = [(each.node, device, name) for name in each.own]
                if any(used[slot] > room for slot in slots):
                    crowded.add((each.role, each.rank))
                    continue
                for slot in slots:
                    used[slot] += stack.units
        return crowded

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
        if all(node is None for cells in homes for node in cells):
            return kinds.of(nodes)
        counts = [Counter(cells) for cells in homes]
        names = [node.name for node in nodes]
        helds: Iterable[Cells] = zip(*(map(count.get, names, repeat(0)) for count in counts), strict=True)
        grains = self.problem.grains
        sizes = [
            (tuple(map(_type, node.devices)), len(node.cpus), node.component, *map(node.offer, grains))
            for node in nodes
        ]
        pairs = list(zip(sizes, helds, strict=True))
        needs = [bundle.needs for bundle in self.problem.bundles]

        def is_full(node: Node, held: Cells) -> bool:
            left = tuple(map(sub, kinds.offer(node), total(held, needs)))
            return not any(all(map(le, needs[bundle], left)) for bundle in wanted)

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


def _stays(pins: _Pins, nodes: Sequence[Node]) -> Iterator[Homes]:
    """The survivors that may stay, from all to none; the sets of those that move have ever more ranks."""
    homes = pins.homes
    yield homes
    bundles = pins.problem.bundles
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
    pins: _Pins,
    homes: Homes,
    nodes: Sequence[Node],
    spares: frozenset[str],
) -> Placed | None:
    """Nodes for the cells without a home, when the others stay at `homes`; None when they do not fit."""
    problem = pins.problem
    held = tuple(len(cells) - cells.count(None) for cells in homes)
    least, most = (
        tuple(max(bound - there, 0) for bound, there in zip(each, held, strict=True))
        for each in (problem.least, problem.most)
    )
    wanted = [bundle for bundle, count in enumerate(most) if count]
    idle = [node for node in nodes if node.name in spares]
    for each in kinds:
        empty = each.of(idle)
        if least == most and idle and (placed := Search(packer, empty, least, held).best()) is not None:
            return list(zip(idle, empty, placed, strict=True))
        there = pins.left(each, nodes, homes, wanted)
        counts = most_cells(packer, there, least, most)
        if counts is None:
            continue
        if idle and least != most and (placed := Search(packer, empty, counts, held).best()) is not None:
            return list(zip(idle, empty, placed, strict=True))
        placed = Search(packer, there, counts, held).best()
        if placed is not None:
            return list(zip(nodes, there, placed, strict=True))
    return None


def _result(
    request: PlacementRequest,
    packer: Packer,
    pins: _Pins,
    homes: Homes,
    placed: Placed,
    sound: Sequence[Node],
) -> Placement:
    """The placement in which the cells that are placed have the missing numbers, in the order of the nodes; the others
    stay at `homes`."""
    problem = packer.problem
    by_role: dict[str, list[Assignment | None]] = {}
    missing: dict[str, Iterator[int]] = {}
    """By role: the ranks that are to be placed."""
    for number, (bundle, cells) in enumerate(zip(problem.bundles, homes, strict=True)):
        count = len(cells) - cells.count(None) + sum(own[number] for _, _, own in placed)
        holes = [cell for cell, node in enumerate(cells[:count]) if node is None]
        # When fewer than before are left, the cells with the highest numbers take those that are missing.
        over = [cell for cell in range(count, len(cells)) if cells[cell] is not None]
        for name in bundle.names:
            size, before = bundle.ranks_of(name), pins.by_role[name]
            ranks: list[Assignment | None] = [*before[: min(count, len(cells)) * size]]
            for at, hole in enumerate(holes):
                for rank in range(hole * size, (hole + 1) * size):
                    taken = at < len(over)
                    was = (over[at] - hole) * size + rank if taken else 0
                    ranks[rank] = replace(before[was], rank=rank) if taken else None
            by_role[name] = ranks + [None] * (count * size - len(ranks))
        _close_up(by_role, bundle.names, pins.left_by(bundle, cells))
        numbers = [*holes[len(over) :], *range(len(cells), count)]
        for name in bundle.names:
            size = bundle.ranks_of(name)
            missing[name] = iter(
                [cell * size + at for cell in numbers for at in range(size)] if size > 1 else numbers
            )
    counts = [Counter(cells) for cells in homes]
    names = dict.fromkeys(name for name in chain.from_iterable(counts) if name is not None)
    used = dict(
        zip(names, zip(*(map(count.get, names, repeat(0)) for count in counts), strict=True), strict=True)
    )
    placed = [each for each in placed if any(each[2])]
    joined = {node.name for node, kind, _ in placed if any(kind.held)}
    on = {name: _on(joined, ranks) for name, ranks in by_role.items()}
    seats: dict[str, list[Assignment]] = {name: [] for name in by_role}
    known: dict[tuple[object, ...], tuple[Cells, dict[str, list[Assignment]]]] = {}
    for host, kind, own in placed:
        # Nodes that are alike get the same seats.
        key = (kind, own, host.name in joined and host.name, *[device.index for device in host.devices])
        if key not in known:
            there = {name: [each.own for each in ranks.get(host.name, ())] for name, ranks in on.items()}
            known[key] = tuple(map(add, kind.held, own)), seating(packer, host, kind, own, there)
        used[host.name], alike = known[key]
        for name, each in alike.items():
            turn = zip(each, missing[name], strict=False)
            seats[name] += [replace(seat, rank=rank, node=host.name) for seat, rank in turn]
    for name, new in seats.items():
        found = by_role[name]
        for seat in new:
            found[seat.rank] = seat
    nodes = Counter(used.values())
    idle = [node.name for node in sound if node.name not in used]
    spares = tuple(idle[max(len(idle) - request.spares, 0) :])
    lost = crossing(request, problem, nodes)
    # All ranks are placed now.
    full = cast(dict[str, list[Assignment]], by_role)
    assignments = tuple([each for role in request.roles for each in full[role.name]])
    return Placement(assignments, note(request, problem, nodes, spares, lost), spares, lost)


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
