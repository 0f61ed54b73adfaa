"""The thread that keeps deadlines."""

from __future__ import annotations

import gc
import math
import queue
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from unirun.roles.calls.service import Service

SOON = 10.0


@pytest.fixture
def service() -> Iterator[Service]:
    """One that is closed at the end."""
    service = Service("test")
    yield service
    service.close()


def test_things_are_done_in_the_order_of_their_times(service: Service) -> None:
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    now = time.monotonic()
    for name, after in (("third", 0.15), ("first", 0.05), ("second", 0.1)):
        service.at(now + after, lambda name=name: done.put(name))
    assert [done.get(timeout=SOON) for _ in range(3)] == ["first", "second", "third"]
    assert time.monotonic() - now >= 0.15


def test_things_of_one_time_are_done_in_the_order_in_which_they_came(service: Service) -> None:
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(1000):
        service.soon(lambda number=number: done.put(number))
    assert [done.get(timeout=SOON) for _ in range(1000)] == list(range(1000))


def test_something_earlier_overtakes_what_is_waited_for(service: Service) -> None:
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    service.at(time.monotonic() + 1000, lambda: done.put("late"))
    service.soon(lambda: done.put("soon"))
    assert done.get(timeout=SOON) == "soon"


def test_something_that_never_comes_keeps_nothing_from_being_done(service: Service) -> None:
    done = threading.Event()
    service.at(math.inf, lambda: None)
    service.at(time.monotonic() + 1e12, lambda: None)
    service.soon(lambda: None)
    service.at(time.monotonic() + 0.05, done.set)
    assert done.wait(SOON)


def test_what_is_cancelled_is_not_done_and_holds_nothing(service: Service) -> None:
    class Load:
        """Something large."""

    load = Load()
    watch = weakref.ref(load)
    done: queue.SimpleQueue[str] = queue.SimpleQueue()

    def action(load: Load = load) -> None:
        done.put("cancelled")

    tickets = [service.at(time.monotonic() + 0.05, action)]
    del action, load
    for ticket in tickets:
        service.cancel(ticket)
        service.cancel(ticket)
    gc.collect()
    assert watch() is None
    service.at(time.monotonic() + 0.1, lambda: done.put("after"))
    assert done.get(timeout=SOON) == "after"


def test_a_great_many_that_are_cancelled_take_no_room(service: Service) -> None:
    for _ in range(20_000):
        service.cancel(service.at(time.monotonic() + 1000, lambda: None))
    assert len(service._heap) < 5000
    done = threading.Event()
    service.soon(done.set)
    assert done.wait(SOON)


@pytest.mark.filterwarnings("ignore")
def test_an_action_that_fails_is_shown_and_the_next_is_done(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    done = threading.Event()
    service.soon(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    service.soon(done.set)
    assert done.wait(SOON)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_after_the_end_nothing_is_done(service: Service) -> None:
    done = threading.Event()
    service.soon(done.set)
    assert done.wait(SOON)
    service.close()
    service.close()
    service.soon(lambda: pytest.fail("it is closed"))
    assert service._thread is not None
    service._thread.join(SOON)
    assert not service._thread.is_alive()


def test_actions_may_order_others(service: Service) -> None:
    done = threading.Event()
    service.soon(lambda: service.soon(lambda: service.soon(done.set)))
    assert done.wait(SOON)
