"""A leader's lease, with a clock that is turned by hand; the rest is in the contract of stores."""

from __future__ import annotations

import pytest

from unirun.errors import Fenced, StoreRefused
from unirun.rendezvous.election import Leader, Term, campaign, leader_of
from unirun.rendezvous.store.memory import MemoryStore
from unirun.rendezvous.store.protocol import Put
from unirun.wire.address import UnixAddress

SEAT, TTL = "jobs/run1/", 10.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock)


def win(store: MemoryStore, name: str = "first") -> Term:
    term = campaign(store, SEAT, UnixAddress(f"/{name}", name), 7, ttl=TTL)
    assert term is not None
    return term


def test_a_leader_of_the_first_term_is_not_deposed_by_who_knows_of_no_death(store: MemoryStore) -> None:
    win(store)
    assert campaign(store, SEAT, UnixAddress("/second", "second"), 7, ttl=TTL) is None


def test_who_keeps_its_lease_in_time_leads_on(store: MemoryStore, clock: Clock) -> None:
    term = win(store)
    for _ in range(3):
        clock.now += TTL * 0.9
        term.keep()
    assert leader_of(store, SEAT) == Leader(1, UnixAddress("/first", "first"), 7)


class TestALeaderThatComesBackToItsSeat:
    @pytest.fixture
    def term(self, store: MemoryStore, clock: Clock) -> Term:
        term = win(store)
        clock.now += TTL
        assert leader_of(store, SEAT) is None
        term.keep()
        assert leader_of(store, SEAT) == Leader(1, UnixAddress("/first", "first"), 7)
        return term

    def test_loses_it_again_without_keeping_it(self, term: Term, store: MemoryStore, clock: Clock) -> None:
        clock.now += TTL
        assert leader_of(store, SEAT) is None
        assert win(store, "second").epoch == 2
        with pytest.raises(Fenced):
            term.keep()

    def test_keeps_it_as_before(self, term: Term, store: MemoryStore, clock: Clock) -> None:
        revision = store.get_prefix("").revision
        for _ in range(3):
            clock.now += TTL * 0.9
            term.keep()
        assert leader_of(store, SEAT) is not None
        assert store.get_prefix("").revision == revision, "a lease that is kept is no change"

    def test_gives_it_up_as_before(self, term: Term, store: MemoryStore) -> None:
        term.resign()
        assert leader_of(store, SEAT) is None


@pytest.mark.parametrize(("key", "value"), [("leader", "[1, 2]"), ("epoch", "many")])
def test_what_no_unirun_has_written_is_named(store: MemoryStore, key: str, value: str) -> None:
    store.txn([], [Put(f"{SEAT}lead/{key}", value)])
    with pytest.raises(StoreRefused, match=f"jobs/run1/lead/{key} holds '.*', which no unirun has written"):
        win(store)
