"""A leader's lease, with a settable clock; the rest is in the contract suite of stores."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from unirun.errors import Fenced, OutcomeUnknown, StoreRefused
from unirun.rendezvous.election import Leader, Term, campaign, leader_of
from unirun.rendezvous.store.memory import MemoryStore
from unirun.rendezvous.store.protocol import Compare, Outcome, Put
from unirun.wire.address import UnixAddress

SEAT, TTL = "jobs/run1/", 10.0


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> MemoryStore:
    return MemoryStore(clock)


def win(store: MemoryStore, name: str = "first") -> Term:
    term = campaign(store, SEAT, UnixAddress(f"/{name}", name), 7, ttl=TTL)
    assert term is not None
    return term


def test_the_leader_of_the_first_term_is_not_deposed_by_default(store: MemoryStore) -> None:
    win(store)
    assert campaign(store, SEAT, UnixAddress("/second", "second"), 7, ttl=TTL) is None


def test_a_leader_that_renews_its_lease_in_time_keeps_leading(store: MemoryStore, clock: FakeClock) -> None:
    term = win(store)
    for _ in range(3):
        clock.now += TTL * 0.9
        term.keep()
    assert leader_of(store, SEAT) == Leader(1, UnixAddress("/first", "first"), 7)


class TestLeaderWithANewLease:
    @pytest.fixture
    def term(self, store: MemoryStore, clock: FakeClock) -> Term:
        term = win(store)
        clock.now += TTL
        assert leader_of(store, SEAT) is None
        term.keep()
        assert leader_of(store, SEAT) == Leader(1, UnixAddress("/first", "first"), 7)
        return term

    def test_a_leader_with_a_new_lease_loses_it_without_renewal(
        self, term: Term, store: MemoryStore, clock: FakeClock
    ) -> None:
        clock.now += TTL
        assert leader_of(store, SEAT) is None
        assert win(store, "second").epoch == 2
        with pytest.raises(Fenced):
            term.keep()

    def test_a_leader_with_a_new_lease_can_renew_it(
        self, term: Term, store: MemoryStore, clock: FakeClock
    ) -> None:
        revision = store.get_prefix("").revision
        for _ in range(3):
            clock.now += TTL * 0.9
            term.keep()
        assert leader_of(store, SEAT) is not None
        assert store.get_prefix("").revision == revision, "a lease that is kept is no change"

    def test_a_leader_with_a_new_lease_can_resign(self, term: Term, store: MemoryStore) -> None:
        term.resign()
        assert leader_of(store, SEAT) is None


@pytest.mark.parametrize(("key", "value"), [("leader", "[1, 2]"), ("epoch", "many")])
def test_a_foreign_value_in_an_election_is_named(store: MemoryStore, key: str, value: str) -> None:
    store.txn([], [Put(f"{SEAT}lead/{key}", value)])
    with pytest.raises(StoreRefused, match=f"jobs/run1/lead/{key} holds '.*', which no unirun has written"):
        win(store)


class Unheard(MemoryStore):
    """A store whose write is not done, and whose answer is lost; another candidate's is done meanwhile, if there is
    one."""

    def __init__(self, other: bool) -> None:
        super().__init__()
        self.other = other

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        if self.other:
            theirs = [replace(put, value=put.value.replace("/mine", "/other"), lease=None) for put in puts]
            super().txn(compares, theirs, deletes)
        raise OutcomeUnknown("nobody has heard it")


@pytest.mark.parametrize("other", [False, True])
def test_a_campaign_whose_write_was_not_done_is_not_won(other: bool) -> None:
    assert campaign(Unheard(other), SEAT, UnixAddress("/mine", "host"), 7, ttl=TTL) is None
