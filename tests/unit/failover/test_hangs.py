"""The ranks of a role that are late, and those of them that hang."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from unirun.failover.hangs import HangTimeouts, due_in, is_late, is_noticed, judge, notice
from unirun.values import WorkerId
from unirun.wire.reports import RankProgress, Wait

LIMITS = HangTimeouts(10.0, first_step=100.0)
REDUCE, BROADCAST = Wait("default_pg", 7, "all_reduce"), Wait("default_pg", 7, "broadcast")


def rank(
    number: int, *, quiet: float = 12.0, age: float = 500.0, count: int = 5, **about: Any
) -> RankProgress:
    """A rank that is late unless something else is said."""
    return RankProgress(WorkerId("actor", number, 0), quiet=quiet, age=age, count=count, **about)


def waiting(number: int, wait: Wait = REDUCE, **about: Any) -> RankProgress:
    return rank(number, waits=(wait,), **about)


def hung(*ranks: RankProgress) -> dict[int, str]:
    return {worker.rank: why for worker, why in judge(ranks, LIMITS).items()}


class TestLateness:
    def test_a_rank_is_late_when_it_has_made_no_progress_for_the_time_out(self) -> None:
        assert [is_late(rank(0, quiet=quiet), LIMITS) for quiet in (9.9, 10.0)] == [False, True]

    def test_a_first_step_may_take_longer(self) -> None:
        assert due_in(rank(0, count=0, quiet=30.0, age=30.0), LIMITS) == 70.0
        assert is_late(rank(0, count=0, quiet=100.0, age=100.0), LIMITS)

    def test_the_time_out_begins_after_an_allowance(self) -> None:
        assert due_in(rank(0, quiet=50.0, allowed=3.0), LIMITS) == 13.0

    @given(st.tuples(*[st.floats(0, 300)] * 3).map(sorted), st.floats(-300, 300), st.integers(0, 2))
    def test_a_rank_is_late_at_the_same_time_whenever_it_is_looked_at(
        self, times: list[float], allowance: float, count: int
    ) -> None:
        began, last, now = times
        deadline = last + LIMITS.timeout
        if count == 0:
            deadline = max(deadline, began + LIMITS.first_step)
        if allowance > 0:
            # It has an allowance until then.
            deadline = max(deadline, now + allowance + LIMITS.timeout)
        about = rank(0, quiet=now - last, age=now - began, count=count, allowed=max(allowance, 0.0))
        assert due_in(about, LIMITS) == pytest.approx(deadline - now)

    def test_a_rank_without_work_is_never_late(self) -> None:
        assert not is_late(rank(0, quiet=1e6, idle=True), LIMITS)


class TestTheRankThatHangs:
    def test_it_is_the_one_that_is_not_in_the_collective(self) -> None:
        found = hung(waiting(0), rank(1, at="train.py:3 in step"), waiting(2))
        assert found == {
            1: "hangs: no progress for 12.0 s: actor:0,2 wait for it in all_reduce 7 of default_pg; it was at "
            "train.py:3 in step"
        }

    def test_it_is_late_before_those_that_wait_for_it(self) -> None:
        assert set(hung(waiting(0, quiet=9.0), rank(1), waiting(2, quiet=0.1))) == {1}

    def test_a_stopped_one_is_named_although_its_page_says_that_it_waits(self) -> None:
        assert hung(waiting(0), waiting(1, state="T", mute=12.0), waiting(2)) == {
            1: "hangs: no progress for 12.0 s: it is stopped"
        }

    def test_one_that_has_not_begun_is_named_and_not_those_that_wait_for_it_to_join(self) -> None:
        others = rank(0, count=0), rank(2, count=0, mute=12.0)
        assert hung(others[0], rank(1, count=0, age=120.0, quiet=120.0, begun=False), others[1]) == {
            1: "hangs: its process has not come to the code of its role for 120.0 s"
        }
        assert hung(rank(1, count=0, age=90.0, quiet=90.0, begun=False)) == {}

    def test_one_whose_threads_do_not_run_holds_the_gil(self) -> None:
        found = hung(waiting(0), rank(1, mute=11.0, at="train.py:3 in step"), waiting(2))
        assert set(found) == {1}
        assert "one of its threads holds the GIL, no other has run for 11 s" in found[1]

    def test_one_in_another_collective_than_the_others(self) -> None:
        found = hung(waiting(0), waiting(1, BROADCAST), waiting(2))
        assert set(found) == {1}
        assert "it waits in broadcast 7 of default_pg, the others in all_reduce 7 of default_pg" in found[1]

    def test_one_that_is_behind_in_the_collectives_of_its_group(self) -> None:
        ahead, behind = waiting(0), waiting(1, Wait("default_pg", 6, "all_reduce"))
        assert hung(ahead, behind).keys() == hung(behind, ahead).keys() == {1}

    def test_of_two_in_different_collectives_of_one_number_it_is_the_same_whoever_answers_first(self) -> None:
        one, other = waiting(0), waiting(1, BROADCAST)
        assert hung(one, other) == hung(other, one)

    def test_a_rank_outside_of_a_group_is_not_missed_in_it(self) -> None:
        """Ranks 0 and 1 wait for each other in a group of their own, and rank 2 for nobody."""
        tensor = Wait("tensor", 3, "all_gather", "0,1")
        assert set(hung(waiting(0, tensor), rank(1), rank(2, quiet=1.0))) == {1}
        assert hung(waiting(0, tensor), waiting(1, tensor), rank(2)) == {}

    def test_those_that_wait_for_a_rank_that_waits_itself_are_innocent(self) -> None:
        """Rank 0 waits for 1, which waits for 2."""
        left, right = Wait("left", 1, "all_reduce", "0,1"), Wait("right", 1, "all_reduce", "1,2")
        assert set(hung(waiting(0, left), waiting(1, right), rank(2))) == {2}

    def test_without_collectives_it_is_the_one_that_has_come_least_far(self) -> None:
        assert set(hung(rank(0, step=8), rank(1, step=7), rank(2, step=8))) == {1}
        assert set(hung(rank(0, step=90, quiet=0.1), rank(1, step=7))) == {1}


class TestNoRankHangs:
    @pytest.mark.parametrize("about", [{"allowed": 5.0}, {"quiet": 1.0}, {"idle": True}])
    def test_while_the_rank_that_is_waited_for_may_take_its_time(self, about: dict[str, Any]) -> None:
        assert hung(waiting(0), rank(1, **about), waiting(2)) == {}

    def test_while_a_debugger_holds_one(self) -> None:
        assert said(waiting(0), rank(1, traced=True, state="t")) == "a debugger holds actor:1"
        assert hung(waiting(0), rank(1, traced=True, state="t")) == {}

    def test_when_all_wait_in_the_same_collective(self) -> None:
        """They may wait for another role, or the network stands still."""
        assert hung(*map(waiting, range(3))) == {}

    def test_when_the_ranks_of_the_group_are_not_known(self) -> None:
        """As those of a group across roles: a rank of another role may be missing."""
        across = Wait("actor+rollout", 3, "broadcast", "?")
        assert hung(waiting(0, across), waiting(1, across), rank(2)) == {}

    def test_when_none_has_ever_reported_and_none_waits(self) -> None:
        """They may send and receive, which nobody counts."""
        assert hung(*(rank(number, count=0) for number in range(3))) == {}


def said(*ranks: RankProgress) -> str:
    """The text of the notice about these ranks, empty if there is none."""
    found = notice(ranks, LIMITS)
    return found.text if found is not None else ""


class TestTheNotice:
    def test_it_says_who_is_late_and_where(self) -> None:
        assert said(waiting(0, step=8), rank(1, step=7), rank(2, step=9, quiet=1.0)) == (
            "actor:0-1: no progress for 12 s, at steps 7 to 8; actor:0 in all_reduce 7 of default_pg, not there: "
            "actor:1-2; the others are at step 9"
        )

    def test_a_script_that_reports_nothing_is_late_in_a_collective_alone(self) -> None:
        silent: dict[str, Any] = {"count": 0, "quiet": 1000.0, "age": 1000.0}
        assert said(rank(0, **silent), rank(1, **silent)) == ""
        assert said(waiting(0, count=0), rank(1, **silent)) == (
            "actor:0-1: no progress for 1000 s; actor:0 in all_reduce 7 of default_pg, not there: actor:1"
        )

    def test_its_seconds_are_those_of_the_wait(self) -> None:
        found = notice([waiting(0, count=0), rank(1, count=0, quiet=1000.0)], LIMITS)
        assert found is not None
        assert found.seconds == 12.0

    def test_a_wait_is_no_first_step_but_a_call_may_be_one(self) -> None:
        young: dict[str, Any] = {"count": 0, "age": 12.0}
        assert is_noticed(waiting(0, **young), LIMITS)
        assert not is_noticed(rank(0, calls=1, **young), LIMITS)
        assert is_noticed(rank(0, calls=1, count=0, quiet=200.0, age=200.0), LIMITS)

    def test_no_rank_is_late_that_waits_for_one_with_an_allowance(self) -> None:
        assert said(waiting(0), rank(1, allowed=5.0)) == ""
        assert said(waiting(0), rank(1), rank(2)) != ""

    def test_nor_one_that_waits_for_such_a_rank_by_way_of_others(self) -> None:
        pairs = {ranks: Wait("pair", 3, "all_gather", ranks) for ranks in ("0,1", "0,2", "2,3")}
        chain = [waiting(3, pairs["2,3"]), waiting(2, pairs["0,2"]), waiting(1, pairs["0,1"])]
        assert said(*chain, rank(0, allowed=5.0)) == ""
        assert said(*chain, rank(0)).startswith("actor:0-3: ")
        # The ranks of another pair are late: none of them waits for the one with the allowance.
        other = Wait("pair", 3, "all_gather", "4,5")
        assert said(*chain, rank(0, allowed=5.0), waiting(4, other), rank(5)).startswith("actor:4-5: ")
        # So does one in a collective of all ranks.
        assert said(*chain[:2], waiting(1), rank(0, allowed=5.0)) == ""

    def test_a_role_of_ten_thousand_ranks_costs_a_fraction_of_a_second(self) -> None:
        """Half of them are not there. The master does nothing else meanwhile."""
        for group in ("", "{},{}"):
            there = (
                waiting(n, Wait("g", 1, "all_reduce", group.format(n - 1, n))) for n in range(1, 10_000, 2)
            )
            found = [*there, *(rank(n) for n in range(0, 10_000, 2))]
            began = time.process_time()
            assert len(judge(found, LIMITS)) == 5000
            assert notice(found, LIMITS) is not None
            assert time.process_time() - began < 1.0

    def test_a_rank_outside_of_the_group_is_not_named(self) -> None:
        tensor = Wait("tensor", 3, "all_gather", "0,1")
        assert said(waiting(0, tensor, count=0), rank(1, count=0), rank(2, count=0)) == (
            "actor:0-1: no progress for 12 s; actor:0 in all_gather 3 of tensor, not there: actor:1"
        )

    def test_a_rank_in_another_collective_and_one_that_is_stopped_are_where_they_are(self) -> None:
        assert said(waiting(0, count=0), waiting(1, BROADCAST, count=0)) == (
            "actor:0-1: no progress for 12 s; actor:0 in all_reduce 7 of default_pg; actor:1 in broadcast 7 of default_pg"
        )
        assert said(waiting(0), rank(1, count=0, state="T")).endswith("; stopped: actor:1")


ranks = st.builds(
    rank,
    st.integers(0, 7),
    quiet=st.floats(0, 100),
    count=st.integers(0, 3),
    step=st.integers(-1, 3),
    idle=st.booleans(),
    allowed=st.sampled_from([0.0, 0.0, 5.0]),
    waits=st.lists(
        st.builds(Wait, st.sampled_from("gh"), st.integers(1, 3), st.sampled_from("ab")), max_size=2
    ).map(tuple),
    state=st.sampled_from(["S", "R", "T"]),
    mute=st.sampled_from([0.0, 50.0]),
)


@given(st.lists(ranks, max_size=8, unique_by=lambda each: each.worker))
@examples(200)
def test_a_rank_that_is_not_late_never_hangs(found: list[RankProgress]) -> None:
    late = {each.worker for each in found if is_late(each, LIMITS)}
    assert judge(found, LIMITS).keys() <= late


@given(st.lists(ranks, max_size=8, unique_by=lambda each: each.worker))
@examples(200)
def test_the_verdict_does_not_depend_on_the_order_of_the_ranks_that_are_asked(
    found: list[RankProgress],
) -> None:
    halted = [each for each in found if is_late(each, LIMITS) and (each.state == "T" or each.mute > 2)]
    if halted:
        assert judge(found, LIMITS).keys() == judge(found[::-1], LIMITS).keys()
