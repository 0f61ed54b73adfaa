"""Of several failures the cause is the first that is not about a lost peer."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.failover.root_cause import diagnose, episode, is_consequence
from unirun.job.failures import Exit, Failure
from unirun.values import WorkerId

PEER = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:4242"
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


@pytest.mark.parametrize(
    ("message", "consequence"),
    [
        (PEER, True),
        ("torch.distributed.DistNetworkError: Failed to recv", True),
        ("BrokenPipeError: [Errno 32] Broken pipe", True),
        ("ncclRemoteError: A call failed possibly due to a network error", True),
        ("unirun.errors.GroupError: actor+rollout could not be formed", True),
        ("ValueError: loss is nan", False),
        ("RuntimeError: CUDA out of memory", False),
        ("", False),
    ],
)
def test_words_about_a_peer_are_recognised(message: str, consequence: bool) -> None:
    assert is_consequence(fail(message=message)) is consequence
