"""`Party`: the ranks of one role that are members of a group."""

from __future__ import annotations

import re

from unirun.errors import UsageError
from unirun.roles.peers import RoleInfo
from unirun.values import Value

_RANKS = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*")
"""``0-3,7``"""


class Party(Value):
    """Ranks of `role` in ascending order; None: all of them. It is printed as it was written, ``actor:0-3``."""

    role: str
    ranks: tuple[int, ...] | None = None
    text: str = ""

    @classmethod
    def parse(cls, text: str) -> Party:
        """``actor`` or ``actor:0-3,7``. Raises `UsageError`."""
        role, colon, ranks = text.partition(":")
        if not colon:
            return cls(role, None, text)
        found: list[int] = []
        for each in ranks.split(",") if _RANKS.fullmatch(ranks) else ():
            first, _, last = each.partition("-")
            found += range(int(first), int(last or first) + 1)
        if not found or found != sorted(set(found)):
            raise UsageError(
                f"{text!r} names no ranks of {role}", f'write "{role}:0-3,7", in ascending order'
            )
        return cls(role, tuple(found), text)

    def members(self, info: RoleInfo) -> tuple[int, ...] | range:
        """The ranks, in a role as it is now. Raises `UsageError` for one that it does not have."""
        if self.ranks is None:
            return range(info.world_size)
        if self.ranks[-1] >= info.world_size:
            raise UsageError(
                f"{self} names rank {self.ranks[-1]} of {info.name}",
                f"it has ranks 0 to {info.world_size - 1}",
            )
        return self.ranks

    def __str__(self) -> str:
        return self.text
