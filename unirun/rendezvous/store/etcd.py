"""The store in etcd v3, for jobs on many hosts.

It speaks gRPC with etcd's own messages (`_etcd_messages`). No existing Python client moves a watch to another member,
logs in again when its token expires, and distinguishes a write that was not sent from one of unknown outcome.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

from unirun.errors import LeaseExpired
from unirun.rendezvous.store._etcd_cluster import (
    GRANT,
    KEEP_ALIVE,
    RANGE,
    REVOKE,
    TXN,
    Cluster,
    message,
    range_end,
    text,
)
from unirun.rendezvous.store._etcd_watch import EtcdWatch
from unirun.rendezvous.store.address import EtcdAddress
from unirun.rendezvous.store.protocol import (
    Compare,
    Item,
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

_MOD, _VALUE = 2, 3
"""Targets of a comparison in etcd's API."""


class EtcdStore:
    """A `Store` in the etcd at `address`. Connects when it is created. Raises `StoreError`.

    etcd counts leases in whole seconds and grants at least two. A forked child must open its own store.
    """

    def __init__(self, address: EtcdAddress, password: str | None = None) -> None:
        self.url = str(address)
        self._root = address.prefix
        self._cluster = Cluster(address, password)
        self._watches: weakref.WeakSet[EtcdWatch] = weakref.WeakSet()
        try:
            self._cluster.connect()
        except BaseException:
            self._cluster.close()
            raise

    def get(self, key: str) -> Item | None:
        """Return the item of `key`, or None."""
        check_key(key)
        response = self._cluster.call(RANGE, message("RangeRequest", key=self._key(key)))
        return self._item(response.kvs[0]) if response.kvs else None

    def get_prefix(self, prefix: str) -> Listing:
        """Return all items under `prefix`."""
        check_prefix(prefix)
        key = self._key(prefix)
        response = self._cluster.call(RANGE, message("RangeRequest", key=key, range_end=range_end(key)))
        return Listing(tuple(map(self._item, response.kvs)), response.header.revision)

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        """Make all changes atomically if every comparison is true, else none."""
        check_txn(compares, puts, deletes)
        changes = [*map(self._put, puts), *map(self._delete, deletes)]
        request = message("TxnRequest", compare=[self._compare(each) for each in compares], success=changes)
        response = self._cluster.call(TXN, request, repeatable=not changes)
        return Outcome(response.succeeded, response.header.revision)

    def grant(self, ttl: float) -> Lease:
        """Create a lease of `ttl` seconds, rounded up to whole ones."""
        check_ttl(ttl)
        # Repeatable: a lease left by a lost answer has no keys.
        response = self._cluster.call(GRANT, message("LeaseGrantRequest", TTL=math.ceil(ttl)))
        return Lease(response.ID, float(response.TTL))

    def keep_alive(self, lease: Lease) -> None:
        """Renew the lease."""
        response = self._cluster.call(KEEP_ALIVE, message("LeaseKeepAliveRequest", ID=lease.id))
        if not response.TTL:
            raise LeaseExpired(f"the lease {lease.id} is over")

    def revoke(self, lease: Lease) -> None:
        """End a lease now, with its keys."""
        try:
            self._cluster.call(REVOKE, message("LeaseRevokeRequest", ID=lease.id))
        except LeaseExpired:
            return

    def watch(self, prefix: str, from_revision: int) -> EtcdWatch:
        """Changes under `prefix` from the transaction `from_revision` on."""
        check_prefix(prefix)
        self._cluster.check_open()
        watch = EtcdWatch(self._cluster, prefix, from_revision, self.get_prefix)
        self._watches.add(watch)
        return watch

    def close(self) -> None:
        """Close all connections; watches end."""
        if self._cluster.is_inherited:
            return
        watches = list(self._watches)
        self._cluster.close()
        for watch in watches:
            watch.close()

    def _key(self, key: str) -> bytes:
        return f"{self._root}{key}".encode()

    def _item(self, pair: Any) -> Item:
        return Item(text(pair.key)[len(self._root) :], text(pair.value), pair.mod_revision)

    def _compare(self, compare: Compare) -> Any:
        key = self._key(compare.key)
        if isinstance(compare, ValueIs):
            return message("Compare", target=_VALUE, key=key, value=compare.value.encode())
        return message("Compare", target=_MOD, key=key, mod_revision=compare.revision)

    def _put(self, put: Put) -> Any:
        lease = put.lease.id if put.lease else 0
        request = message("PutRequest", key=self._key(put.key), value=put.value.encode(), lease=lease)
        return message("RequestOp", request_put=request)

    def _delete(self, target: str) -> Any:
        key = self._key(target)
        end = range_end(key) if key.endswith(b"/") else b""
        return message(
            "RequestOp", request_delete_range=message("DeleteRangeRequest", key=key, range_end=end)
        )
