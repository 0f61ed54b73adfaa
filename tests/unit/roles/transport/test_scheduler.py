"""`Scheduler`: a thread that runs actions at their times, or one after the other."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.roles.transport.protocol import Scheduler

TOO_LARGE = 1 << 47
"""Bytes of a stack with which no thread can be started."""


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    """One that is closed at the end."""
    scheduler = Scheduler("test")
    yield scheduler
    scheduler.close()


def test_actions_run_in_the_order_of_their_times(scheduler: Scheduler) -> None:
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    now = time.monotonic()
    for name, after in (("third", 0.15), ("first", 0.05), ("second", 0.1)):
        scheduler.at(now + after, partial(done.put, name))
    assert [done.get(timeout=WAIT_TIMEOUT) for _ in range(3)] == ["first", "second", "third"]
    assert time.monotonic() - now >= 0.15


def test_actions_of_one_time_run_in_the_order_of_their_submission(scheduler: Scheduler) -> None:
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(1000):
        scheduler.soon(partial(done.put, number))
    assert [done.get(timeout=WAIT_TIMEOUT) for _ in range(1000)] == list(range(1000))


def test_an_earlier_action_overtakes_the_next_one(scheduler: Scheduler) -> None:
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    scheduler.at(time.monotonic() + 1000, lambda: done.put("late"))
    scheduler.soon(lambda: done.put("soon"))
    assert done.get(timeout=WAIT_TIMEOUT) == "soon"


def test_an_action_at_infinity_delays_no_other(scheduler: Scheduler) -> None:
    done = threading.Event()
    scheduler.at(math.inf, lambda: None)
    scheduler.at(time.monotonic() + 1e12, lambda: None)
    scheduler.soon(lambda: None)
    scheduler.at(time.monotonic() + 0.05, done.set)
    assert done.wait(WAIT_TIMEOUT)


@pytest.mark.filterwarnings("ignore")
def test_an_action_that_fails_is_shown_and_the_next_is_done(
    scheduler: Scheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    done = threading.Event()
    scheduler.soon(lambda: 1 / 0)  # type: ignore[arg-type]
    scheduler.soon(done.set)
    assert done.wait(WAIT_TIMEOUT)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_actions_that_are_due_run_before_the_end_and_none_after_it() -> None:
    scheduler, done = Scheduler("test"), queue.SimpleQueue[tuple[int, str]]()
    scheduler.at(time.monotonic() + 1000, lambda: pytest.fail("it is closed"))

    def note(number: int) -> None:
        done.put((number, threading.current_thread().name))

    for number in range(100):
        scheduler.soon(partial(note, number))
    scheduler.close()
    scheduler.close()
    scheduler.soon(lambda: pytest.fail("it is closed"))
    assert scheduler._thread is not None
    scheduler._thread.join(WAIT_TIMEOUT)
    assert not scheduler._thread.is_alive()
    assert [done.get(timeout=WAIT_TIMEOUT) for _ in range(100)] == [(number, "test") for number in range(100)]


def test_a_scheduler_that_was_not_used_has_no_thread_to_end() -> None:
    Scheduler("never used").close()


def test_the_schedulers_thread_is_a_daemon(scheduler: Scheduler) -> None:
    scheduler.at(math.inf, lambda: None)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "test")
    assert thread.daemon


def test_actions_may_order_others(scheduler: Scheduler) -> None:
    done = threading.Event()
    scheduler.soon(lambda: scheduler.soon(lambda: scheduler.soon(done.set)))
    assert done.wait(WAIT_TIMEOUT)


def test_it_goes_on_after_a_moment_in_which_no_thread_could_be_started(scheduler: Scheduler) -> None:
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    before = threading.stack_size(TOO_LARGE)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            scheduler.soon(partial(done.put, "first"))
    finally:
        threading.stack_size(before)
    scheduler.soon(partial(done.put, "second"))
    assert [done.get(timeout=10.0) for _ in range(2)] == ["first", "second"]
