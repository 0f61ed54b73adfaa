"""Sets of ranks of roles, as users name them: ``actor``, ``actor:0-3,7``; and the ranks in a group of several."""

from __future__ import annotations

import re
from collections.abc import Sequence

from unirun.errors import UsageError
from unirun.roles.peers import RoleInfo
from unirun.values import Value

_RANKS = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*")
"""``0-3,7``"""


class RankSet(Value):
    """Ranks of `role` in ascending order; None: all of them. It is printed as it was written, ``actor:0-3``."""

    role: str
    ranks: tuple[int, ...] | None = None
    text: str = ""

    @classmethod
    def parse(cls, text: str) -> RankSet:
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


RankSets = Sequence[RankSet]
Infos = Sequence[RoleInfo]


def group_rank(rank_sets: RankSets, infos: Infos, role: str, rank: int) -> int | None:
    """The rank in the group of a rank of a role: by role as named, then by rank. None: it is no member."""
    before = 0
    for rank_set, info in zip(rank_sets, infos, strict=True):
        members = rank_set.members(info)
        if rank_set.role == role:
            return before + members.index(rank) if rank in members else None
        before += len(members)
    return None
