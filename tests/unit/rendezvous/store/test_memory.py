"""The store in memory with a clock that somebody turns."""

from __future__ import annotations

import time

import pytest

from unirun.errors import LeaseExpired
from unirun.rendezvous.store.memory import MemoryStore
from unirun.rendezvous.store.protocol import Change, Put


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_leases_end_when_the_clock_says_so_in_the_order_of_their_ends() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    late, soon = store.grant(20), store.grant(10)
    start = store.txn([], [Put("late", "1", late), Put("soon", "1", soon)]).revision
    watch = store.watch("", start + 1)
    clock.now += 9.99
    assert watch.changes(0) == ()
    clock.now += 20
    assert watch.changes(0) == (
        Change("delete", "soon", "", start + 1),
        Change("delete", "late", "", start + 2),
    )
    with pytest.raises(LeaseExpired):
        store.keep_alive(soon)


def test_keeping_alive_counts_from_now() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    lease = store.grant(10)
    store.txn([], [Put("a", "1", lease)])
    for _ in range(5):
        clock.now += 9
        store.keep_alive(lease)
    assert store.get("a") is not None
    clock.now += 10
    assert store.get("a") is None


def test_turning_the_clock_is_told_to_who_watches_by_expire() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    store.txn([], [Put("a", "1", store.grant(10))])
    clock.now += 10
    store.expire()
    assert store.get_prefix("").items == ()


def test_what_is_compacted_cannot_be_more_than_there_is() -> None:
    store = MemoryStore()
    revision = store.txn([], [Put("a", "1")]).revision
    store.compact(revision + 100)
    watch = store.watch("", revision + 1)
    store.txn([], [Put("a", "2")])
    assert watch.changes(0) == (Change("put", "a", "2", revision + 1),)


def test_who_waits_hears_of_the_end_of_a_lease_when_it_ends() -> None:
    store = MemoryStore()
    put = store.txn([], [Put("a", "1", store.grant(0.05))])
    started = time.monotonic()
    assert store.watch("", put.revision + 1).changes(30) == (Change("delete", "a", "", put.revision + 1),)
    assert time.monotonic() - started < 15
