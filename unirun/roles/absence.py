"""Whether those who are waited for can still come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unirun.wire.messages import RoleView

_SETTLED = ("starting", "running", "succeeded")
"""Phases of a role in which a rank that has ended with 0 is not about to be started again."""

_OVER = ("failed", "stopped")


def never_comes(views: Sequence[RoleView], missing: Callable[[str, int], bool]) -> str:
    """Who will not come to a meeting of all ranks of these roles, in words; empty as long as all may.

    `missing` says whether a rank of a role is not there yet. A rank that has ended well comes again only if its role
    is started again; that is another meeting then.
    """
    for role in views:
        if role.phase in _OVER:
            return f"role {role.name} has {role.phase}"
        if role.phase not in _SETTLED:
            continue
        ended = [worker for worker in role.workers if worker.phase == "ended"]
        absent = [worker.rank for worker in ended if missing(role.name, worker.rank)]
        if absent and len(ended) == role.world_size:
            return f"role {role.name} has ended with exit code 0"
        if absent:
            return f"{role.name}:{absent[0]} has ended with exit code 0"
    return ""
