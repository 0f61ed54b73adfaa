"""`plan`: who sits where, from nothing but a request and an inventory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from unirun.collocation.inventory import Inventory
from unirun.collocation.placement import Assignment, Placement
from unirun.collocation.planning.layout import assign
from unirun.collocation.planning.packing import Packer
from unirun.collocation.planning.problem import Problem
from unirun.collocation.planning.shortage import checked, does_not_fit, usable
from unirun.collocation.planning.solve import solve
from unirun.collocation.planning.wording import both, join
from unirun.collocation.request import Request


def plan(request: Request, inventory: Inventory) -> Placement:
    """Place all ranks of `request` on `inventory`: the same for the same arguments, always.

    Every constraint is kept. What goes from node to node is as little as can be found, then as few nodes are used, then
    the ranks of a role are kept together; nodes come in the order of the inventory, and ranks in the order of nodes and
    slots. Where there is little to place (up to `exact.WORK` steps: some ten ranks on some nodes) the search is
    complete: what fits is found, and nothing is better. Beyond that, nodes are filled by a few rules, of which the best
    result counts.

    Raises `PlacementError`, with all faults of the request, or with what stands in the way and what would fit.
    """
    problem = checked(request)
    packer = Packer(problem)
    nodes, spares = usable(request, inventory)
    solution = solve(problem, nodes, packer)
    if solution is None:
        raise does_not_fit(request, inventory)
    names = [node.name for node in nodes]
    by_role = assign(problem, packer, names, solution.rooms, solution.placed)
    there: dict[str, tuple[int, ...]] = {
        name: cells for name, cells in zip(names, solution.placed, strict=True) if any(cells)
    }
    lost = crossing(request.weights, problem, there.values(), solution.counts)
    return Placement(
        in_order(request, by_role), note(request, problem, len(there), spares, lost), spares, lost
    )


def in_order(request: Request, by_role: Mapping[str, Sequence[Assignment]]) -> tuple[Assignment, ...]:
    """All assignments, roles in the order of the request."""
    return tuple([a for role in request.roles for a in by_role[role.name]])


def crossing(
    weights: Mapping[tuple[str, str], float],
    problem: Problem,
    placed: Iterable[Sequence[int]],
    counts: Sequence[int],
) -> float:
    """What goes from node to node, in bytes per step, when nodes have the cells `placed`, `counts` in all."""
    kinds: dict[Sequence[int], int] = {}
    for cells in placed:
        kinds[cells] = kinds.get(cells, 0) + 1
    home = {name: number for number, bundle in enumerate(problem.bundles) for name in bundle.names}
    lost = 0.0
    for (one, other), weight in sorted(weights.items()):
        a, b = home[one], home[other]
        pairs = counts[a] * counts[b]
        within = sum(cells[a] * cells[b] * number for cells, number in kinds.items())
        # In integers first, so that nothing crosses when all is on one node, and not nearly nothing.
        lost += weight * (pairs - within) / pairs if pairs else 0.0
    return lost


def note(request: Request, problem: Problem, nodes: int, spares: Sequence[str], lost: float) -> str:
    """What was decided, in words."""
    words = [f"{nodes} {'node' if nodes == 1 else 'nodes'} in use"]
    for stack in problem.stacks:
        if len(stack.roles) > 1:
            shares = [f"{stack.share(role):.3g}" for role in stack.roles]
            words.append(f"{both(role.name for role in stack.roles)} share slots, {both(shares)} of each")
    words += [f"{both(group)} on the same nodes" for group in request.together]
    words += [f"{both(group)} on different nodes" for group in request.apart]
    words += [f"{both(group)} on different NUMA nodes" for group in request.isolated]
    if spares:
        words.append(f"{join(spares)} held back")
    if total := sum(sorted(request.weights.values())):
        words.append(f"{100 * lost / total:.0f} % of what roles exchange goes between nodes")
    return "; ".join(words)
