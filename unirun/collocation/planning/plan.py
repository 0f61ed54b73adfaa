"""`plan`: who sits where, from nothing but a request and an inventory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from unirun.collocation.inventory import Inventory, Node
from unirun.collocation.placement import Assignment, Placement
from unirun.collocation.planning.faults import request_faults
from unirun.collocation.planning.layout import assign
from unirun.collocation.planning.packing import Packer
from unirun.collocation.planning.problem import Cells, Problem, compile_request
from unirun.collocation.planning.solve import solve
from unirun.collocation.planning.wording import both, join, some
from unirun.collocation.request import Request
from unirun.errors import PlacementError


def plan(request: Request, inventory: Inventory) -> Placement:
    """Place all ranks of `request` on `inventory`: the same for the same arguments, always.

    Every constraint is kept. What goes from node to node is as little as can be found. Then roles that wait for each
    other are on as few nodes as they can be, each group of them for itself; then as few nodes are in use, and then the
    ranks of a role are kept together. Nodes come in the order of the inventory, ranks in that of nodes and slots. Where
    there is little to place (up to `exact.WORK` steps: some ten ranks on some nodes) the search is complete: what fits
    is found, and nothing is better. Beyond that, nodes are filled by a few rules, of which the best result counts.

    Raises `PlacementError`, with all faults of the request, or with what stands in the way and what would fit.
    """
    placement = find(request, inventory)
    if placement is None:
        # Slow to import, and needed only when nothing fits.
        from unirun.collocation.planning.shortage import does_not_fit

        raise does_not_fit(request, inventory)
    return placement


def find(request: Request, inventory: Inventory) -> Placement | None:
    """The same, and None where `plan` would look for what stands in the way, which takes longer than not to fit."""
    problem = checked(request)
    packer = Packer(problem)
    nodes, spares = usable(request, inventory)
    solution = solve(problem, nodes, packer)
    if solution is None:
        return None
    names = [node.name for node in nodes]
    by_role = assign(problem, packer, names, solution.rooms, solution.placed)
    there = Counter(cells for cells in solution.placed if any(cells))
    lost = crossing(request, problem, there, solution.counts)
    return Placement(in_order(request, by_role), note(request, problem, there, spares, lost), spares, lost)


def usable(request: Request, inventory: Inventory) -> tuple[tuple[Node, ...], tuple[str, ...]]:
    """The nodes that a plan may use, and the spares: the last of those that are not tainted."""
    sound = [node for node in inventory.nodes if node.name not in request.tainted]
    use = max(len(sound) - request.spares, 0)
    return tuple(sound[:use]), tuple(node.name for node in sound[use:])


def checked(request: Request) -> Problem:
    """The problem that `request` states. Raises `PlacementError` with everything that is wrong with it."""
    faults = request_faults(request)
    if not faults:
        problem, faults = compile_request(request)
        if not faults:
            return problem
    raise PlacementError(
        "\n".join(str(fault) for fault in faults),
        role=next((role.name for role in request.roles if faults[0].where.split(".")[0] == role.name), ""),
        needed=0,
        available=0,
        constraint=faults[0].where,
        faults=tuple(faults),
    )


def in_order(request: Request, by_role: Mapping[str, Sequence[Assignment]]) -> tuple[Assignment, ...]:
    """All assignments, roles in the order of the request."""
    return tuple([a for role in request.roles for a in by_role[role.name]])


def crossing(request: Request, problem: Problem, there: Mapping[Cells, int], counts: Sequence[int]) -> float:
    """What goes from node to node, in bytes per step. `there`: how many nodes have which cells, `counts` in all."""
    home = problem.home
    lost = 0.0
    for (one, other), weight in sorted(request.ties.weights.items()):
        a, b = home[one], home[other]
        pairs = counts[a] * counts[b]
        within = sum(cells[a] * cells[b] * number for cells, number in there.items())
        # In integers first, so that nothing crosses when all is on one node, and not nearly nothing.
        lost += weight * (pairs - within) / pairs if pairs else 0.0
    return lost


def note(
    request: Request, problem: Problem, there: Mapping[Cells, int], spares: Sequence[str], lost: float
) -> str:
    """What was decided, in words. `there`: how many nodes have which cells."""
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


def _parts(request: Request, problem: Problem, there: Mapping[Cells, int]) -> Iterator[str]:
    """Which roles that wait for each other, and need slots, are on fewer nodes than are in use."""
    heavy = {role.name for role in request.roles if role.device is not None}
    home = problem.home
    for part in request.ties.parts:
        names = [name for name in part if name in heavy]
        bundles = {home[name] for name in names}
        nodes = sum(number for cells, number in there.items() if any(cells[bundle] for bundle in bundles))
        if len(names) > 1 and nodes < sum(there.values()):
            yield f"{both(names)}, which wait for each other, on {some(nodes, 'node')}"
