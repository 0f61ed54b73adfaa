"""The members of a group, by roles and ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import UsageError
from unirun.roles.peers import RoleInfo
from unirun.roles.rank_sets import RankSet, group_rank

ACTOR, ROLLOUT = RoleInfo("actor", 4, 0), RoleInfo("rollout", 3, 0)


@pytest.mark.parametrize(
    ("text", "members"),
    [("actor", (0, 1, 2, 3)), ("actor:2", (2,)), ("actor:0-2", (0, 1, 2)), ("actor:0,2-3", (0, 2, 3))],
)
def test_a_rank_set_is_all_ranks_of_a_role_or_some(text: str, members: tuple[int, ...]) -> None:
    rank_set = RankSet.parse(text)
    assert (tuple(rank_set.members(ACTOR)), str(rank_set)) == (members, text)


@pytest.mark.parametrize(
    "text", ["actor:", "actor:x", "actor:1,0", "actor:1,1", "actor:2-1", "actor:-1", "actor:0;1"]
)
def test_what_names_no_ranks_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match='write "actor:0-3,7", in ascending order'):
        RankSet.parse(text)


def test_a_rank_that_a_role_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="actor:3-4 names rank 4 of actor; it has ranks 0 to 3"):
        RankSet.parse("actor:3-4").members(ACTOR)


def test_ranks_of_a_group_are_ordered_by_role_then_by_rank() -> None:
    rank_sets = [RankSet.parse("rollout:1-2"), RankSet.parse("actor:0,3")]
    ranks = [
        group_rank(rank_sets, [ROLLOUT, ACTOR], role, rank)
        for role, rank in [
            ("rollout", 0),
            ("rollout", 1),
            ("rollout", 2),
            ("actor", 0),
            ("actor", 1),
            ("actor", 3),
            ("critic", 0),
        ]
    ]
    assert ranks == [None, 0, 1, 2, None, 3, None]


@given(st.sets(st.integers(0, 3), min_size=1), st.sets(st.integers(0, 2), min_size=1))
def test_each_member_has_one_rank_of_the_group(actors: set[int], rollouts: set[int]) -> None:
    rank_sets = [
        RankSet.parse(f"{role}:{','.join(map(str, sorted(some)))}")
        for role, some in (("actor", actors), ("rollout", rollouts))
    ]
    found = [group_rank(rank_sets, [ACTOR, ROLLOUT], "actor", rank) for rank in range(4)]
    found += [group_rank(rank_sets, [ACTOR, ROLLOUT], "rollout", rank) for rank in range(3)]
    assert [rank for rank in found if rank is not None] == list(range(len(actors) + len(rollouts)))
