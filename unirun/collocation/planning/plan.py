"""`plan`: a placement from a request and an inventory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

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
    Cells,
    NodeKind,
    Problem,
    Stack,
    both,
    join,
    names_of,
    problem_of,
    some,
)
from unirun.collocation.planning.solve import solve

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
