"""Writes to a store that go away when the node that made them is gone for a while."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from threading import Lock

from unirun.errors import LeaseExpired
from unirun.rendezvous.store.protocol import Compare, Lease, Outcome, Put, Store

RETRY = 0.1
"""Seconds between two attempts to reach a store that is away."""


class LeasedWriter:
    """Puts keys under a lease that ends `ttl` seconds or a little less after the last write. For any thread."""

    def __init__(self, store: Store, ttl: float) -> None:
        self._store, self._ttl = store, ttl
        self._lock = Lock()
        self._lease: Lease | None = None
        self._kept = 0.0

    def txn(self, compares: Sequence[Compare], values: Mapping[str, str]) -> Outcome:
        """Put all `values` if every comparison holds, else none. Raises `StoreError`, but not `LeaseExpired`: who has
        been away for longer than the lease gets a new one."""
        while True:
            lease = self._current()
            try:
                return self._store.txn(compares, [Put(key, value, lease) for key, value in values.items()])
            except LeaseExpired:
                self._forget(lease)

    def _current(self) -> Lease:
        with self._lock:
            now = time.monotonic()
            if self._lease is not None and now - self._kept > self._ttl / 4:
                # Well before its end, and not with every write.
                try:
                    self._store.keep_alive(self._lease)
                    self._kept = now
                except LeaseExpired:
                    self._lease = None
            if self._lease is None:
                self._lease, self._kept = self._store.grant(self._ttl), now
            return self._lease

    def _forget(self, lease: Lease) -> None:
        with self._lock:
            if self._lease == lease:
                self._lease = None
