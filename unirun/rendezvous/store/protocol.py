"""What unirun needs of a store; memory, SQLite and etcd v3 offer it, and one contract suite holds them to it.

Keys are paths such as ``jobs/run1/head``, relative to the prefix in the store's URL; values are text. A key never
ends with ``/`` and a prefix always does, so that what is said of ``jobs/run1/`` is never said of ``jobs/run10``.
Every change has a revision; revisions grow by one with each transaction that changes something.

All methods block, have a deadline, and raise `StoreError`: `StoreAway` when nothing was done, `OutcomeUnknown` when
a write may or may not have been done. They may be called from several threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from unirun.values import Value

MAX_CHANGES = 128
"""A transaction has at most so many comparisons, and so many changes. What etcd takes by default."""

MAX_SIZE = 1024 * 1024
"""Bytes of all keys and values that a transaction puts. etcd takes 1.5 MiB by default, with all that is around them."""


class Item(Value):
    """A key with its value. `revision` is that of the transaction that has put it last."""

    key: str
    value: str
    revision: int


class Listing(Value):
    """Everything under a prefix, in order of keys, as of `revision`."""

    items: tuple[Item, ...]
    revision: int


class Lease(Value):
    """What keeps keys in the store until `ttl` seconds after it was last kept alive. A store may grant a longer one
    than was asked for."""

    id: int
    ttl: float


class ValueIs(Value):
    """Holds when `key` is there and has `value`."""

    key: str
    value: str


class RevisionIs(Value):
    """Holds when `key` was put last by the transaction `revision`; 0: when it is not there."""

    key: str
    revision: int


Compare = ValueIs | RevisionIs


class Put(Value):
    """Give `key` a `value`; with a lease it goes away when that ends."""

    key: str
    value: str
    lease: Lease | None = None


class Outcome(Value):
    """Whether every comparison held, so that the changes were made, and the store's revision then."""

    succeeded: bool
    revision: int


class Change(Value):
    """One key was put or deleted by the transaction `revision`; `value` is empty for a deletion."""

    kind: Literal["put", "delete"]
    key: str
    value: str
    revision: int


class Watch(Protocol):
    """The changes under a prefix, in order, none lost and none twice, through restarts of the server."""

    def changes(self, timeout: float) -> tuple[Change, ...] | Listing:
        """The next changes, those of one transaction never torn apart; empty when there were none for `timeout` s.

        A `Listing` comes instead when changes that were not read yet have been compacted away: this is what is
        there now, and what was there before and is not in it is gone. Raises `StoreAway` when the server cannot be
        reached for so long; the watch goes on where it was when `changes` is called again.
        """

    def close(self) -> None:
        """Stop; a thread that waits in `changes` gets an empty result. Safe to call twice."""


class Store(Protocol):
    """A key-value store with transactions, leases and watches."""

    url: str
    """Where it is, without passwords."""

    def get(self, key: str) -> Item | None:
        """One key, or None; never older than what this store has written or read before."""

    def get_prefix(self, prefix: str) -> Listing:
        """Everything under `prefix` (which ends with ``/``, or is empty for the whole store)."""

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        """Make all changes at once if every comparison holds, else none. A deletion that ends with ``/`` is one of
        a whole prefix; what is not there is deleted without a change. No key may be changed twice, and
        `MAX_CHANGES` and `MAX_SIZE` hold. Raises `LeaseExpired` for a put with a lease that is over."""

    def grant(self, ttl: float) -> Lease:
        """A new lease of at least `ttl` seconds."""

    def keep_alive(self, lease: Lease) -> None:
        """Start the lease's time anew. Raises `LeaseExpired`."""

    def revoke(self, lease: Lease) -> None:
        """End a lease now, with its keys. One that has ended already is no error."""

    def watch(self, prefix: str, from_revision: int) -> Watch:
        """Changes under `prefix` from the transaction `from_revision` on, that one included."""

    def close(self) -> None:
        """Close connections and files; leases go on until they end. Safe to call twice."""
