"""A leader's lease, with a settable clock; the rest is in the contract suite of stores."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from unirun.errors import Fenced, FrameError, OutcomeUnknown, StoreRefused
from unirun.observe.status import Summary
from unirun.rendezvous.election import (
    Leader,
    Term,
    campaign,
    context_prefix,
    crashes_key,
    index_key,
    job_prefix,
    leader_of,
    read_index,
    seat_prefix,
    silent_key,
)
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


NAMES = st.text(max_size=4) | st.sampled_from(["a/b", "a%2Fb", "a", "/", "%"])


@given(NAMES, NAMES)
def test_keys_of_a_job_are_its_own_and_each_has_one_meaning(node: str, other: str) -> None:
    """A running job is looked at by other versions."""
    assert silent_key("run1", "n/0") == "jobs/run1/silent/n%2F0"
    assert (crashes_key("run1"), context_prefix("run1")) == ("jobs/run1/crashes", "jobs/run1/context/")
    assert (job_prefix("run1"), seat_prefix(job_prefix("run1"))) == (SEAT, "jobs/run1/lead/")
    assert index_key("run1") == "index/run1"
    assert (silent_key("run1", node) == silent_key("run1", other)) == (node == other)
    assert silent_key("run1", node).startswith(silent_key("run1"))
    assert "/" not in silent_key("run1", node).removeprefix(silent_key("run1"))


def test_entries_of_an_index_that_are_not_this_versions_hide_no_job(store: MemoryStore) -> None:
    def job(run_id: str, started: float) -> Summary:
        return Summary(run_id, "uid", "job", "running", started, None, None, {"actor": 2})

    jobs = [job("c", 1.0), job("b", 2.0), job("d", 2.0)]
    store.txn([], [Put(index_key(each.run_id), each.line()) for each in reversed(jobs)])
    for key, value in (("no", "[1"), ("x", job("y", 1.0).line()), ("a b", job("a b", 1.0).line())):
        store.txn([], [Put(index_key(key), value)])
    found, refused = read_index(store)
    assert found == jobs
    assert [type(error.__cause__) for error in refused] == [type(None), FrameError, type(None)]
    assert [str(error).split(" holds")[0] for error in refused] == ["index/a b", "index/no", "index/x"]
    assert all("does the store's prefix belong to something else?" in str(error) for error in refused)
