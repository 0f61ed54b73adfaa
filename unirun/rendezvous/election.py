"""The keys of a store, and leader election: one leader at a time under a prefix, each with a unique epoch.

``<prefix>lead/epoch`` holds the number of the latest term, and is deleted with the job alone. ``<prefix>lead/leader``
holds the leader's address and is deleted when the leader's lease expires. There are no other keys below
``<prefix>lead/``, so a watch of it only reports elections. A leader fences each write with the revision at which it has
put ``<prefix>lead/epoch``, so it is safe to depose a leader that only seems to be dead: its later writes are rejected.
The number would not do: a job that is removed takes it along, and the next one of the same id counts from 1 again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from msgspec import to_builtins

from unirun.errors import Fenced, FrameError, LeaseExpired, OutcomeUnknown, StoreRefused, UnirunError
from unirun.observe.status import Summary
from unirun.rendezvous.store.protocol import (
    Compare,
    KeyValue,
    Lease,
    Listing,
    Put,
    RevisionIs,
    Store,
    Watch,
    clock,
)
from unirun.spec.read import is_run_id
from unirun.values import Value
from unirun.wire.address import Address, UnixAddress
from unirun.wire.frames import from_json


class Leader(Value):
    """The leader of term `epoch`: its address and process id."""

    epoch: int
    address: Address
    pid: int

    def to_json(self) -> dict[str, Any]:
        """Return the form that commands print."""
        return {
            "epoch": self.epoch,
            "address": f"{'unix' if isinstance(self.address, UnixAddress) else 'tcp'}:{self.address}",
            "host": self.address.host,
            "pid": self.pid,
        }


def seat_prefix(prefix: str) -> str:
    """Return the prefix of the two keys of an election."""
    return f"{prefix}lead/"


def _leader_key(prefix: str) -> str:
    return f"{seat_prefix(prefix)}leader"


def _epoch_key(prefix: str) -> str:
    return f"{seat_prefix(prefix)}epoch"


def leader_of(store: Store, prefix: str) -> Leader | None:
    """Return the leader under `prefix`, None when there is none. Raises `StoreError`."""
    return _leader(store.get(_leader_key(prefix)))


def latest_epoch(store: Store, prefix: str) -> int:
    """Return the number of the latest term under `prefix`, 0 when there was none. Raises `StoreError`."""
    item = store.get(_epoch_key(prefix))
    return _number(item) if item is not None else 0


def read_seat(prefix: str, values: Mapping[str, str]) -> tuple[int, Leader | None]:
    """Return the number of the latest term under `prefix` (0: none) and its leader. `values` are those of the keys
    below `seat_prefix`. Raises `StoreRefused` for values that unirun has not written."""
    leader, epoch = values.get(_leader_key(prefix)), values.get(_epoch_key(prefix))
    return (
        _number(KeyValue(_epoch_key(prefix), epoch, 0)) if epoch is not None else 0,
        _leader(KeyValue(_leader_key(prefix), leader, 0) if leader is not None else None),
    )


def _leader(item: KeyValue | None) -> Leader | None:
    if item is None:
        return None
    try:
        return from_json(Leader, item.value)
    except FrameError as error:
        raise _foreign(item) from error


def _number(item: KeyValue) -> int:
    try:
        return int(item.value)
    except ValueError as error:
        raise _foreign(item) from error


def _foreign(item: KeyValue) -> StoreRefused:
    return StoreRefused(
        f"{ascii(item.key)[1:-1]} holds {item.value!a:.80}, which no unirun has written",
        "does the store's prefix belong to something else? choose another one",
    )


class Term:
    """The term of one leader. `keep` must be called at least every `ttl` seconds.

    Nobody else had led at the time `renewed`, of a clock that also counts while the host is suspended.
    """

    def __init__(
        self, store: Store, prefix: str, leader: Leader, revision: int, lease: Lease, began: float
    ) -> None:
        """`revision` is that of the transaction that began the term."""
        self._store, self._prefix, self._leader, self._revision = store, prefix, leader, revision
        self._lease: Lease | None = lease
        self.epoch, self.address = leader.epoch, leader.address
        self.ttl = lease.ttl
        self.renewed = began

    @property
    def fence(self) -> Compare:
        """The comparison that every write of this term must include."""
        return RevisionIs(_epoch_key(self._prefix), self._revision)

    def keep(self) -> None:
        """Renew the lease; take a new one after it has expired, unless there is another leader. Raises `Fenced`."""
        began = clock()
        self._renew()
        self.renewed = began

    def _renew(self) -> None:
        if self._lease is not None:
            try:
                self._store.keep_alive(self._lease)
            except LeaseExpired:
                self._lease = None
        if self._lease is not None:
            epoch = self._store.get(_epoch_key(self._prefix))
            if epoch is None or epoch.revision != self._revision:
                raise self._fenced()
            return
        lease = self._store.grant(self.ttl)
        # After an unknown outcome the next call repeats this; a lease of the first attempt expires by itself.
        put = Put(_leader_key(self._prefix), _record(self._leader), lease)
        if not self._store.txn([self.fence], [put]).succeeded:
            raise self._fenced()
        self._lease = lease

    def resign(self) -> None:
        """Stop leading now, so that a successor need not wait for the lease to expire."""
        if self._lease is not None:
            self._store.revoke(self._lease)
            self._lease = None

    def _fenced(self) -> Fenced:
        return Fenced(f"the term {self.epoch} under {self._prefix} is over: another leads now")


def campaign(
    store: Store, prefix: str, address: Address, pid: int, *, ttl: float, deposing: int = 0
) -> Term | None:
    """Try to become the leader under `prefix`. Returns None when there is a leader or another candidate won.

    `ttl` is the lease in seconds. `deposing` is the epoch of a leader that is known to be dead: it is replaced before
    its lease expires.
    """
    began = clock()
    seat, latest = store.get(_leader_key(prefix)), store.get(_epoch_key(prefix))
    present = _leader(seat)
    if present is not None and present.epoch != deposing:
        return None
    epoch = _number(latest) + 1 if latest else 1
    leader = Leader(epoch, address, pid)
    lease = store.grant(ttl)
    compares = [
        RevisionIs(_leader_key(prefix), seat.revision if seat else 0),
        RevisionIs(_epoch_key(prefix), latest.revision if latest else 0),
    ]
    puts = [Put(_epoch_key(prefix), str(epoch)), Put(_leader_key(prefix), _record(leader), lease)]
    try:
        outcome = store.txn(compares, puts)
        revision = outcome.revision if outcome.succeeded else 0
    except OutcomeUnknown:
        # If the write is applied only after this read, the revoked lease deletes the key.
        seat = store.get(_leader_key(prefix))
        revision = seat.revision if seat is not None and _leader(seat) == leader else 0
    if not revision:
        store.revoke(lease)
        return None
    return Term(store, prefix, leader, revision, lease, began)


def _record(leader: Leader) -> str:
    return json.dumps(to_builtins(leader))


# Follow the election of a job by a watch of the store, without polling it.

EAGER_WATCH_TIMEOUT = 1.0
"""Seconds for which an eager watch waits for one change. A store that is away for longer is reported."""

CALM_POLL_INTERVAL = 1.0
"""Seconds between two looks at the changes that a calm watch has received."""

ELECTION_RETRY_INTERVAL = 0.5
"""Seconds after which an unreadable store is opened again."""

_SEAT_JOIN_TIMEOUT = 0.5
"""Seconds to wait for the thread when the watch is closed. A store that is away holds it for longer."""


class Seat(Value):
    """The leader of a job, as last seen.

    `epoch` is the number of the latest term and `since` the time (``time.monotonic``) at which this state was first
    seen. While the store cannot be read, `trouble` has the reason, and the other fields are as seen last. `known` is
    false until the store was read once.
    """

    leader: Leader | None = None
    epoch: int = 0
    since: float = 0.0
    known: bool = False
    trouble: str = ""


class SeatWatch:
    """Follows the election under `prefix` in a thread, which calls `tell` with each change.

    An eager watch, and any watch while there is no leader, reports a change at once. A calm one looks every
    `CALM_POLL_INTERVAL` seconds: it is for processes that have a stream to the master.
    """

    def __init__(self, open_store: Callable[[], Store], prefix: str, tell: Callable[[Seat], None]) -> None:
        self._open, self._prefix, self._tell = open_store, prefix, tell
        self._seat = Seat()
        self._watch: Watch | None = None
        self._eager, self._closed, self._doubted = (threading.Event() for _ in range(3))
        self._eager.set()
        self._thread = threading.Thread(target=self._run, name="unirun-seat", daemon=True)
        self._thread.start()

    def hurry(self, eager: bool) -> None:
        """Make the watch eager or calm."""
        if eager:
            self._eager.set()
        else:
            self._eager.clear()

    def doubt(self) -> None:
        """Read the leader anew: the server on which the watch waits may be on a host that is gone, which is noticed
        much later."""
        self._doubted.set()

    def close(self) -> None:
        """Stop watching. Safe to call twice."""
        self._closed.set()
        self._eager.set()
        if self._watch is not None:
            self._watch.close()
        self._thread.join(_SEAT_JOIN_TIMEOUT)

    def _run(self) -> None:
        # Opened once: a file that was deleted since must not be created again.
        store: Store | None = None
        while not self._closed.is_set():
            try:
                store = store or self._open()
                self._follow(store)
            except UnirunError as error:
                # Also a store that cannot be opened, e.g. without a password: waiters get the reason.
                self._change(self._seat.leader, self._seat.epoch, trouble=str(error))
                self._closed.wait(ELECTION_RETRY_INTERVAL)
        if store is not None:
            store.close()

    def _follow(self, store: Store) -> None:
        below = seat_prefix(self._prefix)
        self._doubted.clear()
        listing = store.get_prefix(below)
        values = {item.key: item.value for item in listing.items}
        self._watch = watch = store.watch(below, listing.revision + 1)
        try:
            while not (self._closed.is_set() or self._doubted.is_set()):
                epoch, leader = read_seat(self._prefix, values)
                self._change(leader, epoch)
                eager = leader is None or self._eager.is_set()
                news = watch.changes(EAGER_WATCH_TIMEOUT if eager else 0.0)
                if isinstance(news, Listing):
                    values = {item.key: item.value for item in news.items}
                else:
                    for change in news:
                        if change.kind == "put":
                            values[change.key] = change.value
                        else:
                            values.pop(change.key, None)
                if not news and not eager:
                    self._eager.wait(CALM_POLL_INTERVAL)
        finally:
            self._watch = None
            watch.close()

    def _change(self, leader: Leader | None, epoch: int, trouble: str = "") -> None:
        before = self._seat
        same = before.known and (before.leader, before.epoch) == (leader, epoch)
        if same and before.trouble == trouble:
            return
        since = before.since if same else time.monotonic()
        self._seat = Seat(leader, epoch, since, known=before.known or not trouble, trouble=trouble)
        self._tell(self._seat)


# Key layout of a store.

JOBS = "jobs/"
INDEX = "index/"

CONTEXT, STATES, VERSIONS = "context/", "states/", "versions/"
"""The parts of a job: its context (`unirun.failover.context`), workers' saved states, committed versions."""


def job_prefix(run_id: str) -> str:
    """Prefix of all keys of a job."""
    return f"{JOBS}{run_id}/"


def context_prefix(run_id: str) -> str:
    """Prefix of the context of a job (`unirun.failover.context`)."""
    return f"{JOBS}{run_id}/{CONTEXT}"


def silent_key(run_id: str, node: str = "") -> str:
    """Key of the mark of a silent node (`unirun.failover.silence`); without `node` the prefix of all marks."""
    return f"{JOBS}{run_id}/silent/{quote(node, safe='')}"


def crashes_key(run_id: str) -> str:
    """Key of the record of a job's crashed masters (`unirun.failover.crashes`)."""
    return f"{JOBS}{run_id}/crashes"


def index_key(run_id: str) -> str:
    """Key of the summary of a job that ``unirun ls`` reads."""
    return f"{INDEX}{run_id}"


# The index of a store: one summary for each job.


def read_index(store: Store) -> tuple[list[Summary], list[StoreRefused]]:
    """The jobs of a store, the oldest first, and the errors of entries that no unirun of this version has written: they
    do not keep users from seeing their jobs. Raises `StoreError`."""
    jobs: list[Summary] = []
    refused: list[StoreRefused] = []
    for item in store.get_prefix(INDEX).items:
        try:
            jobs.append(_read(item))
        except StoreRefused as error:
            refused.append(error)
    return sorted(jobs, key=lambda job: (job.started, job.run_id)), refused


def _read(item: KeyValue) -> Summary:
    try:
        summary = from_json(Summary, item.value)
        if is_run_id(summary.run_id) and item.key == index_key(summary.run_id):
            return summary
        problem: FrameError | None = None
    except FrameError as error:
        problem = error
    raise StoreRefused(
        f"{ascii(item.key)[1:-1]} holds {item.value!a:.80}, which no unirun of this version has written",
        "does the store's prefix belong to something else?",
    ) from problem


# Signs that a node has not been given up (`unirun.failover.silence`), for an agent that hears no master. Blocking.


def is_marked(store: Store, run_id: str, node: str) -> bool:
    """Return True if a master has marked `node` as silent. Raises `StoreError`."""
    return store.get(silent_key(run_id, node)) is not None
