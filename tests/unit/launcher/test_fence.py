"""When an agent has to kill its workers as its node may have been given up."""

from __future__ import annotations

import threading

from unirun.failover.silence import FENCE, UNMARKED
from unirun.launcher.fence import Fence, Guard, clock

START = 100.0


def joined() -> Fence:
    fence = Fence()
    fence.joins(START)
    return fence


def test_there_is_no_fence_before_the_first_master() -> None:
    assert not Fence().over(1e9)


def test_an_agent_that_is_never_answered_ends_its_workers() -> None:
    fence = joined()
    assert not fence.over(START + FENCE - 0.1)
    assert fence.over(START + FENCE)


def test_an_answer_counts_from_when_the_beat_was_sent() -> None:
    fence = joined()
    fence.beats(START + 1.5)
    fence.answered(START + 5.0, sure=True)
    assert fence.until == START + 1.5 + FENCE


def test_answers_belong_to_the_beats_in_their_order() -> None:
    fence = joined()
    for when in (1.0, 2.0, 3.0):
        fence.beats(START + when)
    fence.answered(START + 4.0, sure=True)
    assert fence.until == START + 1.0 + FENCE
    fence.answered(START + 4.0, sure=True)
    assert fence.until == START + 2.0 + FENCE


def test_an_answer_of_a_master_that_is_not_sure_renews_nothing() -> None:
    fence = joined()
    fence.beats(START + 1.0)
    fence.beats(START + 2.0)
    fence.answered(START + 3.0, sure=False)
    assert fence.until == START + FENCE
    fence.answered(START + 3.0, sure=True)
    assert fence.until == START + 2.0 + FENCE


def test_an_agent_that_was_stopped_is_not_saved_by_what_waits_in_its_sockets() -> None:
    fence = joined()
    fence.beats(START + 1.0)
    fence.answered(START + 60.0, sure=True)
    fence.nobody_leads(START + 60.0, START + 60.0)
    fence.unmarked(START + 60.0, START + 60.0)
    assert fence.over(START + 60.0)


def test_another_stream_begins_with_beats_of_its_own_and_renews_nothing_itself() -> None:
    fence = joined()
    fence.beats(START + 1.0)
    fence.joins(START + 4.0)
    assert fence.until == START + FENCE
    fence.beats(START + 4.0)
    fence.answered(START + 4.1, sure=True)
    assert fence.until == START + 4.0 + FENCE


def test_an_answer_without_a_beat_means_nothing() -> None:
    fence = joined()
    fence.answered(START + 1.0, sure=True)
    assert fence.until == START + FENCE


def test_what_shows_that_the_node_is_not_given_up_counts_from_its_beginning() -> None:
    fence = joined()
    fence.unmarked(START + 5.0, START + 5.2)
    assert fence.until == START + 5.0 + UNMARKED
    fence.nobody_leads(START + 5.5, START + 6.0)
    assert fence.until == START + 5.5 + FENCE


def test_a_shorter_time_does_not_replace_a_longer_one() -> None:
    fence = joined()
    fence.unmarked(START + 1.0, START + 1.0)
    assert fence.until == START + FENCE


def test_it_is_quiet_since_the_latest_proof() -> None:
    fence = Fence()
    assert fence.quiet_for(START) == 0.0
    fence.joins(START)
    fence.beats(START + 1.0)
    fence.answered(START + 1.2, sure=True)
    assert fence.quiet_for(START + 3.0) == 2.0


def test_the_guard_calls_when_the_time_is_over() -> None:
    fence, expired = Fence(), threading.Event()
    fence.joins(clock() - FENCE)
    guard = Guard(fence, expired.set)
    assert expired.wait(20.0)
    guard.close()


def test_a_guard_that_is_closed_does_not_call() -> None:
    fence, expired = Fence(), threading.Event()
    guard = Guard(fence, expired.set)
    guard.close()
    guard._thread.join(20.0)
    fence.joins(clock() - FENCE)
    assert not guard._thread.is_alive()
    assert not expired.is_set()
