"""Faults of a request that do not depend on the nodes. All faults are reported at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations
from math import isfinite

from unirun.collocation.request import Request, RoleRequest
from unirun.collocation.slots import CPU
from unirun.errors import Fault

GROUPS = {
    "collocated": "collocations",
    "together": "host_collocations",
    "apart": "separations",
    "isolated": "isolations",
}
"""By field of a request: the key in the job file."""


def join(words: Iterable[object]) -> str:
    """``a, b, c``."""
    return ", ".join(str(word) for word in words)


def both(words: Iterable[object]) -> str:
    """``a, b and c``."""
    *first, last = [str(word) for word in words]
    return f"{', '.join(first)} and {last}" if first else last


def some(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def merged(names: Sequence[str], groups: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """The connected components of `names` that `groups` make, everything in the order of `names`."""
    home = {name: [name] for name in names}
    for group in groups:
        first = home[group[0]]
        for name in group[1:]:
            if home[name] is not first:
                first += home[name]
                home |= dict.fromkeys(home[name], first)
    order = {name: number for number, name in enumerate(names)}
    return list(dict.fromkeys(tuple(sorted(home[name], key=order.__getitem__)) for name in names))


def request_faults(request: Request) -> list[Fault]:
    """All faults of the roles and groups. Relations between roles are only checked when every name is known."""
    names = [role.name for role in request.roles]
    faults = [fault for role in request.roles for fault in _role_faults(role)]
    faults += [
        Fault(name, "two roles have this name", "names are unique")
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if request.spares < 0:
        faults.append(Fault("spares", f"expected 0 or more, found {request.spares}"))
    groups = list(_group_faults(request, names))
    ties = list(_tie_faults(request, names))
    if not groups and len(set(names)) == len(names):
        faults += _stack_faults(request)
        faults += _contradictions(request)
    return faults + groups + ties


def _role_faults(role: RoleRequest) -> Iterator[Fault]:
    name = role.name
    if role.count < 1:
        yield Fault(f"{name}.count", f"expected 1 or more, found {role.count}")
    if not 0 <= role.least <= role.count:
        yield Fault(f"{name}.least", f"expected 0 to {role.count}, found {role.least}")
    if role.slots <= 0 or (role.slots > 1 and role.slots.denominator != 1):
        fits = "use a whole number, or a share of less than 1"
        yield Fault(f"{name}.slots", f"a rank cannot have {role.slots} slots", fits)
    for what, size in (("per_node", role.per_node), ("per_group", role.per_group)):
        if size is None:
            continue
        if size < 1:
            yield Fault(f"{name}.{what}", f"expected 1 or more, found {size}")
        elif role.count // size * size < max(role.least, 1):
            divisors = [each for each in range(1, role.count + 1) if role.count % each == 0]
            count = (
                f"{role.count} ranks" if role.least == role.count else f"{role.least} to {role.count} ranks"
            )
            yield Fault(f"{name}.{what}", f"{size} does not divide {count}", f"use one of {join(divisors)}")
    if role.per_node and role.per_group and role.per_node % role.per_group:
        problem = f"a node with {role.per_node} ranks has no whole number of groups of {role.per_group}"
        yield Fault(f"{name}.per_group", problem, "use a divisor of per_node")
    if role.devices is not None:
        if role.device in (None, CPU):
            problem = "a list of devices is given, and the role runs on none"
            yield Fault(f"{name}.devices", problem, "leave it out, or name the type of device")
        elif not role.devices:
            yield Fault(f"{name}.devices", "the list is empty", "leave it out for any device")


def _group_faults(request: Request, names: Sequence[str]) -> Iterator[Fault]:
    for kind, key in GROUPS.items():
        for number, group in enumerate(getattr(request, kind)):
            where = f"{key}[{number}]"
            yield from _unknown(where, group, names)
            yield from (
                Fault(where, f"{name} is in it twice")
                for name in dict.fromkeys(group)
                if group.count(name) > 1
            )
            if len(group) < 2:
                yield Fault(where, "a group has two roles or more")


def _tie_faults(request: Request, names: Sequence[str]) -> Iterator[Fault]:
    for pair, weight in sorted(request.ties.weights.items()):
        where = f"weights[{join(pair)}]"
        yield from _unknown(where, pair, names)
        if not (isfinite(weight) and weight >= 0):
            yield Fault(where, f"expected 0 or more bytes per step, found {weight}")
    for number, part in enumerate(request.ties.parts):
        yield from _unknown(f"parts[{number}]", part, names)


def _unknown(where: str, group: Sequence[str], names: Sequence[str]) -> Iterator[Fault]:
    for name in dict.fromkeys(group):
        if name not in names:
            yield Fault(where, f"there is no role {name}", f"there are {join(names)}")


def _stack_faults(request: Request) -> Iterator[Fault]:
    roles = {role.name: role for role in request.roles}
    for names in merged(tuple(roles), request.collocated):
        if len(names) > 1:
            yield from _one_stack(both(names), [roles[name] for name in names])


def _one_stack(said: str, roles: Sequence[RoleRequest]) -> Iterator[Fault]:
    where = roles[0].name

    def differ(what: str, remedy: str) -> Fault:
        values = [getattr(role, what) for role in roles]
        if what == "devices":
            values = [join(value or ("any",)) for value in values]
        told = join(f"{role.name} {value}" for role, value in zip(roles, values, strict=True))
        return Fault(f"{where}.{what}", f"{said} are collocated and differ in {what}: {told}", remedy)

    if max(role.least for role in roles) > min(role.count for role in roles):
        yield differ("count", "give them the same count")
    if any(role.device is None for role in roles):
        yield differ("device", "a role without device has no slot to share")
    elif len({role.device for role in roles}) > 1:
        yield differ("device", "roles on different devices cannot share a slot")
    if len({role.per_node for role in roles if role.per_node is not None}) > 1:
        yield differ("per_node", "give them the same, or leave out all but one")
    whole = all(role.slots >= 1 for role in roles)
    if whole and len({role.slots for role in roles}) > 1:
        yield differ("slots", "give them the same number of slots")
    if not whole and (total := sum((role.slots for role in roles), Fraction())) > 1:
        told = " + ".join(str(role.slots) for role in roles)
        problem = f"{said} share a slot, and their shares {told} are {total}"
        yield Fault(f"{where}.slots", problem, f"give each at most 1/{len(roles)}")
    lists = [set(role.devices) for role in roles if role.devices is not None]
    if lists and not set.intersection(*lists):
        yield differ("devices", "name devices that all may have")


def _contradictions(request: Request) -> Iterator[Fault]:
    """Pairs of roles that one group joins, directly or through other groups, and another group separates."""
    names = tuple(role.name for role in request.roles)
    stacks = {name: stack for stack in merged(names, request.collocated) for name in stack}
    near = merged(names, (*request.collocated, *request.together))
    bundles = {name: bundle for bundle in near for name in bundle}
    for kind, homes, why in (
        ("together", stacks, "share a slot, and shall be on different slots"),
        ("isolated", stacks, "share a slot, and shall be on different NUMA nodes"),
        ("apart", bundles, "have ranks on the same node, and shall be on different nodes"),
    ):
        for number, group in enumerate(getattr(request, kind)):
            for one, other in combinations(group, 2):
                if other in homes[one]:
                    others = "" if homes is stacks else " or host_collocations"
                    links = f"{both(homes[one])} are joined by collocations{others}"
                    yield Fault(
                        f"{GROUPS[kind]}[{number}]",
                        f"{one} and {other} {why}",
                        f"{links}: drop one of the two",
                    )
