"""Leases: keys that expire unless they are kept alive."""

from __future__ import annotations

import threading
import time

import pytest

from tests.contract.store.backends import StoreBackend, read, read_batch
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import LeaseExpired
from unirun.rendezvous.store.protocol import Change, Lease, Put, RevisionIs, Store


def is_over(store: Store, lease: Lease) -> bool:
    try:
        store.keep_alive(lease)
    except LeaseExpired:
        return True
    return False


def test_a_lease_is_at_least_as_long_as_requested(store: Store) -> None:
    assert store.grant(0.1).ttl >= 0.1
    assert store.grant(7.5).ttl >= 7.5
    assert store.grant(1).id != store.grant(1).id


@pytest.mark.parametrize("ttl", [0, -1, float("inf"), float("nan")])
def test_a_lease_with_an_invalid_time_is_refused(store: Store, ttl: float) -> None:
    with pytest.raises(ValueError, match="lease"):
        store.grant(ttl)


def test_an_expired_lease_deletes_its_keys_and_watches_see_it(
    backend: StoreBackend, store: Store, other_store: Store
) -> None:
    started = time.monotonic()
    lease = store.grant(backend.ttl)
    put = store.txn([], [Put("a/1", "x", lease), Put("a/2", "y", lease), Put("a/stays", "z")])
    watch = other_store.watch("", put.revision + 1)
    gone = read_batch(watch)  # nobody else touches the store
    took = time.monotonic() - started
    revision = put.revision + 1
    assert gone == (Change("delete", "a/1", "", revision), Change("delete", "a/2", "", revision))
    assert took > lease.ttl * 0.9
    assert [item.key for item in store.get_prefix("a/").items] == ["a/stays"]
    assert store.get("a/1") is None
    with pytest.raises(LeaseExpired):
        store.keep_alive(lease)
    with pytest.raises(LeaseExpired):
        store.txn([], [Put("b", "1"), Put("a/1", "x", lease)])
    assert store.get("b") is None, "a transaction with a lease that is over does nothing"
    assert not store.txn([RevisionIs("b", 99)], [Put("a/1", "x", lease)]).succeeded
    store.revoke(lease)


def test_a_reader_sees_the_expiry_of_a_lease(backend: StoreBackend, store: Store, other_store: Store) -> None:
    lease = store.grant(backend.ttl)
    store.txn([], [Put("a", "1", lease)])
    eventually(lambda: other_store.get("a") is None)
    assert other_store.get_prefix("").items == ()


def test_a_lease_that_is_kept_alive_does_not_end(store: Store, other_store: Store) -> None:
    lease = store.grant(2.0)
    store.txn([], [Put("a", "1", lease)])
    end = time.monotonic() + 1.6 * lease.ttl
    while time.monotonic() < end:
        store.keep_alive(lease)
        time.sleep(lease.ttl / 10)
    assert other_store.get("a") is not None


@pytest.mark.parametrize("backend", ["sqlite", "etcd"], indirect=True)
def test_a_lease_outlives_the_client_that_closed(backend: StoreBackend, store: Store) -> None:
    client = backend.open()
    lease = client.grant(1.0)
    client.txn([], [Put("a", "1", lease)])
    client.close()
    assert store.get("a") is not None
    store.keep_alive(lease)
    eventually(lambda: store.get("a") is None)


def test_a_revoked_lease_deletes_its_keys_at_once(store: Store, other_store: Store) -> None:
    lease = store.grant(60)
    put = store.txn([], [Put("b", "1", lease), Put("a", "1", lease), Put("c", "1")])
    watch = other_store.watch("", put.revision + 1)
    store.revoke(lease)
    revision = put.revision + 1
    assert read_batch(watch) == (Change("delete", "a", "", revision), Change("delete", "b", "", revision))
    assert [item.key for item in other_store.get_prefix("").items] == ["c"]
    assert is_over(store, lease)
    store.revoke(lease)
    assert store.get_prefix("").revision == revision, "a lease ends once"


def test_the_end_of_a_lease_without_keys_changes_nothing(store: Store) -> None:
    before = store.get_prefix("").revision
    store.revoke(store.grant(60))
    assert store.get_prefix("").revision == before


def test_a_key_belongs_to_the_lease_of_its_last_put(store: Store) -> None:
    first, second = store.grant(60), store.grant(60)
    store.txn([], [Put(key, "1", first) for key in ("freed", "moved", "kept")])
    store.txn([], [Put("freed", "2"), Put("moved", "2", second)])
    store.revoke(first)
    assert [item.key for item in store.get_prefix("").items] == ["freed", "moved"]
    store.revoke(second)
    assert [item.key for item in store.get_prefix("").items] == ["freed"]


def test_a_key_that_was_deleted_and_put_again_has_no_lease(store: Store) -> None:
    lease = store.grant(60)
    store.txn([], [Put("a", "1", lease)])
    store.txn([], deletes=["a"])
    store.txn([], [Put("a", "2")])
    store.revoke(lease)
    assert store.get("a") is not None


def test_a_waiting_watch_sees_the_end_of_a_lease_granted_meanwhile(
    backend: StoreBackend, store: Store, other_store: Store
) -> None:
    watch = other_store.watch("", store.get_prefix("").revision + 1)
    seen: list[Change] = []
    waiting = threading.Thread(target=lambda: seen.extend(read(watch, lambda changes: len(changes) == 2)))
    waiting.start()
    store.txn([], [Put("a", "1", store.grant(backend.ttl))])
    waiting.join(WAIT_TIMEOUT)
    assert [change.kind for change in seen] == ["put", "delete"]
