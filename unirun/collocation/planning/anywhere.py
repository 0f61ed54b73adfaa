"""Roles that may be on any node: they need no slot, and no constraint and no edge names them.

They are not part of the search, so that the other roles are where they would be without them, and a hundred of them
cost nothing. Their ranks go to the first node in use.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from unirun.collocation.placement import Assignment, Placement
from unirun.collocation.planning.problem import GROUPS, join, some
from unirun.collocation.request import Request, RoleRequest


def searched(request: Request) -> Request:
    """`request` without the roles that may be anywhere."""
    groups = [group for kind in GROUPS for group in getattr(request, kind)]
    named = {name for group in (*groups, *request.ties.weights) for name in group}
    named |= {name for part in request.ties.parts if len(part) > 1 for name in part}

    def bound(role: RoleRequest) -> bool:
        needs = (role.device, role.devices, role.per_node, role.component)
        return role.name in named or any(need is not None for need in needs)

    roles = tuple(role for role in request.roles if bound(role))
    return request if len(roles) == len(request.roles) else replace(request, roles=roles)


def none_in_use(request: Request, usable: Sequence[str]) -> Placement:
    """The placement of a request without roles: only spares, the last of the nodes."""
    return Placement((), "", tuple(usable[max(len(usable) - request.spares, 0) :]))


def with_the_others(
    request: Request, placement: Placement, usable: Sequence[str], previous: Placement | None = None
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
