"""The leader of a job is known from a watch of the store, which is read once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import StoreAway
from unirun.rendezvous import election as seat_module
from unirun.rendezvous.election import Leader, Seat, SeatWatch, campaign, job_prefix, seat_prefix
from unirun.rendezvous.store.memory import MemoryStore
from unirun.rendezvous.store.protocol import Change, Put, Store, Watch
from unirun.wire.address import UnixAddress

JOB = job_prefix("run-1")


class Counted:
    """A store that counts its calls, and stays open when a watch closes it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return (lambda: None) if name == "close" else getattr(self._store, name)


class RecordedSeats:
    """Records what a watch reports, and waits for it."""

    def __init__(self) -> None:
        self.seats: list[Seat] = []
        self._changed = threading.Condition()

    def __call__(self, seat: Seat) -> None:
        with self._changed:
            self.seats.append(seat)
            self._changed.notify_all()

    def until(self, true: Callable[[Seat], bool]) -> Seat:
        with self._changed:
            assert self._changed.wait_for(lambda: self.seats and true(self.seats[-1]), WAIT_TIMEOUT), (
                self.seats
            )
            return self.seats[-1]


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with_leases = MemoryStore()
    yield with_leases
    with_leases.close()


def elect(store: Store, epochs: Sequence[int], *, resign: bool = False) -> None:
    for epoch in epochs:
        term = campaign(store, JOB, UnixAddress(f"/m{epoch}", "host"), epoch, ttl=60.0, deposing=epoch - 1)
        assert term is not None
        if resign:
            term.resign()


def test_the_seat_of_a_new_job_has_no_leader(store: MemoryStore) -> None:
    recorded = RecordedSeats()
    watch = SeatWatch(lambda: Counted(store), JOB, recorded)
    seat = recorded.until(lambda seat: seat.known)
    assert (seat.leader, seat.epoch, seat.trouble) == (None, 0, "")
    watch.close()
    watch.close()


def test_a_seat_watch_reports_each_leader_in_order(store: MemoryStore) -> None:
    recorded = RecordedSeats()
    watch = SeatWatch(lambda: Counted(store), JOB, recorded)
    recorded.until(lambda seat: seat.known)
    for epoch in (1, 2, 3):
        elect(store, [epoch])
        seat = recorded.until(lambda seat, epoch=epoch: seat.epoch == epoch)  # type: ignore[misc]
        assert seat.leader == Leader(epoch, UnixAddress(f"/m{epoch}", "host"), epoch)
    watch.close()
    assert [seat.epoch for seat in recorded.seats] == [0, 1, 2, 3]
    assert [seat.since for seat in recorded.seats] == sorted(seat.since for seat in recorded.seats)


def test_a_seat_watch_reports_a_resigned_leader_with_its_term(store: MemoryStore) -> None:
    recorded = RecordedSeats()
    watch = SeatWatch(lambda: Counted(store), JOB, recorded)
    elect(store, [1], resign=True)
    seat = recorded.until(lambda seat: seat.epoch == 1 and seat.leader is None)
    assert seat.known
    watch.close()


def test_seat_watches_of_many_agents_read_the_store_once_each(store: MemoryStore) -> None:
    stores = [Counted(store) for _ in range(100)]
    recorded = [RecordedSeats() for _ in stores]
    watches = [
        SeatWatch(lambda each=each: each, JOB, tell)  # type: ignore[misc]
        for each, tell in zip(stores, recorded, strict=True)
    ]
    for each in recorded:
        each.until(lambda seat: seat.known)
    elect(store, range(1, 21))
    store.txn([], [Put(f"{JOB}context/1", "what a master writes is none of it")])
    for each in recorded:
        each.until(lambda seat: seat.epoch == 20)
    for watch in watches:
        watch.close()
    assert {tuple(each.asked) for each in stores} == {("get_prefix", "watch", "close")}


def test_a_calm_seat_watch_reports_another_leader_a_little_later(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seat_module, "CALM_POLL_INTERVAL", 0.01)
    recorded = RecordedSeats()
    watch = SeatWatch(lambda: Counted(store), JOB, recorded)
    watch.hurry(False)
    elect(store, [1, 2])
    recorded.until(lambda seat: seat.epoch == 2)
    watch.close()


class Looks:
    """A watch of a store that has no news, and the times at which it was looked at."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def changes(self, timeout: float) -> list[Change]:
        self.at.append(time.monotonic())
        return []

    def close(self) -> None:
        """Nothing is held."""


def test_a_calm_seat_watch_looks_at_its_store_now_and_then(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seat_module, "CALM_POLL_INTERVAL", 0.02)
    elect(store, [1])
    looks, recorded = Looks(), RecordedSeats()
    monkeypatch.setattr(store, "watch", lambda *_: looks)
    watch = SeatWatch(lambda: Counted(store), JOB, recorded)
    watch.hurry(False)
    recorded.until(lambda seat: seat.epoch == 1)
    before = len(looks.at)
    eventually(lambda: len(looks.at) >= before + 4)
    watch.close()
    # The one before the first of these may have been eager still.
    assert all(later - earlier > 0.015 for earlier, later in pairwise(looks.at[before + 1 : before + 4]))


def test_a_seat_watch_that_has_missed_the_end_of_a_leader_knows_of_none(store: MemoryStore) -> None:
    """The changes were compacted away, and there is no leader in what is left."""
    recorded = RecordedSeats()
    watch = SeatWatch(lambda: Counted(store), JOB, recorded)
    term = campaign(store, JOB, UnixAddress("/m1", "host"), 1, ttl=60.0)
    assert term is not None
    recorded.until(lambda seat: seat.leader is not None)
    with store._changed:
        term.resign()
        store.compact(store.get_prefix("").revision + 1)
    recorded.until(lambda seat: seat.epoch == 1 and seat.leader is None)
    watch.close()


def test_a_seat_watch_that_is_doubted_reads_the_store_once_more(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seat_module, "EAGER_WATCH_TIMEOUT", 0.01)
    counted, recorded = Counted(store), RecordedSeats()
    watch = SeatWatch(lambda: counted, JOB, recorded)
    elect(store, [1])
    recorded.until(lambda seat: seat.epoch == 1)
    watch.doubt()
    eventually(lambda: counted.asked.count("get_prefix") == 2, "it reads anew")
    elect(store, [2])
    recorded.until(lambda seat: seat.epoch == 2)
    watch.close()
    assert counted.asked.count("get_prefix") == 2


def test_a_seat_watch_reports_an_unreachable_store_and_keeps_the_last_leader(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seat_module, "EAGER_WATCH_TIMEOUT", 0.01)
    monkeypatch.setattr(seat_module, "ELECTION_RETRY_INTERVAL", 0.01)
    away = threading.Event()

    class Fragile:
        """A watch that fails with its store."""

        def __init__(self, watch: Watch) -> None:
            self._watch = watch

        def changes(self, timeout: float) -> Any:
            if away.is_set():
                raise StoreAway("etcd does not answer")
            return self._watch.changes(timeout)

        def close(self) -> None:
            self._watch.close()

    class Shy(Counted):
        def watch(self, prefix: str, from_revision: int) -> Fragile:
            return Fragile(store.watch(prefix, from_revision))

    opened: list[Shy] = []

    def open_store() -> Any:
        opened.append(Shy(store))
        return opened[-1]

    recorded = RecordedSeats()
    watch = SeatWatch(open_store, JOB, recorded)
    elect(store, [1])
    led = recorded.until(lambda seat: seat.epoch == 1)
    away.set()
    seat = recorded.until(lambda seat: bool(seat.trouble))
    assert seat == replace(led, trouble="etcd does not answer")
    elect(store, [2])
    away.clear()
    recorded.until(lambda seat: seat.epoch == 2 and not seat.trouble)
    watch.close()
    assert len(opened) == 1, "a file that is gone is not made anew"


def test_a_seat_with_a_foreign_value_is_reported_as_trouble(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seat_module, "ELECTION_RETRY_INTERVAL", 0.01)
    store.txn([], [Put(f"{seat_prefix(JOB)}epoch", "tomorrow")])
    recorded = RecordedSeats()
    watch = SeatWatch(lambda: Counted(store), JOB, recorded)
    seat = recorded.until(lambda seat: bool(seat.trouble))
    assert "which no unirun has written" in seat.trouble
    watch.close()
