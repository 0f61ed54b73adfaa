"""The protocols `Store` and `Watch`, implemented in memory, in SQLite and in etcd v3; one contract suite tests all.

Keys are paths such as ``jobs/run1/head``, relative to the prefix in the store's URL; values are text. A key never
ends with ``/`` and a prefix always does, so that ``jobs/run1/`` does not match ``jobs/run10``. Every change has a
revision, which grows by one with each transaction that changes something.

All methods block, have a deadline, and raise `StoreError`: `StoreAway` when nothing was done, `OutcomeUnknown` when
a write may have been done. They are thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol

from unirun.errors import StoreRefused
from unirun.values import Value

MAX_CHANGES = 128
"""Maximum number of comparisons, and of changes, of a transaction: etcd's default."""

MAX_SIZE = 1024 * 1024
"""Maximum size in bytes of all keys and values that a transaction puts. etcd's default is 1.5 MiB, with overhead."""


class KeyValue(Value):
    """A key with its value. `revision` is that of the transaction that put it last."""

    key: str
    value: str
    revision: int


class Listing(Value):
    """All items under a prefix, in order of keys, as of `revision`."""

    items: tuple[KeyValue, ...]
    revision: int


class Lease(Value):
    """Expires `ttl` seconds after it was last kept alive, which deletes its keys. A store may grant a longer lease than
    requested."""

    id: int
    ttl: float


class ValueIs(Value):
    """True when `key` exists and has `value`."""

    key: str
    value: str


class RevisionIs(Value):
    """True when `key` was put last by the transaction `revision`; with 0, when it does not exist."""

    key: str
    revision: int


Compare = ValueIs | RevisionIs


class Put(Value):
    """Set `key` to `value`; with a lease, the key is deleted when the lease ends."""

    key: str
    value: str
    lease: Lease | None = None


class Outcome(Value):
    """The outcome of a transaction: true if all comparisons held and it was made; and the revision after it."""

    succeeded: bool
    revision: int


class Change(Value):
    """One key was put or deleted by the transaction `revision`; `value` is empty for a deletion."""

    kind: Literal["put", "delete"]
    key: str
    value: str
    revision: int


class Watch(Protocol):
    """The changes under a prefix, in order and exactly once, also across restarts of the server."""

    def changes(self, timeout: float) -> tuple[Change, ...] | Listing:
        """Return the next changes, whole transactions only; empty when there are none within `timeout` seconds.

        Returns a `Listing` instead when unread changes have been compacted away: it has the present items; all others
        are deleted. Raises `StoreAway` when the server cannot be reached for `timeout` seconds; the next call
        continues at the same position.
        """

    def close(self) -> None:
        """Stop; a thread blocked in `changes` gets an empty result. Safe to call twice."""


class Store(Protocol):
    """A key-value store with transactions, leases and watches."""

    url: str
    """Its URL, without passwords."""

    def get(self, key: str) -> KeyValue | None:
        """Return the item of `key` or None; never older than what this object has written or read before."""

    def get_prefix(self, prefix: str) -> Listing:
        """Return all items under `prefix`, which ends with ``/`` or is empty (the whole store)."""

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        """Make all changes atomically if every comparison is true, else none.

        A delete that ends with ``/`` deletes the whole prefix; deleting a missing key is no change. No key may be
        changed twice; `MAX_CHANGES` and `MAX_SIZE` apply. Raises `LeaseExpired` for a put with an expired lease."""

    def grant(self, ttl: float) -> Lease:
        """Create a lease of at least `ttl` seconds."""

    def keep_alive(self, lease: Lease) -> None:
        """Renew the lease. Raises `LeaseExpired`."""

    def revoke(self, lease: Lease) -> None:
        """End a lease now and delete its keys. An expired lease is no error."""

    def watch(self, prefix: str, from_revision: int) -> Watch:
        """Watch changes under `prefix`, from the transaction `from_revision` (inclusive) on."""

    def close(self) -> None:
        """Close connections and files; leases last until they expire. Safe to call twice."""


# Argument checks shared by all stores, so that all accept the same calls.


def check_key(key: str) -> None:
    """Raise ValueError for an invalid key."""
    if not key or key.endswith("/"):
        raise ValueError(f"{key!r} is no key: a key is not empty and does not end with '/'")
    key.encode()  # raises for lone surrogates


def check_prefix(prefix: str) -> None:
    """Raise ValueError for an invalid prefix."""
    if prefix and not prefix.endswith("/"):
        raise ValueError(f"{prefix!r} is no prefix: a prefix is empty or ends with '/'")


def check_ttl(ttl: float) -> None:
    """Raise ValueError for a lease that is not positive and finite."""
    if not 0 < ttl < math.inf:
        raise ValueError(f"a lease cannot last {ttl} seconds")


def check_txn(compares: Sequence[Compare], puts: Sequence[Put], deletes: Sequence[str]) -> None:
    """Refuse a transaction that is too large or changes a key twice. Raises ValueError, `StoreRefused`."""
    for compare in compares:
        check_key(compare.key)
    for put in puts:
        check_key(put.key)
    changes = len(puts) + len(deletes)
    if changes > MAX_CHANGES or len(compares) > MAX_CHANGES:
        raise ValueError(
            f"a transaction has at most {MAX_CHANGES} comparisons and as many changes;"
            f" this one has {len(compares)} and {changes}"
        )
    size = sum(len(put.key.encode()) + len(put.value.encode()) for put in puts)
    if size > MAX_SIZE:
        raise StoreRefused(
            f"a transaction of {size} bytes is too large: {MAX_SIZE} is the most",
            "write it in several parts",
        )
    _check_overlaps([put.key for put in puts], deletes)


def _check_overlaps(puts: list[str], deletes: Sequence[str]) -> None:
    targets = {*puts, *deletes}
    if len(targets) < len(puts) + len(deletes):
        raise ValueError("a transaction changes the same key twice")
    everything = [prefix for prefix in deletes if not prefix or prefix.endswith("/")]
    for prefix in everything:
        for target in targets:
            if target != prefix and target.startswith(prefix):
                raise ValueError(f"a transaction deletes {prefix!r} and changes {target!r} besides")
