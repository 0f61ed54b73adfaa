"""Reports of the ranks are matched by their numbers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from unirun.errors import TrainingFailed
from unirun.train.lockstep import Lockstep, Reported, Round, dropped


@given(st.permutations(range(4)))
def test_a_round_is_in_rank_order_whoever_comes_first(order: list[int]) -> None:
    lockstep = Lockstep(4)
    heard = [lockstep.hear(rank, Reported(1, {"rank": rank}, 7 if rank == 0 else None)) for rank in order]
    assert heard[:3] == [None] * 3
    assert heard[3] == (tuple({"rank": rank} for rank in range(4)), 7)


def test_rounds_follow_each_other_and_end_when_all_ranks_have_finished() -> None:
    lockstep = Lockstep(2)
    for number in (1, 2):
        assert lockstep.hear(0, Reported(number, {})) is None
        assert lockstep.hear(1, Reported(number, {})) is not None
    assert lockstep.hear(1, Reported(3, ended=True)) is None
    assert lockstep.hear(0, Reported(3, {}, 3, ended=True)) == (None, 3)


@pytest.mark.parametrize("first", ["finished", "reported"])
def test_ranks_that_report_unequally_often_are_named(first: str) -> None:
    lockstep = Lockstep(3)
    said = [(0, Reported(6, ended=True)), (2, Reported(6, {}))]
    for rank, each in said if first == "finished" else reversed(said):
        if rank == (0 if first == "finished" else 2):
            assert lockstep.hear(rank, each) is None
            continue
        with pytest.raises(TrainingFailed, match=r"rank 0 5 times, rank 2 at least 6 times"):
            lockstep.hear(rank, each)


def saved(count: int, **more: Any) -> Reported:
    """A report of a rank that has saved so many checkpoints."""
    return Reported(1, saves=count, **more)


def rounds_of(*rounds: list[Reported], end: list[Reported] | None = None) -> list[tuple[Round | None, str]]:
    """The result of the last report of each round and of the end, with the values that are dropped. The ranks have
    saved these checkpoints before."""
    said = [[replace(each, number=number) for each in some] for number, some in enumerate(rounds, 1)]
    said += [[replace(each, number=len(rounds) + 1, ended=True) for each in end]] if end is not None else []
    lockstep = Lockstep(len(said[0]))
    return [
        ([lockstep.hear(rank, each) for rank, each in enumerate(one)][-1], lockstep.dropped) for one in said
    ]


UNEQUAL = [
    ([saved(0), saved(1), saved(1)], "rank 0 no checkpoints, ranks 1-2 1 checkpoint"),
    ([saved(1), saved(1), saved(2)], "rank 0 1 checkpoint, rank 2 2 checkpoints"),
    ([saved(1, together=True), saved(0), saved(1)], "rank 0 1 checkpoint, rank 1 no checkpoints"),
]


@pytest.mark.parametrize("ends", [False, True], ids=["reported again", "finished"])
@pytest.mark.parametrize(("reports", "problem"), UNEQUAL)
def test_a_checkpoint_that_would_not_be_kept_is_an_error_of_the_next_round_and_of_the_end(
    reports: list[Reported], problem: str, *, ends: bool
) -> None:
    with pytest.raises(
        TrainingFailed,
        match=f"the ranks have saved unequally often: {problem}; every rank calls save_checkpoint",
    ):
        rounds_of(*[reports] * (1 if ends else 2), end=reports if ends else None)


def test_another_rank_than_0_that_saves_alone_again_and_again_is_an_error_of_the_second_round() -> None:
    with pytest.raises(TrainingFailed, match="rank 0 no checkpoints, rank 1 2 checkpoints"):
        rounds_of([saved(0), saved(1)], [saved(0), saved(2)])


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1, max_size=4),
    st.booleans(),
)
def test_ranks_that_have_saved_unequally_often_may_do_so_at_one_report_and_not_at_the_end(
    saves: list[list[int]], together: bool
) -> None:
    """`saves` are the checkpoints that each rank saves before each report; the last ones come before the end."""
    totals = [[sum(some[each] for some in saves[: at + 1]) for each in range(3)] for at in range(len(saves))]

    def lags(counts: list[int]) -> dict[int, int]:
        """The ranks with a checkpoint that rank 0 has not, or without one that needs all; and how far all have come."""
        return {
            each: min(count, counts[0])
            for each, count in enumerate(counts)
            if count > counts[0] or (together and count < counts[0])
        }

    wrong = lags(totals[-1])
    for before, after in pairwise(totals[:-1]):
        wrong |= dict(lags(before).items() & lags(after).items())
    said = [[saved(count, together=together and count > 0) for count in counts] for counts in totals]
    try:
        found = rounds_of(*said[:-1], end=said[-1])
    except TrainingFailed as error:
        assert wrong
        assert error.problem.startswith("the ranks have saved unequally often: rank 0 ")
    else:
        assert not wrong
        assert [each is not None for each, _ in found] == [True] * len(saves)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_save_by_the_clock_may_do_so_on_both_sides_of_a_report(
    *, together: bool, late: int
) -> None:
    def both(early: int, count: int) -> list[Reported]:
        counts = [count, early] if late == 0 else [early, count]
        return [saved(each, together=together and each > 0) for each in counts]

    # The late rank lags at rounds 2 and 3, and has saved between them.
    found = rounds_of(both(0, 0), both(1, 0), both(2, 1), both(2, 2), end=both(2, 2))
    assert [each is not None and not dropped for each, dropped in found] == [True] * 5


def test_rank_0_may_save_alone_what_is_not_in_parts() -> None:
    assert rounds_of([saved(3), saved(0)], [saved(3), saved(0)]) == [((({}, {}), None), "")] * 2


class TestWhatIsNotInTheCheckpoint:
    def test_nothing_is_said_when_ranks_have_saved_the_same(self) -> None:
        same = saved(1, outline={"model": 5, "epoch": 7})
        assert dropped([same, same, saved(0)]) == ""

    def test_names_that_rank_0_does_not_have_and_other_values_are_told_with_their_ranks(self) -> None:
        ((_, found),) = rounds_of(
            [
                saved(1, outline={"model": 5, "rng": 1}),
                saved(1, outline={"model": 5, "rng": 2, "mine": 3}),
                saved(1, outline={"model": 5, "rng": 3}),
            ]
        )
        assert found == (
            "'rng' of ranks 1-2, 'mine' of rank 1 differs from the value of rank 0: the checkpoint has that of rank 0, "
            "as none of it is a DTensor"
        )

    @pytest.mark.parametrize("late", [0, 1])
    def test_the_outlines_of_one_checkpoint_may_come_with_two_reports(self, late: int) -> None:
        outlines = [{"model": 5, "rng": 1}, {"model": 5, "rng": 2}]
        first = [saved(0) if rank == late else saved(1, outline=outlines[rank]) for rank in range(2)]
        then = [saved(1, outline=outlines[rank]) if rank == late else saved(1) for rank in range(2)]
        (_, before), (_, after) = rounds_of(first, then)
        assert (before, after.split(" differs ")[0]) == ("", "'rng' of rank 1")

    def test_a_sharded_one_has_the_names_of_all_ranks(self) -> None:
        own = saved(1, sharded=True, outline={"rng": 1})
        assert dropped([own, saved(1, sharded=True, outline={"rng": 1, "mine": 3})]) == ""
        assert dropped([own, saved(1, sharded=True, outline={"rng": 2})]).startswith("'rng' of rank 1 ")
