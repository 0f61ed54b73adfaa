"""The calls of a process are counted, and told ever more seldom."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import ConnectionLost
from unirun.roles.calls.call import SELDOM, CallBook
from unirun.roles.transport.protocol import Scheduler
from unirun.wire.reports import MAX_COUNTS, MAX_SPANS, CallCount, Calls, RankRange, bounded, merged


class Later(Scheduler):
    """Nothing is done before the test wants it."""

    def __init__(self) -> None:
        super().__init__("later")
        self.asked: list[tuple[float, Callable[[], None]]] = []

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Remember it."""
        self.asked.append((when, action))


@pytest.fixture
def later() -> Later:
    return Later()


@pytest.fixture
def told() -> list[Calls]:
    return []


@pytest.fixture
def book(later: Later, told: list[Calls]) -> CallBook:
    return CallBook(later, told.append)


def test_all_calls_of_a_method_are_one_count(book: CallBook, told: list[Calls]) -> None:
    for rank in (0, 1, 3):
        book.count("actor", "train", asynchronous=False).add(rank, 100, 20, 0.5)
    book.report()
    latencies = (*[0] * 8, 3, *[0] * 5)
    count = CallCount("actor", "train", 3, 300, 60, 1.5, ((0, 1), (3, 3)), latencies=latencies)
    assert told == [Calls((count,))]


def test_a_method_that_is_waited_for_and_not_is_counted_apart(book: CallBook, told: list[Calls]) -> None:
    book.count("actor", "train", asynchronous=False).add(0, 1, 1, 0.0)
    book.count("actor", "train", asynchronous=True).add(0, 2, 2, 0.0)
    book.report()
    assert {each.asynchronous: each.bytes for each in told[0].counts} == {False: 1, True: 2}


def test_calls_of_unirun_itself_are_not_counted(book: CallBook, told: list[Calls]) -> None:
    book.count("actor", "__describe__", asynchronous=False).add(0, 1, 1, 0.0)
    book.count("actor", "never", asynchronous=False)
    book.report()
    assert told == [Calls(())]


def test_a_report_is_due_with_the_first_call_after_the_last_one(book: CallBook, later: Later) -> None:
    count = book.count("actor", "train", asynchronous=False)
    count.add(0, 1, 1, 0.0)
    count.add(0, 1, 1, 0.0)
    assert len(later.asked) == 1
    later.asked.pop()[1]()
    assert later.asked == []
    count.add(0, 1, 1, 0.0)
    assert len(later.asked) == 1


def test_the_interval_of_reports_doubles_up_to_a_limit(
    book: CallBook, later: Later, told: list[Calls]
) -> None:
    count = book.count("actor", "train", asynchronous=False)
    times = []
    for _ in range(9):
        count.add(0, 1, 1, 0.0)
        when, action = later.asked[-1]
        times.append(when)
        action()
    assert len(told) == 9
    # The clock goes on meanwhile, by much less than what is between two of these.
    waits = [round(when - times[0]) for when in times]
    assert waits == [0, 1, 3, 7, 15, 31, SELDOM - 1, SELDOM - 1, SELDOM - 1]


def test_unchanged_counts_are_not_reported_again(book: CallBook, told: list[Calls]) -> None:
    book.report()
    book.count("actor", "train", asynchronous=False).add(0, 1, 1, 0.0)
    book.report()
    book.report()
    assert len(told) == 1


def test_of_too_many_methods_those_with_the_most_bytes_are_reported(
    book: CallBook, told: list[Calls]
) -> None:
    for number in range(MAX_COUNTS + 10):
        book.count("actor", f"m{number}", asynchronous=False).add(0, number, 0, 0.0)
    book.report()
    assert [each.bytes for each in told[0].counts] == list(range(MAX_COUNTS + 9, 9, -1))


def test_an_agent_that_is_gone_is_no_error_of_the_worker(later: Later) -> None:
    def gone(calls: Calls) -> None:
        raise ConnectionLost("the agent is gone")

    book = CallBook(later, gone)
    book.count("actor", "train", asynchronous=False).add(0, 1, 1, 0.0)
    book.report()


def test_no_call_is_lost_between_threads(book: CallBook, told: list[Calls]) -> None:
    count = book.count("actor", "train", asynchronous=False)

    def call() -> None:
        for _ in range(2000):
            count.add(0, 1, 2, 0.0)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    book.report()
    (found,) = told[0].counts
    assert (found.calls, found.bytes, found.returned) == (8000, 8000, 16000)


def told_of(ranks: Iterable[int]) -> tuple[RankRange, ...]:
    """The ranges of `ranks` in a report."""
    (count,) = bounded([CallCount("actor", "train", 1, 0, 0, 0.0, merged((rank, rank) for rank in ranks))])
    return count.ranks


@given(st.sets(st.integers(0, 200)))
def test_spans_hold_every_rank_and_few_others(ranks: set[int]) -> None:
    found = told_of(ranks)
    held = [rank for first, last in found for rank in range(first, last + 1)]
    assert held == sorted(set(held))
    assert ranks <= set(held)
    assert len(found) <= MAX_SPANS
    if len(found) > 1:
        assert set(held) == ranks


def test_of_very_scattered_ranks_the_whole_range_is_told() -> None:
    assert told_of(range(0, 1000, 2)) == ((0, 998),)
    assert len(told_of(range(0, 2 * MAX_SPANS, 2))) == MAX_SPANS
