"""Jobs and nodes for tests of places."""

from __future__ import annotations

from typing import Any

from unirun.collocation import (
    Inventory,
    Placement,
    parse_fake,
)
from unirun.spec.job import Entry, JobSpec, RoleSpec

ENTRY = Entry("script", "a.py")
TRAINER = RoleSpec("trainer", 1, Entry("trainer", "ppo:T"))


def job(*roles: RoleSpec, **more: Any) -> JobSpec:
    return JobSpec("job", "job-1", roles, tuple(role.name for role in roles), **more)


def role(name: str, count: int, **more: Any) -> RoleSpec:
    return RoleSpec(name, count, more.pop("entry", ENTRY), **more)


def ranks(**counts: int) -> list[RoleSpec]:
    """Roles that say nothing but how many ranks they have."""
    return [role(name, count) for name, count in counts.items()]


def hosts(text: str) -> Inventory:
    return parse_fake(f"fake:{text}")


def masks(placement: Placement) -> dict[str, list[tuple[str, ...] | None]]:
    found: dict[str, list[tuple[str, ...] | None]] = {}
    for each in placement.assignments:
        found.setdefault(each.role, []).append(each.devices)
    return found
