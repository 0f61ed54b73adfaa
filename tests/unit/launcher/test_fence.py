"""The times at which an agent has to kill its workers as its node may have been given up."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.failover.silence import FENCE_TIMEOUT, UNMARKED_SECONDS
from unirun.launcher.contact import Fence, KillTimer
from unirun.rendezvous.store.protocol import clock

START = 100.0


def joined() -> Fence:
    fence = Fence()
    fence.joins(START)
    return fence


def test_there_is_no_fence_before_the_first_master() -> None:
    assert not Fence().over(1e9)


def test_an_agent_that_is_never_answered_ends_its_workers() -> None:
    fence = joined()
    assert not fence.over(START + FENCE_TIMEOUT - 0.1)
    assert fence.over(START + FENCE_TIMEOUT)


def test_an_answer_counts_from_when_the_beat_was_sent() -> None:
    fence = joined()
    fence.beats(START + 1.5)
    fence.answered(START + 5.0, 0.0)
    assert fence.until == START + 1.5 + FENCE_TIMEOUT


def test_answers_belong_to_the_beats_in_their_order() -> None:
    fence = joined()
    for when in (1.0, 2.0, 3.0):
        fence.beats(START + when)
    fence.answered(START + 4.0, 0.0)
    assert fence.until == START + 1.0 + FENCE_TIMEOUT
    fence.answered(START + 4.0, 0.0)
    assert fence.until == START + 2.0 + FENCE_TIMEOUT


def test_an_answer_proves_less_the_older_the_proof_of_the_master_is() -> None:
    fence = joined()
    fence.beats(START + 1.0)
    fence.beats(START + 2.0)
    fence.answered(START + 3.0, 30.0)
    assert fence.until == START + FENCE_TIMEOUT
    fence.answered(START + 3.0, 0.5)
    assert fence.until == START + 1.5 + FENCE_TIMEOUT


def test_an_agent_that_was_stopped_is_not_saved_by_what_waits_in_its_sockets() -> None:
    fence = joined()
    fence.beats(START + 1.0)
    fence.answered(START + 60.0, 0.0)
    fence.let_in(START + 60.0, START + 60.0)
    fence.unmarked(START + 60.0, START + 60.0)
    assert fence.over(START + 60.0)


def test_another_stream_begins_with_beats_of_its_own_and_renews_nothing_itself() -> None:
    fence = joined()
    fence.beats(START + 1.0)
    fence.joins(START + 4.0)
    assert fence.until == START + FENCE_TIMEOUT
    fence.beats(START + 4.0)
    fence.answered(START + 4.1, 0.0)
    assert fence.until == START + 4.0 + FENCE_TIMEOUT


def test_an_answer_without_a_beat_means_nothing() -> None:
    fence = joined()
    fence.answered(START + 1.0, 0.0)
    assert fence.until == START + FENCE_TIMEOUT


def test_what_shows_that_the_node_is_not_given_up_counts_from_its_beginning() -> None:
    fence = joined()
    fence.unmarked(START + 5.0, START + 5.2)
    assert fence.until == START + 5.0 + UNMARKED_SECONDS
    fence.let_in(START + 5.5, START + 6.0)
    assert fence.until == START + 5.5 + FENCE_TIMEOUT


def test_a_shorter_time_does_not_replace_a_longer_one() -> None:
    fence = joined()
    fence.unmarked(START + 1.0, START + 1.0)
    assert fence.until == START + FENCE_TIMEOUT


def test_it_is_quiet_since_the_latest_proof() -> None:
    fence = Fence()
    assert fence.quiet_for(START) == 0.0
    fence.joins(START)
    fence.beats(START + 1.0)
    fence.answered(START + 1.2, 0.0)
    assert fence.quiet_for(START + 3.0) == 2.0


@pytest.mark.starts_processes
@pytest.mark.parametrize("stopped", [False, True])
def test_the_kernel_kills_an_agent_that_does_nothing_about_it(stopped: bool) -> None:
    program = """
from unirun.launcher.contact import KillTimer
from unirun.rendezvous.store.protocol import clock
timer = KillTimer()
timer.set(clock() + 100.0)
timer.set(clock() + 0.3)
print("set", flush=True)
while True: pass
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if stopped:
            process.send_signal(signal.SIGSTOP)
        assert process.wait(WAIT_TIMEOUT) == -signal.SIGKILL


def test_a_timer_that_is_set_to_never_or_removed_does_not_kill() -> None:
    timer = KillTimer()
    timer.set(clock() + 0.05)
    timer.set(0)
    timer.close()
    other = KillTimer()
    other.set(clock() + 0.05)
    other.close()
    threading.Event().wait(0.1)


def test_a_kernel_that_refuses_a_timer_is_an_error() -> None:
    timer = KillTimer()
    timer.close()
    with pytest.raises(OSError, match="Invalid argument"):
        timer.set(0)
