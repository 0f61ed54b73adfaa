"""The store in this process's memory: for tests, for simulations with their own clock, and for notebooks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import count
from threading import Condition

from unirun.errors import LeaseExpired, StoreAway
from unirun.rendezvous.store.protocol import (
    Change,
    Compare,
    KeyValue,
    Lease,
    Listing,
    Outcome,
    Put,
    ValueIs,
    check_key,
    check_prefix,
    check_ttl,
    check_txn,
)


class MemoryStore:
    """A `Store` that lives as long as its process; share the object to share the store.

    Leases expire by `clock` (seconds), which every call reads; only `changes` blocks. The history is kept until
    `compact` is called.
    """

    url = "memory:"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = Condition()
        self._items: dict[str, KeyValue] = {}
        self._leases: dict[str, int] = {}
        """The lease of each key that has one."""
        self._ends: dict[int, float] = {}
        self._lease_ids = count(1)
        self._revision = 1
        self._log: list[tuple[Change, ...]] = []
        """The changes of each revision from `_first` on."""
        self._first = 2
        self._closed = False

    def get(self, key: str) -> KeyValue | None:
        """Return the item of `key`, or None."""
        check_key(key)
        with self._changed:
            self._enter()
            return self._items.get(key)

    def get_prefix(self, prefix: str) -> Listing:
        """Return all items under `prefix`."""
        check_prefix(prefix)
        with self._changed:
            self._enter()
            return self._listing(prefix)

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        """Make all changes atomically if every comparison is true, else none."""
        check_txn(compares, puts, deletes)
        with self._changed:
            self._enter()
            if not all(map(self._holds, compares)):
                return Outcome(False, self._revision)
            for put in puts:
                if put.lease and put.lease.id not in self._ends:
                    raise LeaseExpired(f"the lease of {put.key} is over")
            gone = [key for target in deletes for key in self._keys(target)]
            self._commit(puts, gone)
            return Outcome(True, self._revision)

    def grant(self, ttl: float) -> Lease:
        """Create a lease of `ttl` seconds."""
        check_ttl(ttl)
        with self._changed:
            self._enter()
            lease = Lease(next(self._lease_ids), ttl)
            self._ends[lease.id] = self._clock() + ttl
            self._changed.notify_all()  # waiting threads must wake up when it ends
            return lease

    def keep_alive(self, lease: Lease) -> None:
        """Renew the lease."""
        with self._changed:
            self._enter()
            if lease.id not in self._ends:
                raise LeaseExpired(f"the lease {lease.id} is over")
            self._ends[lease.id] = self._clock() + lease.ttl

    def revoke(self, lease: Lease) -> None:
        """End a lease now, with its keys."""
        with self._changed:
            self._enter()
            self._end(lease.id)

    def watch(self, prefix: str, from_revision: int) -> MemoryWatch:
        """Changes under `prefix` from the transaction `from_revision` on."""
        check_prefix(prefix)
        with self._changed:
            self._enter()
            return MemoryWatch(self, prefix, from_revision)

    def close(self) -> None:
        """Refuse further calls; watches end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def compact(self, revision: int) -> None:
        """Delete the history before `revision`; watches that have not read it get a `Listing`."""
        with self._changed:
            self._enter()
            del self._log[: max(0, revision - self._first)]
            self._first = max(self._first, min(revision, self._revision + 1))

    def expire(self) -> None:
        """End the expired leases and wake up watches: for callers that set the clock."""
        with self._changed:
            self._enter()

    def _enter(self) -> None:
        if self._closed:
            raise StoreAway("the store was closed", "open another one")
        now = self._clock()
        for lease in sorted(self._ends, key=lambda lease: (self._ends[lease], lease)):
            if self._ends[lease] > now:
                break
            self._end(lease)

    def _end(self, lease: int) -> None:
        if self._ends.pop(lease, None) is not None:
            self._commit((), sorted(key for key, own in self._leases.items() if own == lease))

    def _commit(self, puts: Sequence[Put], gone: Sequence[str]) -> None:
        if not puts and not gone:
            return
        self._revision += 1
        for put in puts:
            self._items[put.key] = KeyValue(put.key, put.value, self._revision)
            self._leases.pop(put.key, None)
            if put.lease:
                self._leases[put.key] = put.lease.id
        for key in gone:
            del self._items[key]
            self._leases.pop(key, None)
        self._log.append(
            (
                *(Change("put", put.key, put.value, self._revision) for put in puts),
                *(Change("delete", key, "", self._revision) for key in gone),
            )
        )
        self._changed.notify_all()

    def _holds(self, compare: Compare) -> bool:
        item = self._items.get(compare.key)
        if isinstance(compare, ValueIs):
            return item is not None and item.value == compare.value
        return (item.revision if item else 0) == compare.revision

    def _keys(self, target: str) -> list[str]:
        """Existing keys of `target`, a key or a prefix."""
        if target and not target.endswith("/"):
            return [target] if target in self._items else []
        return sorted(key for key in self._items if key.startswith(target))

    def _listing(self, prefix: str) -> Listing:
        return Listing(tuple(self._items[key] for key in self._keys(prefix)), self._revision)

    def _since(self, revision: int, prefix: str) -> tuple[Change, ...] | Listing:
        if revision < self._first:
            return self._listing(prefix)
        news = self._log[revision - self._first :]
        return tuple(change for changes in news for change in changes if change.key.startswith(prefix))

    def _until_next_end(self) -> float:
        return min(self._ends.values(), default=math.inf) - self._clock()


class MemoryWatch:
    """The changes under a prefix of a `MemoryStore`."""

    def __init__(self, store: MemoryStore, prefix: str, from_revision: int) -> None:
        self._store, self._prefix = store, prefix
        self._next = max(2, from_revision)
        self._closed = False

    def changes(self, timeout: float) -> tuple[Change, ...] | Listing:
        """The next changes, or a `Listing` of what is there when some were compacted away."""
        store, changed = self._store, self._store._changed
        deadline = time.monotonic() + timeout
        with changed:
            while not (self._closed or store._closed):
                store._enter()
                news = store._since(self._next, self._prefix)
                self._next = max(self._next, store._revision + 1)
                left = deadline - time.monotonic()
                if news or left <= 0:
                    return news
                changed.wait(max(0.0, min(left, store._until_next_end())))
            return ()

    def close(self) -> None:
        """Stop; a thread that waits in `changes` gets an empty result."""
        with self._store._changed:
            self._closed = True
            self._store._changed.notify_all()
