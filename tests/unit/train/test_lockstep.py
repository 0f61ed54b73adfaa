"""Reports of the ranks are matched by their numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import TrainingFailed
from unirun.train.lockstep import Finished, Lockstep, Reported, Round


@given(st.permutations(range(4)))
def test_a_round_is_in_rank_order_whoever_comes_first(order: list[int]) -> None:
    lockstep = Lockstep(4)
    heard = [lockstep.hear(rank, Reported(1, {"rank": rank}, 7 if rank == 0 else None)) for rank in order]
    assert heard[:3] == [None] * 3
    assert heard[3] == Round(tuple({"rank": rank} for rank in range(4)), 7)


def test_rounds_follow_each_other_and_end_when_all_ranks_have_finished() -> None:
    lockstep = Lockstep(2)
    for number in (1, 2):
        assert lockstep.hear(0, Reported(number, {})) is None
        assert lockstep.hear(1, Reported(number, {})) is not None
    assert lockstep.hear(1, Finished(2)) is None
    assert lockstep.hear(0, Finished(2, 3)) == Round(None, 3)


@pytest.mark.parametrize("first", ["finished", "reported"])
def test_ranks_that_report_unequally_often_are_named(first: str) -> None:
    lockstep = Lockstep(3)
    said: list[tuple[int, Reported | Finished]] = [(0, Finished(5)), (2, Reported(6, {}))]
    for rank, each in said if first == "finished" else reversed(said):
        if rank == (0 if first == "finished" else 2):
            assert lockstep.hear(rank, each) is None
            continue
        with pytest.raises(TrainingFailed, match=r"rank 0 5 times, rank 2 at least 6 times"):
            lockstep.hear(rank, each)
