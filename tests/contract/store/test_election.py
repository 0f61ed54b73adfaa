"""One leader at a time, with a unique epoch, on every store."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.contract.store.backends import StoreBackend
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import Fenced, OutcomeUnknown, StoreRefused
from unirun.rendezvous.election import Leader, Term, campaign, leader_of
from unirun.rendezvous.store.protocol import Outcome, Put, Store
from unirun.wire.address import UnixAddress

SEAT = "jobs/run1/"


def run_for(store: Store, name: str, *, ttl: float = 60, deposing: int = 0) -> Term | None:
    return campaign(store, SEAT, UnixAddress(f"/{name}", name), 7, ttl=ttl, deposing=deposing)


def win(store: Store, name: str, *, ttl: float = 60, deposing: int = 0) -> Term:
    term = run_for(store, name, ttl=ttl, deposing=deposing)
    assert term is not None
    return term


def may_write(store: Store, term: Term) -> bool:
    return store.txn([term.fence], [Put(f"{SEAT}state", str(term.epoch))]).succeeded


def test_the_first_candidate_leads_and_every_client_sees_it(store: Store, other_store: Store) -> None:
    assert leader_of(other_store, SEAT) is None
    term = win(store, "first")
    assert term.epoch == 1
    assert leader_of(other_store, SEAT) == Leader(1, UnixAddress("/first", "first"), 7)
    assert run_for(other_store, "second") is None
    assert leader_of(other_store, "jobs/run10/") is None
    term.keep()
    assert may_write(store, term)


def test_a_successor_leads_at_once_after_a_resignation(store: Store, other_store: Store) -> None:
    first = win(store, "first")
    first.resign()
    first.resign()
    assert leader_of(other_store, SEAT) is None
    second = win(other_store, "second")
    assert second.epoch == 2
    assert not may_write(store, first)
    assert may_write(other_store, second)
    with pytest.raises(Fenced, match="another leads"):
        first.keep()


def test_a_leader_of_a_job_that_was_removed_writes_nothing_into_the_next_one_of_the_same_id(
    store: Store,
) -> None:
    old = win(store, "old")
    assert store.txn([old.fence], deletes=[SEAT]).succeeded
    new = win(store, "new")
    assert (old.epoch, new.epoch) == (1, 1)
    assert not may_write(store, old)
    assert may_write(store, new)
    with pytest.raises(Fenced, match="another leads"):
        old.keep()
    new.keep()


def test_a_leader_that_does_not_renew_its_lease_is_succeeded(
    backend: StoreBackend, store: Store, other_store: Store
) -> None:
    first = win(store, "first", ttl=backend.ttl)
    eventually(lambda: leader_of(other_store, SEAT) is None)
    assert win(other_store, "second").epoch == 2
    with pytest.raises(Fenced):
        first.keep()
    assert not may_write(store, first)


def test_a_leader_whose_lease_expired_keeps_leading_without_a_successor(
    backend: StoreBackend, store: Store, other_store: Store
) -> None:
    term = win(store, "first", ttl=backend.ttl)
    eventually(lambda: leader_of(other_store, SEAT) is None)
    assert may_write(store, term), "nobody else has an epoch yet"
    term.keep()
    assert leader_of(other_store, SEAT) == Leader(1, UnixAddress("/first", "first"), 7)


def test_a_leader_that_is_known_to_be_dead_is_deposed_at_once(store: Store, other_store: Store) -> None:
    first = win(store, "first")
    assert run_for(other_store, "second", deposing=7) is None, "it is another that leads"
    second = win(other_store, "second", deposing=first.epoch)
    assert second.epoch == 2
    assert not may_write(store, first)
    with pytest.raises(Fenced):
        first.keep()
    first.resign()
    assert leader_of(other_store, SEAT) == Leader(2, UnixAddress("/second", "second"), 7), (
        "the lease of the first is not the second's"
    )


def test_of_many_concurrent_candidates_one_wins_each_epoch(backend: StoreBackend, store: Store) -> None:
    rounds, winners = 5, list[tuple[int, str]]()
    clients = [store, *(backend.open() for _ in range(3))]
    ready = threading.Barrier(len(clients), timeout=WAIT_TIMEOUT)

    def candidate(number: int) -> None:
        for epoch in range(rounds):
            ready.wait()
            term = run_for(clients[number], f"c{number}", deposing=epoch)
            if term is not None:
                winners.append((term.epoch, f"c{number}"))

    threads = [threading.Thread(target=candidate, args=(number,)) for number in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_TIMEOUT)
    assert [epoch for epoch, _ in winners] == [1, 2, 3, 4, 5]
    leader = leader_of(store, SEAT)
    assert leader is not None
    assert (leader.epoch, leader.address.host) == winners[-1]


class Interrupted:
    """A store with a hook just before its next transaction."""

    def __init__(self, store: Store, happens: Callable[[], object]) -> None:
        self._store, self._happens = store, [happens]

    def txn(self, *arguments: object) -> Outcome:
        while self._happens:
            self._happens.pop()()
        return self._store.txn(*arguments)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


def test_a_candidate_that_lost_does_not_get_the_same_epoch(store: Store, other_store: Store) -> None:
    """The other candidate has led and resigned meanwhile, so there is no leader, as before."""
    slow = Interrupted(store, lambda: win(other_store, "quick").resign())
    assert run_for(slow, "slow") is None  # type: ignore[arg-type]
    assert win(store, "next").epoch == 2


def test_a_leader_with_a_new_lease_is_not_deposed_by_a_candidate_that_saw_none(
    backend: StoreBackend, store: Store, other_store: Store
) -> None:
    first = win(store, "first", ttl=backend.ttl)
    eventually(lambda: leader_of(other_store, SEAT) is None)
    late = Interrupted(other_store, first.keep)
    assert run_for(late, "second") is None  # type: ignore[arg-type]
    assert leader_of(other_store, SEAT) == Leader(1, UnixAddress("/first", "first"), 7)
    assert may_write(store, first)


class LosesTheAnswer:
    """A store whose next transaction has an unknown outcome, applied or not."""

    def __init__(self, store: Store, *, done: bool) -> None:
        self._store, self._done = store, done

    def txn(self, *arguments: object) -> Outcome:
        if self._done:
            self._store.txn(*arguments)  # type: ignore[arg-type]
        raise OutcomeUnknown("no answer came")

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


@pytest.mark.parametrize("done", [True, False])
def test_a_campaign_whose_outcome_is_unknown_is_looked_up(store: Store, *, done: bool) -> None:
    term = run_for(LosesTheAnswer(store, done=done), "first")  # type: ignore[arg-type]
    assert (term is not None) is done
    assert (leader_of(store, SEAT) is not None) is done


def test_an_election_with_a_foreign_value_is_refused(store: Store) -> None:
    store.txn([], [Put(f"{SEAT}lead/leader", "[1, 2]")])
    with pytest.raises(StoreRefused, match="no unirun has written"):
        run_for(store, "first")
