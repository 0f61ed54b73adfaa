"""The store in memory with a settable clock."""

from __future__ import annotations

import time

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import LeaseExpired
from unirun.rendezvous.store.memory import MemoryStore
from unirun.rendezvous.store.protocol import Change, Put


class FakeClock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_memory_leases_end_by_the_clock_in_order_of_expiry() -> None:
    clock = FakeClock()
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


def test_memory_lease_is_renewed_from_now() -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    lease = store.grant(10)
    store.txn([], [Put("a", "1", lease)])
    for _ in range(5):
        clock.now += 9
        store.keep_alive(lease)
    assert store.get("a") is not None
    clock.now += 10
    assert store.get("a") is None


def test_memory_expire_wakes_watches_after_the_clock_was_set() -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    store.txn([], [Put("a", "1", store.grant(10))])
    clock.now += 10
    store.expire()
    assert store.get_prefix("").items == ()


def test_memory_compact_beyond_the_latest_revision_is_limited() -> None:
    store = MemoryStore()
    revision = store.txn([], [Put("a", "1")]).revision
    store.compact(revision + 100)
    watch = store.watch("", revision + 1)
    store.txn([], [Put("a", "2")])
    assert watch.changes(0) == (Change("put", "a", "2", revision + 1),)


def test_memory_watch_sees_the_end_of_a_lease_in_time() -> None:
    store = MemoryStore()
    put = store.txn([], [Put("a", "1", store.grant(0.05))])
    started = time.monotonic()
    assert store.watch("", put.revision + 1).changes(2 * WAIT_TIMEOUT) == (
        Change("delete", "a", "", put.revision + 1),
    )
    assert time.monotonic() - started < WAIT_TIMEOUT
