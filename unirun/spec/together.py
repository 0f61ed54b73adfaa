"""Checks of groups of roles, and of the names under which a trainer finds roles."""

from __future__ import annotations

from collections.abc import Sequence

from unirun.errors import Fault
from unirun.spec.job import RoleSpec
from unirun.spec.read import nearest

SHARING = ("collocations", "host_collocations")
"""Kinds of groups of which a role is in one at most."""

WHAT_GROUPS_SAY = {
    "collocations": "share devices",
    "host_collocations": "are on one node",
    "separations": "are on different nodes",
    "isolations": "are on different NUMA nodes",
}


def group_faults(key: str, groups: Sequence[Sequence[str]], roles: Sequence[RoleSpec]) -> list[Fault]:
    """The faults of the `groups` of roles that a job file has under `key`.

    A role may be in several groups of one kind, except groups that share. Contradictions between groups, and numbers of
    ranks that do not fit them, are found by the planner.
    """
    known = {role.name for role in roles if role.entry.kind != "trainer"}
    without = {
        role.name: "has no slots" if role.name in known else "is the trainer, which uses no device"
        for role in roles
        if not role.takes_slots
    }
    faults: list[Fault] = []
    home: dict[str, int] = {}
    for number, group in enumerate(groups):
        where = f"{key}[{number}]"
        if len(set(group)) < 2:
            remedy = f"name those that {WHAT_GROUPS_SAY[key]}"
            faults.append(Fault(where, f"{[*group]} names fewer than two roles", remedy))
        for name in group:
            if name in without and key == "collocations":
                faults.append(Fault(where, f"{name!r} {without[name]}", "leave it out"))
            elif name not in known and name not in without:
                faults.append(Fault(where, f"no role is called {name!r}", nearest(name, [*known])))
            elif name in home and (key in SHARING or home[name] == number):
                other = f"{key}[{home[name]}]"
                twice = "twice" if home[name] == number else f"in {other} as well"
                faults.append(Fault(where, f"role {name!r} is there {twice}", "name each role once"))
            home.setdefault(name, number)
    return [*dict.fromkeys(faults)]


def handle_faults(roles: Sequence[str]) -> list[Fault]:
    """Faults for roles with one name in the trainer: ``actor`` and ``Actor`` are both ``RG_ACTOR``."""
    first: dict[str, str] = {}
    faults = []
    for name in roles:
        handle = handle_name(name)
        other = first.setdefault(handle, name)
        if other != name:
            problem = f"the trainer would find both {other!r} and {name!r} as {handle}"
            faults.append(Fault(f"roles.{name}", problem, "rename one of them"))
    return faults


def handle_name(role: str) -> str:
    """The name under which the trainer finds `role`: ``udf-1`` is ``RG_UDF_1``."""
    return f"RG_{role.upper().replace('-', '_')}"
