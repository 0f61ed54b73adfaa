"""Reports of the ranks are matched by their numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import TrainingFailed
from unirun.train.lockstep import Finished, Lockstep, Reported, Round, Saved, dropped


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


def round_of(*saved: Saved, finished: bool = False) -> Round | None:
    """The last word on one round of ranks that have saved this before it."""
    lockstep = Lockstep(len(saved))
    said = (Finished(1, saved=each) if finished else Reported(1, {}, saved=each) for each in saved)
    return [lockstep.hear(rank, each) for rank, each in enumerate(said)][-1]


@pytest.mark.parametrize("finished", [False, True], ids=["reported", "finished"])
@pytest.mark.parametrize(
    ("saved", "problem"),
    [
        ([Saved(0), Saved(1), Saved(1)], "rank 0 no checkpoints, ranks 1-2 1 checkpoint"),
        ([Saved(1), Saved(1), Saved(2)], "rank 0 1 checkpoint, rank 2 2 checkpoints"),
        ([Saved(1, together=True), Saved(0), Saved(1)], "rank 0 1 checkpoint, rank 1 no checkpoints"),
    ],
)
def test_a_checkpoint_that_would_not_be_kept_is_an_error_at_once(
    saved: list[Saved], problem: str, *, finished: bool
) -> None:
    with pytest.raises(
        TrainingFailed,
        match=f"the ranks have saved unequally often: {problem}; every rank calls save_checkpoint",
    ):
        round_of(*saved, finished=finished)


def test_rank_0_may_save_alone_what_is_not_in_parts() -> None:
    assert round_of(Saved(3), Saved(0)) == Round(({}, {}), None)


class TestWhatIsNotInTheCheckpoint:
    def test_nothing_is_said_when_ranks_have_saved_the_same(self) -> None:
        same = Saved(1, outline={"model": 5, "epoch": 7})
        assert dropped([same, same, Saved(0)]) == ""

    def test_names_that_rank_0_does_not_have_and_other_values_are_told_with_their_ranks(self) -> None:
        found = round_of(
            Saved(1, outline={"model": 5, "rng": 1}),
            Saved(1, outline={"model": 5, "rng": 2, "mine": 3}),
            Saved(1, outline={"model": 5, "rng": 3}),
        )
        assert found is not None
        assert found.dropped == (
            "'rng' of ranks 1-2, 'mine' of rank 1 is not as that of rank 0: the checkpoint has that of rank 0, as none "
            "of it is a DTensor"
        )

    def test_a_sharded_one_has_the_names_of_all_ranks(self) -> None:
        own = Saved(1, sharded=True, outline={"rng": 1})
        assert dropped([own, Saved(1, sharded=True, outline={"rng": 1, "mine": 3})]) == ""
        assert dropped([own, Saved(1, sharded=True, outline={"rng": 2})]).startswith("'rng' of rank 1 ")
