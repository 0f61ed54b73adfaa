"""Of several failures the cause is the first that is not about a lost peer, else a rank that has not failed."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from unirun.failover.diagnosis import is_consequence
from unirun.failover.restart_or_end import diagnose, episode
from unirun.failover.state import Exit, Failure
from unirun.values import WorkerId

PEER = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:4242"
TIMED_OUT = "RuntimeError: [gloo/x.cc:78] Timed out waiting 15000ms for recv operation to complete"
OWN = "ValueError: loss is nan"

failures = st.builds(
    Failure,
    worker=st.builds(WorkerId, st.sampled_from(["actor", "rollout"]), st.integers(0, 3), st.just(0)),
    generation=st.integers(0, 2),
    node=st.just("n0"),
    time=st.integers(0, 400).map(lambda n: n / 8),
    exit=st.sampled_from([Exit(code=1), Exit(signal=9)]),
    message=st.sampled_from(["", PEER, OWN]),
)
several = st.lists(
    failures, min_size=1, max_size=8, unique_by=lambda f: (f.worker.role, f.worker.rank, f.generation)
)


def fail(
    role: str = "actor", rank: int = 0, time: float = 1.0, message: str = "", generation: int = 0
) -> Failure:
    return Failure(WorkerId(role, rank, 0), generation, "n0", time, Exit(code=1), message)


@given(several)
def test_the_cause_is_one_of_the_failures_and_all_others_are_told_in_order(found: list[Failure]) -> None:
    diagnosis = diagnose(found)
    assert diagnosis.cause in found
    assert len(diagnosis.others) == len(found) - 1
    assert diagnosis.cause not in diagnosis.others
    assert [f.time for f in diagnosis.others] == sorted(f.time for f in diagnosis.others)


@given(several)
def test_a_consequence_is_the_cause_only_when_there_is_nothing_else(found: list[Failure]) -> None:
    if is_consequence(diagnose(found).cause):
        assert all(is_consequence(failure) for failure in found)


@given(several)
def test_the_cause_is_told_with_the_reason_for_taking_it(found: list[Failure]) -> None:
    diagnosis = diagnose(found)
    assert diagnosis.reason
    assert str(diagnosis).startswith(f"{diagnosis.cause.worker} on n0: ")
    assert diagnosis.reason in str(diagnosis)


@given(several)
def test_no_failure_of_its_own_kind_came_before_the_cause(found: list[Failure]) -> None:
    cause = diagnose(found).cause
    alike = [f for f in found if is_consequence(f) == is_consequence(cause)]
    assert cause.time == min(f.time for f in alike)


@given(several, st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(found: list[Failure], rng: random.Random) -> None:
    shuffled = [*found]
    rng.shuffle(shuffled)
    assert diagnose(shuffled) == diagnose(found)
    assert {*episode(shuffled)} == {*episode(found)}


@given(several)
def test_an_episode_holds_the_last_failure_and_has_no_long_silence(found: list[Failure]) -> None:
    chosen = episode(found, gap=5.0)
    latest = {
        f.worker.role: max(g.generation for g in found if g.worker.role == f.worker.role) for f in found
    }
    assert chosen
    assert all(f.generation == latest[f.worker.role] for f in chosen)
    assert chosen[-1].time == max(f.time for f in found if f.generation == latest[f.worker.role])
    assert all(b.time - a.time <= 5.0 for a, b in itertools.pairwise(chosen))
    # It goes back as far as it can.
    earlier = [f.time for f in found if f.generation == latest[f.worker.role] and f not in chosen]
    assert all(time + 5.0 < chosen[0].time for time in earlier)


def test_a_kill_that_is_seen_after_its_consequence_is_the_cause() -> None:
    killed = Failure(WorkerId("actor", 3, 0), 0, "n0", 2.0, Exit(signal=9))
    diagnosis = diagnose([fail(rank=0, time=1.0, message=PEER), fail(rank=1, time=1.5, message=PEER), killed])
    assert diagnosis.cause is killed
    assert diagnosis.reason == "the first of 3 failures that is not about a lost peer"


def test_the_first_of_two_is_said_to_be_the_first() -> None:
    first, second = fail(time=1.0, message=OWN), fail(rank=1, time=2.0, message=OWN)
    assert diagnose([second, first]).cause is first
    assert diagnose([second, first]).reason == "the first of 2 failures"
    assert diagnose([first]).reason == "the only failure"


def test_an_earlier_generation_and_an_earlier_hour_are_another_story() -> None:
    old = fail(time=10.0, generation=0)
    elsewhere = fail("rollout", time=20.0)
    now = fail(time=30.0, generation=1)
    assert episode([old, elsewhere, now]) == (now,)
    near = fail("rollout", time=26.0)
    assert episode([old, near, now]) == (near, now)


def test_a_silence_is_long_when_it_lasts_more_than_five_seconds() -> None:
    now = fail(time=30.0)
    for seconds, together in ((5.0, True), (5.5, False)):
        before = fail(rank=1, time=30.0 - seconds)
        assert (before in episode([before, now])) is together


def test_without_failures_there_is_no_episode() -> None:
    assert episode([]) == ()


def stood_by(rank: int, *, role: str = "actor", left: float = 0.0) -> Failure:
    end = Exit(code=0) if left else Exit(signal=15)
    return Failure(WorkerId(role, rank, 0), 0, "n0", left, end, log=f"/logs/{role}/{rank}", inferred=True)


def waited(
    rank: int, call: str, *, time: float = 1.0, message: str = TIMED_OUT, role: str = "actor"
) -> Failure:
    """The failure of a rank that has waited in this function of torch."""
    trace = f"""
  File "/home/me/train.py", line 23, in <module>
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83, in wrapper
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3151, in {call}
{message}"""
    return replace(fail(role, rank, time, message), traceback=trace)


class TestARankInAnotherCollective:
    """All failures are about a lost peer, and all ranks have failed."""

    def test_it_is_the_cause_whenever_it_has_failed(self) -> None:
        for time in (0.5, 2.0):
            odd = waited(2, "broadcast", time=time)
            diagnosis = diagnose([*(waited(rank, "all_reduce") for rank in (0, 1, 3)), odd])
            assert diagnosis.cause is odd
            assert diagnosis.reason == "it waited in broadcast, actor:0-1,3 in all_reduce"

    def test_of_several_it_is_the_first_in_time(self) -> None:
        odd = [waited(2, "broadcast", time=3.0), waited(1, "barrier", time=2.0)]
        diagnosis = diagnose([*(waited(rank, "all_reduce") for rank in (0, 3, 4)), *odd])
        assert diagnosis.reason == "it waited in barrier, actor:0,3-4 in all_reduce; actor:2 elsewhere, too"

    def test_nccl_says_which_collective_it_was(self) -> None:
        report = "RuntimeError: Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, OpType=ALLREDUCE, "
        found = [fail(rank=rank, message=report.format(7 - (rank == 1))) for rank in range(3)]
        assert diagnose(found).reason == "it waited in allreduce 6, actor:0,2 in allreduce 7"

    def test_numbers_of_two_groups_of_nccl_are_not_compared(self) -> None:
        report = (
            "RuntimeError: [PG ID {0} PG GUID {0}(tensor) Rank {1}] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum={2}, OpType=ALLREDUCE, "
        )
        places = [(1, 7), (1, 7), (1, 6), (2, 6), (2, 6)]
        found = [
            fail(rank=rank, message=report.format(group, rank, number))
            for rank, (group, number) in enumerate(places)
        ]
        assert diagnose(found).reason.startswith("the first of 5 failures")
        assert diagnose(found[:3]).reason == (
            "it waited in allreduce 6 of group 1(tensor), actor:0-1 in allreduce 7 of group 1(tensor)"
        )

    def test_a_report_of_nccl_and_a_traceback_are_not_compared(self) -> None:
        """The names differ: the watchdog of one rank may have spoken later than the exception of another."""
        report = "RuntimeError: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, "
        found = [*(fail(rank=rank, message=report) for rank in (0, 1)), waited(2, "all_reduce")]
        assert diagnose(found).reason.startswith("the first of 3 failures")

    def test_there_is_none_without_a_majority_or_if_one_is_not_known(self) -> None:
        first = "all about a lost peer or connection"
        for calls in (
            ("all_reduce", "broadcast"),
            ("all_reduce", "all_reduce", "send"),
            ("all_reduce", "all_reduce", "_helper"),
            ("all_reduce",) * 3,
        ):
            found = [waited(rank, call) for rank, call in enumerate(calls)]
            assert diagnose(found).reason == f"the first of {len(calls)} failures, {first}"
        roles = [waited(0, "all_reduce"), waited(1, "all_reduce"), waited(0, "broadcast", role="rollout")]
        assert diagnose(roles).reason == f"the first of 3 failures, {first}"

    def test_one_that_has_not_failed_takes_precedence(self) -> None:
        found = [waited(0, "all_reduce"), waited(1, "all_reduce"), waited(2, "broadcast")]
        assert diagnose(found, [stood_by(3)]).cause.worker.rank == 3
        assert diagnose([*found, fail(rank=3, message=OWN)]).cause.worker.rank == 3


class TestARankThatHasNotFailed:
    """All failures are about a lost peer, and say not which."""

    def test_one_that_ended_with_0_before_is_the_cause(self) -> None:
        found = [fail(rank=rank, time=2.0 + rank, message=PEER) for rank in (0, 2)]
        diagnosis = diagnose(found, [stood_by(1, left=1.9), stood_by(3)])
        assert str(diagnosis) == "actor:1 on n0: ended with exit code 0 while actor:0,2 waited for it"
        assert (diagnosis.others, diagnosis.failure, diagnosis.code) == (tuple(found), found[0], 1)

    def test_its_end_may_be_seen_a_moment_later(self) -> None:
        found = [fail(rank=0, time=2.0, message=PEER)]
        assert diagnose(found, [stood_by(1, left=2.5)]).cause.inferred
        assert not diagnose(found, [stood_by(1, left=3.5), *map(stood_by, (2, 3))]).cause.inferred

    def test_several_that_ended_with_0_are_all_named(self) -> None:
        diagnosis = diagnose([fail(rank=0, time=5.0, message=PEER)], [stood_by(n, left=4.0) for n in (1, 2)])
        assert str(diagnosis) == (
            "actor:1 on n0: ended with exit code 0 while actor:0 waited for them, as actor:2 did"
        )

    def test_the_only_one_that_all_others_waited_for_is_the_cause(self) -> None:
        found = [fail(rank=rank, time=15.0, message=TIMED_OUT) for rank in (0, 2, 3)]
        diagnosis = diagnose(found, [stood_by(1)])
        assert str(diagnosis) == "actor:1 on n0: had not failed when actor:0,2-3 waited for a peer in vain"
        assert diagnosis.code == 1

    def test_few_are_named_and_many_are_not(self) -> None:
        found = [fail(rank=rank, time=15.0, message=TIMED_OUT) for rank in (0, 2, 3)]
        assert diagnose(found, [stood_by(1), stood_by(4)]).cause.inferred
        diagnosis = diagnose(found[:2], [stood_by(1), stood_by(4)])
        assert not diagnosis.cause.inferred
        assert diagnosis.reason == "the first of 2 failures, all about a lost peer or connection"

    def test_one_that_a_barrier_names_is_the_cause_among_many(self) -> None:
        found = [
            fail(rank=0, message="RuntimeError: [Rank 0]: Rank 2 failed to pass monitoredBarrier in 2 ms")
        ]
        diagnosis = diagnose(found, [stood_by(rank) for rank in (1, 2, 3)])
        assert (
            str(diagnosis) == "actor:2 on n0: did not come to the collective in which actor:0 waited for it"
        )

    def test_one_of_another_role_that_ended_just_before_is_the_cause(self) -> None:
        found = [fail(rank=0, time=100.0, message=PEER), fail(rank=1, time=100.0, message=PEER)]
        near, long_ago = stood_by(0, role="rollout", left=99.0), stood_by(0, role="rollout", left=1.0)
        assert diagnose(found, [near]).cause.worker == WorkerId("rollout", 0, 0)
        assert not diagnose(found, [long_ago]).cause.inferred
        assert not diagnose(found, [stood_by(0, role="rollout")]).cause.inferred

    def test_a_silent_one_of_the_role_comes_before_another_role_that_has_ended(self) -> None:
        found = [fail(rank=rank, time=100.0, message=TIMED_OUT) for rank in (0, 2)]
        diagnosis = diagnose(found, [stood_by(0, role="rollout", left=99.0), stood_by(1)])
        assert diagnosis.cause.worker == WorkerId("actor", 1, 0)

    def test_one_that_a_channel_names_is_the_cause_though_it_was_lost_later(self) -> None:
        gone = "unirun.errors.PeerLost: actor:2 is gone: the peer closed the connection"
        found = [fail("rollout", rank, time=9.0 + rank, message=gone) for rank in (0, 1)]
        diagnosis = diagnose(found, [stood_by(1, left=8.0), stood_by(2, left=8.5), stood_by(3)])
        assert str(diagnosis) == "actor:2 on n0: ended with exit code 0 while rollout:0-1 waited for it"
        assert diagnosis.code == 1
        assert not diagnose(found, [stood_by(1, left=8.0), stood_by(2)]).cause.inferred

    def test_other_roles_are_told_when_a_whole_role_has_waited_in_vain(self) -> None:
        """The one that is missed may be of another role, in a group across roles. But nothing says so."""
        found = [fail(rank=rank, message=TIMED_OUT) for rank in (0, 1)]
        alone = [stood_by(rank, role="rollout") for rank in (0, 1)]
        words = "the first of 2 failures, all about a lost peer or connection"
        assert diagnose(found, alone).reason == f"{words}; rollout:0-1 had not failed"
        assert diagnose(found, [*alone, *map(stood_by, (2, 3))]).reason == words
        elsewhere = [fail(rank=rank, message="BrokenPipeError: [Errno 32] Broken pipe") for rank in (0, 1)]
        assert diagnose(elsewhere, alone).reason == words

    def test_once_told_it_is_no_failure_of_a_later_story(self) -> None:
        told = diagnose([fail(rank=0, message=PEER)], [stood_by(1, left=0.5)]).cause
        later = fail("rollout", 0, time=2.0, message=OWN)
        assert told.inferred
        assert episode([told, later]) == (later,)
        assert episode([told]) == ()

    def test_it_is_not_the_cause_when_another_has_failed_by_itself(self) -> None:
        own = fail(rank=2, time=9.0, message=OWN)
        diagnosis = diagnose([fail(rank=0, message=PEER), own], [stood_by(1, left=0.5), stood_by(3)])
        assert diagnosis.cause is own

    def test_it_is_not_the_cause_of_a_connection_lost_to_anything_else(self) -> None:
        found = [fail(message="ConnectionResetError: [Errno 104] Connection reset by peer")]
        assert diagnose(found, [stood_by(1, left=0.5)]).cause is found[0]
