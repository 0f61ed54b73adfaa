"""Writes to a store under a lease, so that they expire some time after their node is gone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from threading import Lock

from unirun.errors import LeaseExpired
from unirun.rendezvous.store.protocol import Compare, Lease, Outcome, Put, Store

RETRY = 0.1
"""Seconds between two attempts to reach a store that is away."""


class LeasedWriter:
    """Puts keys under a lease that expires at most `ttl` seconds after the last write. Thread-safe."""

    def __init__(self, store: Store, ttl: float) -> None:
        self._store, self._ttl = store, ttl
        self._lock = Lock()
        self._lease: Lease | None = None
        self._kept = 0.0

    def txn(self, compares: Sequence[Compare], values: Mapping[str, str]) -> Outcome:
        """Put all `values` if every comparison is true, else none. Raises `StoreError`, but not `LeaseExpired`: an
        expired lease is replaced."""
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
                # Renewed well before its end, but not with every write.
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
