"""The store in etcd v3, for jobs on many hosts.

It speaks gRPC with etcd's own messages (`_etcd_cluster`). No existing Python client moves a watch to another member,
logs in again when its token expires, and distinguishes a write that was not sent from one of unknown outcome.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from unirun.errors import LeaseExpired, StoreAway, StoreError
from unirun.rendezvous.store._etcd_cluster import (
    GRANT,
    KEEP_ALIVE,
    RANGE,
    REVOKE,
    TXN,
    WATCH,
    Cluster,
    explain,
    explain_text,
    grpc,
    judge,
    message,
    range_end,
    text,
)
from unirun.rendezvous.store.protocol import (
    Change,
    Compare,
    EtcdAddress,
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

# A watch that continues at its position on another member of etcd when its stream breaks.

_UNREAD = 1000
"""Maximum number of unread responses; beyond it the stream is not read, which slows the server down."""

_WATCH_JOIN_TIMEOUT = 1.0
"""Seconds that `close` waits for the thread, which may be blocked in a call to a silent member."""

_FAILOVER_TIMEOUT = 1.0
"""Seconds before a broken watch is reported: the time to find another member."""

_PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Back-off in seconds between attempts to watch again."""


class EtcdWatch:
    """The changes under a prefix of an `EtcdStore`. A thread reads them, from any member that answers."""

    def __init__(
        self, cluster: Cluster, prefix: str, from_revision: int, listing: Callable[[str], Listing]
    ) -> None:
        self._cluster, self._prefix, self._listing = cluster, prefix, listing
        self._next = max(1, from_revision)
        """The revision of the next change to read from the server."""
        self._news: deque[tuple[Change, ...] | Listing] = deque()
        self._fragments: list[Any] = []
        self._trouble: StoreError | None = None
        self._since = 0.0
        """Start of the trouble (``time.monotonic``)."""
        self._failures = 0
        self._closed = False
        self._state = threading.Condition()
        self._stream: Any = None
        self._thread = threading.Thread(target=self._run, name=f"watch {prefix}", daemon=True)
        self._thread.start()

    def changes(self, timeout: float) -> tuple[Change, ...] | Listing:
        """The next changes, or a `Listing` of what is there when some were compacted away."""
        deadline = time.monotonic() + timeout
        with self._state:
            while True:
                if self._closed:
                    return ()
                if self._news:
                    self._state.notify_all()
                    return self._news.popleft()
                left = deadline - time.monotonic()
                self._complain(timeout if left <= 0 else math.inf)
                if left <= 0:
                    return ()
                self._state.wait(left)

    def close(self) -> None:
        """Stop; a thread that waits in `changes` gets an empty result."""
        with self._state:
            self._closed = True
            stream = self._stream
            self._state.notify_all()
        if stream is not None:
            stream.cancel()
        self._thread.join(_WATCH_JOIN_TIMEOUT)

    def _complain(self, patience: float) -> None:
        """Raise the trouble when it is permanent or has lasted for `patience` seconds."""
        trouble = self._trouble
        if trouble is None:
            return
        if isinstance(trouble, StoreAway) and time.monotonic() - self._since < max(
            patience, _FAILOVER_TIMEOUT
        ):
            return
        raise type(trouble)(trouble.problem, trouble.remedy) from trouble

    def _run(self) -> None:
        while not self._closed:
            try:
                self._follow()
            except StoreError as error:
                self._note(error)
            with self._state:
                pause = _PAUSES[min(self._failures, len(_PAUSES)) - 1] if self._failures else 0.0
                self._state.wait_for(lambda: self._closed, pause)

    def _note(self, trouble: StoreError | None) -> None:
        with self._state:
            if self._trouble is None:
                self._since = time.monotonic()
            self._failures = self._failures + 1 if trouble else 0
            self._trouble = trouble
            self._state.notify_all()

    def _follow(self) -> None:
        """Read one stream until it breaks."""
        prefix = f"{self._cluster.address.prefix}{self._prefix}".encode()
        probe = message("RangeRequest", key=prefix, limit=1, keys_only=True)
        now = self._cluster.call(RANGE, probe).header.revision
        # Up to 3.5.15 etcd silently loses a deletion whose revision equals the compacted one. A watch that starts one
        # revision earlier is told of the compaction. Changes that were read already are skipped.
        start = max(1, self._next - 1) if now >= self._next else self._next
        create = message(
            "WatchCreateRequest",
            key=prefix,
            range_end=range_end(prefix),
            start_revision=start,
            progress_notify=True,
            fragment=True,
        )
        member = self._cluster.connect()
        over = threading.Event()
        try:
            requests = _once(message("WatchRequest", create_request=create), over)
            stream = self._cluster.stream(member, WATCH, requests)
            with self._state:
                self._stream = stream
                if self._closed:
                    stream.cancel()
            for response in stream:
                if not self._take(response):
                    return
        except grpc.RpcError as error:
            self._broken(member, error)
        finally:
            over.set()
            self._fragments.clear()
            if self._stream is not None:
                self._stream.cancel()

    def _broken(self, member: str, error: grpc.RpcError) -> None:
        if self._closed:
            return
        verdict = judge(error)
        if verdict == "logged out":
            self._cluster.log_in_again()
        elif verdict == "final":
            raise explain(error, self._cluster.address) from error
        else:
            self._cluster.leave(member, error)
            raise StoreAway(f"a watch of etcd at {member} has broken: {error.details()}") from error

    def _take(self, response: Any) -> bool:
        """Process one `response`. Returns False at the end of the stream."""
        if response.compact_revision:
            listing = self._listing(self._prefix)
            self._add(listing, listing.revision + 1)
            return False
        if response.canceled:
            raise explain_text(
                grpc.StatusCode.FAILED_PRECONDITION, response.cancel_reason, self._cluster.address
            )
        self._fragments.extend(response.events)
        if response.created:
            self._note(None)
        elif not response.fragment:
            # A response without events reports progress, so that a later compaction before it does no harm.
            # With events, the revision in the header may be ahead of them.
            last = self._fragments[-1].kv.mod_revision if self._fragments else response.header.revision
            changes = tuple(self._changes())
            self._fragments.clear()
            self._add(changes, max(self._next, last + 1))
        return True

    def _changes(self) -> Iterator[Change]:
        skip = len(self._cluster.address.prefix)
        for event in self._fragments:
            revision = event.kv.mod_revision
            if revision >= self._next:
                key = text(event.kv.key)[skip:]
                if event.type:
                    yield Change("delete", key, "", revision)
                else:
                    yield Change("put", key, text(event.kv.value), revision)

    def _add(self, news: tuple[Change, ...] | Listing, following: int) -> None:
        with self._state:
            self._state.wait_for(lambda: self._closed or len(self._news) < _UNREAD)
            if news:
                self._news.append(news)
            self._next = following
            self._state.notify_all()


def _once(request: Any, over: threading.Event) -> Iterator[Any]:
    """Yield `request`, then block until the stream is over: ending the requests would end the watch."""
    yield request
    over.wait()


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

    def get(self, key: str) -> KeyValue | None:
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

    def _item(self, pair: Any) -> KeyValue:
        return KeyValue(text(pair.key)[len(self._root) :], text(pair.value), pair.mod_revision)

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
