"""Changes arrive in order and exactly once, and transactions are not split."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from itertools import groupby

from tests.contract.store.backends import StoreBackend, read, read_batch
from tests.waiting import WAIT_TIMEOUT
from unirun.rendezvous.store.protocol import Change, Listing, Put, Store


def test_a_watch_from_an_earlier_revision_sees_all_changes_in_order(store: Store, other_store: Store) -> None:
    first = store.txn([], [Put("a", "1")]).revision
    store.txn([], [Put("b", "1"), Put("a", "2")], ["a/"])
    store.txn([], [Put("c", "")], ["b"])
    watch = other_store.watch("", first)
    assert read(watch, lambda seen: len(seen) == 5) == [
        Change("put", "a", "1", first),
        Change("put", "b", "1", first + 1),
        Change("put", "a", "2", first + 1),
        Change("put", "c", "", first + 2),
        Change("delete", "b", "", first + 2),
    ]


def test_a_watch_begins_with_the_requested_revision(store: Store) -> None:
    first = store.txn([], [Put("a", "1")]).revision
    store.txn([], [Put("a", "2")])
    store.txn([], [Put("a", "3")])
    assert [change.value for change in read(store.watch("", first + 1), lambda seen: len(seen) == 2)] == [
        "2",
        "3",
    ]


def test_a_watch_from_after_a_listing_misses_nothing_and_repeats_nothing(
    store: Store, other_store: Store
) -> None:
    store.txn([], [Put("a", "1")])
    listing = store.get_prefix("")
    watch = store.watch("", listing.revision + 1)
    assert watch.changes(0.2) == ()
    other_store.txn([], [Put("a", "2")])
    assert read_batch(watch) == (Change("put", "a", "2", listing.revision + 1),)
    assert watch.changes(0.1) == ()


def test_a_watch_sees_what_is_under_its_prefix_only(store: Store) -> None:
    start = store.get_prefix("").revision + 1
    watch = store.watch("run1/", start)
    store.txn([], [Put("run10/a", "1"), Put("run1", "1"), Put("run1/a", "1"), Put("a/run1/a", "1")])
    store.txn([], [Put("run2/a", "1")])
    store.txn([], deletes=[""])
    assert [(each.kind, each.key) for each in read(watch, lambda seen: len(seen) == 2)] == [
        ("put", "run1/a"),
        ("delete", "run1/a"),
    ]


def test_a_watch_sees_a_deleted_prefix_key_by_key_in_one_transaction(store: Store) -> None:
    put = store.txn([], [Put("p/b", "1"), Put("p/a", "1"), Put("q", "1")])
    watch = store.watch("", put.revision + 1)
    store.txn([], deletes=["p/"])
    assert read_batch(watch) == tuple(Change("delete", f"p/{name}", "", put.revision + 1) for name in "ab")


def test_a_watch_never_splits_a_transaction(store: Store, other_store: Store) -> None:
    width, rounds = 40, 25
    start = store.get_prefix("").revision + 1
    watch = other_store.watch("k/", start)

    def write() -> None:
        for number in range(rounds):
            store.txn([], [Put(f"k/{backend:02}", f"{number}" * 2000) for backend in range(width)])

    writer = threading.Thread(target=write)
    writer.start()
    revisions: list[int] = []
    deadline = time.monotonic() + WAIT_TIMEOUT
    while len(revisions) < rounds and time.monotonic() < deadline:
        batch = watch.changes(0.5)
        assert not isinstance(batch, Listing)
        for revision, changes in groupby(batch, key=lambda change: change.revision):
            assert [change.key for change in changes] == [f"k/{backend:02}" for backend in range(width)]
            revisions.append(revision)
    writer.join(WAIT_TIMEOUT)
    assert revisions == list(range(start, start + rounds))


def test_many_watches_see_the_same(backend: StoreBackend, store: Store) -> None:
    start = store.get_prefix("").revision + 1
    watches = [store.watch("", start) for _ in range(8)] + [backend.open().watch("", start) for _ in range(4)]
    for number in range(30):
        store.txn([], [Put(f"k{number % 3}", str(number))])
    seen = [read(watch, lambda changes: len(changes) == 30) for watch in watches]
    assert [change.value for change in seen[0]] == [str(number) for number in range(30)]
    assert all(each == seen[0] for each in seen)


def test_an_idle_watch_returns_at_its_timeout(store: Store) -> None:
    watch = store.watch("", store.get_prefix("").revision + 1)
    for timeout in (0, 0.3):
        started = time.monotonic()
        assert watch.changes(timeout) == ()
        assert timeout <= time.monotonic() - started < timeout + 5


def test_a_watch_that_begins_amid_writes_misses_nothing(store: Store, other_store: Store) -> None:
    enough = threading.Event()

    def write() -> None:
        number = 0
        while not enough.is_set():
            number += 1
            store.txn([], [Put("a", str(number))])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(8):
            start = other_store.get_prefix("").revision + 1
            with closing(other_store.watch("", start)) as watch:
                seen = read(watch, lambda changes: len(changes) >= 10)
            assert [change.revision for change in seen] == list(range(start, start + len(seen)))
    finally:
        enough.set()
        writer.join(WAIT_TIMEOUT)


def test_closing_a_watch_wakes_its_waiting_thread(store: Store) -> None:
    watch = store.watch("", store.get_prefix("").revision + 1)
    news: list[object] = []
    waiting = threading.Thread(target=lambda: news.append(watch.changes(600)))
    waiting.start()
    time.sleep(0.05)  # so that it most likely waits; it must end either way
    watch.close()
    watch.close()
    waiting.join(WAIT_TIMEOUT)
    assert news == [()]
    assert watch.changes(600) == ()


def test_closing_a_store_ends_its_watches(backend: StoreBackend) -> None:
    store = backend.open()
    watch = store.watch("", 1)
    news: list[object] = []
    waiting = threading.Thread(target=lambda: news.append(watch.changes(600)))
    watch.changes(0.1)
    waiting.start()
    time.sleep(0.05)  # as above
    store.close()
    waiting.join(WAIT_TIMEOUT)
    assert news == [()]


def test_a_watch_behind_a_compaction_gets_a_listing_and_continues(
    backend: StoreBackend, store: Store, other_store: Store
) -> None:
    first = store.txn([], [Put("a", "1"), Put("b", "1")]).revision
    store.txn([], [Put("a", "2")], ["b"])
    last = store.txn([], [Put("other/c", "1")]).revision
    backend.compact(last)
    watch = other_store.watch("", first)
    assert read_batch(watch) == store.get_prefix("")
    store.txn([], [Put("a", "3")])
    assert read_batch(watch) == (Change("put", "a", "3", last + 1),)


def test_the_listing_after_a_compaction_has_the_watched_prefix_only(
    backend: StoreBackend, store: Store
) -> None:
    first = store.txn([], [Put("p/a", "1"), Put("q/a", "1")]).revision
    last = store.txn([], [Put("q/b", "1")]).revision
    backend.compact(last)
    news = read_batch(store.watch("p/", first))
    assert isinstance(news, Listing)
    assert [item.key for item in news.items] == ["p/a"]


def test_a_watch_from_the_oldest_kept_revision_gets_changes(backend: StoreBackend, store: Store) -> None:
    store.txn([], [Put("a", "1")])
    kept = store.txn([], [Put("a", "2")]).revision
    store.txn([], [Put("a", "3")])
    backend.compact(kept - 1)
    assert [change.value for change in read(store.watch("", kept), lambda seen: len(seen) == 2)] == ["2", "3"]


def test_a_deletion_at_the_compacted_revision_is_not_lost(backend: StoreBackend, store: Store) -> None:
    """etcd before 3.5.16 loses it silently."""
    store.txn([], [Put("a", "1"), Put("b", "1")])
    deleted = store.txn([], deletes=["a"]).revision
    backend.compact(deleted)
    news = read_batch(store.watch("", deleted))
    if isinstance(news, Listing):
        assert [item.key for item in news.items] == ["b"]
    else:
        assert news == (Change("delete", "a", "", deleted),)


def test_a_watch_that_is_up_to_date_is_unaffected_by_a_compaction(
    backend: StoreBackend, store: Store
) -> None:
    first = store.txn([], [Put("a", "1")]).revision
    watch = store.watch("", first)
    read_batch(watch)
    last = store.txn([], [Put("a", "2")]).revision
    assert read_batch(watch) == (Change("put", "a", "2", last),)
    backend.compact(last)
    store.txn([], [Put("a", "3")])
    assert read_batch(watch) == (Change("put", "a", "3", last + 1),)
