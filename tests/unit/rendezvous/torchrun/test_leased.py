"""Leased writes expire some time after their node is gone."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from unirun.rendezvous.store.memory import MemoryStore
from unirun.rendezvous.store.protocol import Compare, Lease, Outcome, Put
from unirun.rendezvous.torchrun.handler import LeasedWriter

TTL = 40.0


class Clocked(MemoryStore):
    """A store with a settable clock, which fails when a call is repeated endlessly."""

    def __init__(self) -> None:
        super().__init__(lambda: self.now)
        self.now = 1000.0
        self.calls: list[str] = []

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        self._called("txn")
        return super().txn(compares, puts, deletes)

    def grant(self, ttl: float) -> Lease:
        self._called("grant")
        return super().grant(ttl)

    def keep_alive(self, lease: Lease) -> None:
        self._called("keep_alive")
        super().keep_alive(lease)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        assert len(self.calls) < 20, f"no end of calls: {self.calls}"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    store = Clocked()
    monkeypatch.setattr(time, "monotonic", lambda: store.now)
    return store


def keys(store: MemoryStore) -> list[str]:
    return [item.key for item in store.get_prefix("").items]


def test_frequent_leased_writes_share_one_lease_that_is_renewed_now_and_then(store: Clocked) -> None:
    writer = LeasedWriter(store, TTL)
    writer.txn([], {"a": "1"})
    store.now += TTL / 4
    writer.txn([], {"b": "1"})
    assert store.calls == ["grant", "txn", "txn"]
    store.now += TTL / 4
    writer.txn([], {"b": "2"})
    writer.txn([], {"b": "3"})
    assert store.calls[3:] == ["keep_alive", "txn", "txn"]
    store.now += TTL * 0.9
    assert keys(store) == ["a", "b"]
    store.now += TTL
    assert keys(store) == []


def test_a_leased_write_after_expiry_gets_a_new_lease(store: Clocked) -> None:
    writer = LeasedWriter(store, TTL)
    writer.txn([], {"a": "1"})
    store.now += TTL
    assert writer.txn([], {"b": "1"}).succeeded
    assert keys(store) == ["b"]
    store.now += TTL
    assert keys(store) == []


def test_a_revoked_lease_is_replaced_by_the_next_leased_write(store: Clocked) -> None:
    writer = LeasedWriter(store, TTL)
    writer.txn([], {"a": "1"})
    assert writer._lease is not None
    store.revoke(writer._lease)
    assert writer.txn([], {"b": "1"}).succeeded
    assert store.calls == ["grant", "txn", "txn", "grant", "txn"]
    store.now += TTL
    assert keys(store) == []


def test_a_new_lease_is_not_dropped_when_an_old_one_has_expired(store: Clocked) -> None:
    """Another thread noticed the end of the common lease and got a new one meanwhile."""
    writer = LeasedWriter(store, TTL)
    writer.txn([], {"a": "1"})
    old = writer._lease
    assert old is not None
    store.now += TTL
    writer.txn([], {"a": "2"})
    writer._forget(old)
    writer.txn([], {"a": "3"})
    assert store.calls.count("grant") == 2
