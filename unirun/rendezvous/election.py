"""Who leads: one leader at a time under a prefix of a store, each with an epoch that no other has had.

``<prefix>lead/epoch`` holds the number of the latest term and stays; ``<prefix>lead/leader`` says where its leader is,
and goes away when that does not keep its lease. Nothing else is below ``<prefix>lead/``, so a watch of that tells of
elections only. Whoever leads fences each of its writes with ``ValueIs(<prefix>lead/epoch, its own)``, so it does no
harm to take a term from a leader that only seems to be dead: what it wants to write then is not written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from msgspec import to_builtins

from unirun.errors import Fenced, FrameError, LeaseExpired, OutcomeUnknown, StoreRefused
from unirun.rendezvous.store.protocol import Compare, Item, Lease, Put, RevisionIs, Store, ValueIs
from unirun.values import Value
from unirun.wire.address import UnixAddress


class Leader(Value):
    """Where the leader of term `epoch` listens, and which process it is."""

    epoch: int
    address: UnixAddress
    pid: int

    def to_json(self) -> dict[str, Any]:
        """As commands show it."""
        return {
            "epoch": self.epoch,
            "address": f"unix:{self.address}",
            "host": self.address.host,
            "pid": self.pid,
        }


def seat_prefix(prefix: str) -> str:
    """The prefix of the two keys of an election."""
    return f"{prefix}lead/"


def _leader_key(prefix: str) -> str:
    return f"{seat_prefix(prefix)}leader"


def _epoch_key(prefix: str) -> str:
    return f"{seat_prefix(prefix)}epoch"


def leader_of(store: Store, prefix: str) -> Leader | None:
    """Who leads under `prefix`; None when nobody does."""
    return _leader(store.get(_leader_key(prefix)))


def read_seat(prefix: str, values: Mapping[str, str]) -> tuple[int, Leader | None]:
    """The number of the latest term under `prefix` (0: there was none), and who leads. `values` are those of the keys
    below `seat_prefix`. Raises `StoreRefused` for what no unirun has written."""
    leader, epoch = values.get(_leader_key(prefix)), values.get(_epoch_key(prefix))
    return (
        _number(Item(_epoch_key(prefix), epoch, 0)) if epoch is not None else 0,
        _leader(Item(_leader_key(prefix), leader, 0) if leader is not None else None),
    )


def _leader(item: Item | None) -> Leader | None:
    if item is None:
        return None
    # Who has no store does not wait for this import.
    from unirun.wire.codec import from_json

    try:
        return from_json(Leader, item.value)
    except FrameError as error:
        raise _foreign(item) from error


def _number(item: Item) -> int:
    try:
        return int(item.value)
    except ValueError as error:
        raise _foreign(item) from error


def _foreign(item: Item) -> StoreRefused:
    return StoreRefused(
        f"{ascii(item.key)[1:-1]} holds {item.value!a:.80}, which no unirun has written",
        "does the store's prefix belong to something else? choose another one",
    )


class Term:
    """One candidate's time of office. `keep` must be called more often than the lease's `ttl`."""

    def __init__(self, store: Store, prefix: str, leader: Leader, lease: Lease) -> None:
        self._store, self._prefix, self._leader = store, prefix, leader
        self._lease: Lease | None = lease
        self.epoch = leader.epoch
        self.ttl = lease.ttl

    @property
    def fence(self) -> Compare:
        """What every write of this term has to compare."""
        return ValueIs(_epoch_key(self._prefix), str(self.epoch))

    def keep(self) -> None:
        """Go on leading; also after the lease has ended, when nobody has come since. Raises `Fenced`."""
        if self._lease is not None:
            try:
                self._store.keep_alive(self._lease)
            except LeaseExpired:
                self._lease = None
        if self._lease is not None:
            epoch = self._store.get(_epoch_key(self._prefix))
            if epoch is None or epoch.value != str(self.epoch):
                raise self._fenced()
            return
        lease = self._store.grant(self.ttl)
        # Whether this was done is seen the next time: then the key is there, with a lease that nobody keeps alive.
        put = Put(_leader_key(self._prefix), _record(self._leader), lease)
        if not self._store.txn([self.fence], [put]).succeeded:
            raise self._fenced()
        self._lease = lease

    def resign(self) -> None:
        """Stop leading now. A successor need not wait."""
        if self._lease is not None:
            self._store.revoke(self._lease)
            self._lease = None

    def _fenced(self) -> Fenced:
        return Fenced(f"the term {self.epoch} under {self._prefix} is over: another leads now")


def campaign(
    store: Store, prefix: str, address: UnixAddress, pid: int, *, ttl: float, deposing: int = 0
) -> Term | None:
    """Become the leader under `prefix`; None when there is one already, or another was quicker.

    `deposing` is the epoch of a leader that is known to be dead: its lease is not waited for.
    """
    seat, clock = store.get(_leader_key(prefix)), store.get(_epoch_key(prefix))
    present = _leader(seat)
    if present is not None and present.epoch != deposing:
        return None
    epoch = _number(clock) + 1 if clock else 1
    leader = Leader(epoch, address, pid)
    lease = store.grant(ttl)
    compares = [
        RevisionIs(_leader_key(prefix), seat.revision if seat else 0),
        RevisionIs(_epoch_key(prefix), clock.revision if clock else 0),
    ]
    puts = [Put(_epoch_key(prefix), str(epoch)), Put(_leader_key(prefix), _record(leader), lease)]
    try:
        won = store.txn(compares, puts).succeeded
    except OutcomeUnknown:
        # Should it still be on its way and found not done here, the end of its lease undoes it.
        won = leader_of(store, prefix) == leader
    if not won:
        store.revoke(lease)
        return None
    return Term(store, prefix, leader, lease)


def _record(leader: Leader) -> str:
    return json.dumps(to_builtins(leader))
