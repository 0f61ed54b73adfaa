"""How one request differs from another: what is changed, which constraint is let go with it; and parts of requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from msgspec.structs import replace

from unirun.collocation.planning.faults import GROUPS
from unirun.collocation.planning.wording import both, join
from unirun.collocation.request import Request, RoleRequest, Ties
from unirun.values import Value

UNDONE = {
    "apart": "without separating {}",
    "isolated": "without isolating {}",
    "together": "without keeping {} on one node",
    "collocated": "without collocating {}",
}
NAMES = 3
"""So many nodes are named; more would not be read."""


class Change(Value):
    """One difference. `binds` is the constraint that is let go, of `role` if it is a role's; empty for fewer ranks."""

    text: str
    binds: str = ""
    role: str = ""


def changes(before: Request, after: Request) -> list[Change]:
    """What differs; `after` has the same roles, and no more of anything."""
    pairs = list(zip(before.roles, after.roles, strict=True))
    counts = [_counts(other) for one, other in pairs if (one.least, one.count) != (other.least, other.count)]
    fewer = [Change(join(counts))] if counts else []
    return [
        *fewer,
        *(change for one, other in pairs for change in _of_role(one, other)),
        *_of_groups(before, after),
        *_of_nodes(before, after),
    ]


def _counts(role: RoleRequest) -> str:
    """As in a job file: ``actor=4``, ``actor=2:8``."""
    return (
        f"{role.name}={role.count}" if role.least == role.count else f"{role.name}={role.least}:{role.count}"
    )


def _of_role(one: RoleRequest, other: RoleRequest) -> Iterator[Change]:
    name = one.name
    if one.slots != other.slots:
        yield Change(f"{name} slots {_written(other.slots)}", f"{name} slots {_written(one.slots)}", name)
    for what in ("per_node", "per_group"):
        size, there = getattr(one, what), getattr(other, what)
        if size != there:
            text = f"without {what} of {name}" if there is None else f"{name} {what} {there}"
            yield Change(text, f"{name} {what} {size}", name)
    if one.devices != other.devices:
        yield Change(f"any device for {name}", f"{name} devices {join(one.devices or ())}", name)


def _of_groups(before: Request, after: Request) -> Iterator[Change]:
    for kind in GROUPS:
        for group in getattr(before, kind):
            if group not in getattr(after, kind):
                yield Change(UNDONE[kind].format(both(group)), f"{kind} {both(group)}")


def _of_nodes(before: Request, after: Request) -> Iterator[Change]:
    if before.spares != after.spares:
        yield Change(f"spares {after.spares}", f"spares {before.spares}")
    back = sorted(before.tainted - after.tainted)
    if back:
        text = f"not excluding {both(back) if len(back) <= NAMES else f'{len(back)} of the nodes'}"
        yield Change(text, f"excluded {_few(sorted(before.tainted))}")


def _few(names: Sequence[str]) -> str:
    return join([*names[:NAMES], *(["…"] if len(names) > NAMES else [])])


def _written(slots: Fraction) -> str:
    """As in a job file: ``2``, ``0.5``, ``0.333``."""
    return f"{float(slots):.3g}"


def without_a_group(request: Request) -> Iterator[Request]:
    """`request` with one group less, for each of them."""
    for kind in reversed(GROUPS):
        groups = getattr(request, kind)
        for group in groups:
            rest: dict[str, Any] = {kind: tuple(other for other in groups if other is not group)}
            yield replace(request, **rest)


def without_a_constraint(request: Request) -> Iterator[Request]:
    """`request` with one thing less that it asks for: spares, unused nodes, a group, or what a role asks for."""
    if request.spares:
        yield replace(request, spares=0)
    if request.tainted:
        yield replace(request, tainted=frozenset())
    yield from without_a_group(request)
    for at, role in enumerate(request.roles):
        less: list[dict[str, Any]]
        less = [
            {what: None} for what in ("devices", "per_group", "per_node") if getattr(role, what) is not None
        ]
        less += [{"slots": Fraction(1)}] if role.slots > 1 else []
        for each in less:
            yield replace(
                request, roles=(*request.roles[:at], replace(role, **each), *request.roles[at + 1 :])
            )


def part_of(request: Request, names: Sequence[str]) -> Request:
    """`request`, with the roles called `names` and no others."""
    groups: dict[str, Any] = {kind: tuple(_cut(getattr(request, kind), names)) for kind in GROUPS}
    roles = tuple(role for role in request.roles if role.name in names)
    return replace(request, roles=roles, ties=Ties(), **groups)


def with_part(request: Request, before: Request, after: Request) -> Request:
    """`request` with what was changed from `before`, a part of it, to `after`."""
    changed = {role.name: role for role in after.roles}
    names = [role.name for role in before.roles]
    groups: dict[str, Any] = {}
    for kind in GROUPS:
        gone = {*getattr(before, kind)}.difference(getattr(after, kind))
        groups[kind] = tuple(
            group for group in getattr(request, kind) if gone.isdisjoint(_cut([group], names))
        )
    return replace(
        request,
        roles=tuple(changed.get(role.name, role) for role in request.roles),
        spares=min(request.spares, after.spares),
        tainted=request.tainted & after.tainted,
        **groups,
    )


def _cut(groups: Sequence[Sequence[str]], names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for group in groups:
        cut = tuple(name for name in group if name in names)
        if len(cut) > 1:
            yield cut
