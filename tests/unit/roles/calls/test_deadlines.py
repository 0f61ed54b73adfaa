"""`Deadlines`: what was not dropped in time is late."""

from __future__ import annotations

import gc
import math
import queue
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.roles.calls.caller import Deadlines
from unirun.roles.transport.protocol import Scheduler


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    """One that is closed at the end."""
    scheduler = Scheduler("test")
    yield scheduler
    scheduler.close()


class TestDeadlines:
    def test_items_that_are_not_dropped_expire_in_order(self, scheduler: Scheduler) -> None:
        late: queue.SimpleQueue[int] = queue.SimpleQueue()
        deadlines, began = Deadlines(0.1, scheduler, late.put), time.monotonic()
        for number in range(100):
            deadlines.add(number)
        for number in range(0, 100, 2):
            deadlines.drop(number)
            deadlines.drop(number)
        assert [late.get(timeout=WAIT_TIMEOUT) for _ in range(50)] == list(range(1, 100, 2))
        assert 0.1 <= time.monotonic() - began < WAIT_TIMEOUT
        assert late.empty()

    def test_an_item_has_its_whole_timeout_after_others_have_expired(self, scheduler: Scheduler) -> None:
        late: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
        deadlines = Deadlines[int](0.1, scheduler, lambda number: late.put((number, time.monotonic())))
        for number in range(3):
            began = time.monotonic()
            deadlines.add(number)
            found, ended = late.get(timeout=WAIT_TIMEOUT)
            assert found == number
            assert 0.1 <= ended - began < WAIT_TIMEOUT

    def test_an_item_that_is_added_later_has_its_own_deadline(self, scheduler: Scheduler) -> None:
        late: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()
        deadlines = Deadlines[str](0.2, scheduler, lambda name: late.put((name, time.monotonic())))
        began = time.monotonic()
        deadlines.add("first")
        half_way = threading.Event()
        scheduler.at(began + 0.1, half_way.set)
        assert half_way.wait(WAIT_TIMEOUT)
        deadlines.add("second")
        deadlines.drop("first")
        name, ended = late.get(timeout=WAIT_TIMEOUT)
        assert name == "second"
        assert 0.3 <= ended - began < WAIT_TIMEOUT

    def test_a_dropped_item_is_not_referenced(self, scheduler: Scheduler) -> None:
        class Load:
            """Something large."""

        load = Load()
        watch = weakref.ref(load)
        deadlines = Deadlines[Load](1000.0, scheduler, lambda load: None)
        deadlines.add(load)
        deadlines.drop(load)
        del load
        gc.collect()
        assert watch() is None

    def test_many_items_are_one_action_of_the_scheduler(self, scheduler: Scheduler) -> None:
        deadlines = Deadlines[int](1000.0, scheduler, lambda number: None)
        for number in range(20_000):
            deadlines.add(number)
        assert len(scheduler._heap) <= 1

    @pytest.mark.parametrize("seconds", [1e12, math.inf])
    def test_an_infinite_timeout_delays_no_action(self, scheduler: Scheduler, seconds: float) -> None:
        Deadlines[int](seconds, scheduler, lambda number: None).add(1)
        done = threading.Event()
        scheduler.soon(done.set)
        assert done.wait(WAIT_TIMEOUT)

    @pytest.mark.filterwarnings("ignore")
    def test_an_error_of_one_expiry_delays_no_other(
        self, scheduler: Scheduler, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ended = threading.Event()

        def end(name: str) -> None:
            if name == "bad":
                raise ValueError(name)
            ended.set()

        deadlines = Deadlines[str](0.05, scheduler, end)
        for name in ("bad", "good"):
            deadlines.add(name)
        assert ended.wait(WAIT_TIMEOUT)
        assert "ValueError: bad" in capsys.readouterr().err
