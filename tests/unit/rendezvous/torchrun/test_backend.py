"""The state of a run behind torch's `RendezvousBackend`, over the store in memory."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from threading import Thread

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError

from unirun.errors import OutcomeUnknown, StoreAway, StoreRefused
from unirun.rendezvous.store.memory import MemoryStore
from unirun.rendezvous.store.protocol import Compare, KeyValue, Listing, Outcome, Put
from unirun.rendezvous.torchrun.handler import LeasedWriter, StateToken, StoreBackend

WAIT = 20.0


def backend_of(
    store: MemoryStore, root: str = "run1/", node: str = "host_1_0", ttl: float = 45, grace: float = 15
) -> StoreBackend:
    return StoreBackend(store, LeasedWriter(store, ttl), root, node, grace=grace)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def backend(store: MemoryStore) -> StoreBackend:
    return backend_of(store)


class Flaky(MemoryStore):
    """Raises the errors of `faults`, one per call of `txn` and `get`; with `done` after applying it."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[Exception] = []
        self.done = False

    def get(self, key: str) -> KeyValue | None:
        if self.faults and not self.done:
            raise self.faults.pop(0)
        return super().get(key)

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        if self.faults and not self.done:
            raise self.faults.pop(0)
        outcome = super().txn(compares, puts, deletes)
        if self.faults:
            raise self.faults.pop(0)
        return outcome


def test_the_rendezvous_backend_has_the_name_of_the_option(backend: StoreBackend) -> None:
    assert backend.name == "etcd-v3"


def test_a_new_run_has_no_rendezvous_state(backend: StoreBackend) -> None:
    assert backend.get_state() is None


def test_rendezvous_state_is_read_with_the_token_that_set_it(backend: StoreBackend) -> None:
    made = backend.set_state(b"\x00\xff state")
    assert made is not None
    state, token, done = made
    assert (state, done) == (b"\x00\xff state", True)
    assert backend.get_state() == (state, token)


def test_rendezvous_state_is_replaced_with_its_token(backend: StoreBackend) -> None:
    _, first, _ = backend.set_state(b"one") or pytest.fail("nothing")
    state, second, done = backend.set_state(b"two", first) or pytest.fail("nothing")
    assert (state, done) == (b"two", True)
    assert second != first
    assert second.meeting == first.meeting
    assert backend.get_state() == (b"two", second)


@pytest.mark.parametrize("token", [None, "foreign", b"foreign", StateToken(1, "old")], ids=repr)
def test_a_wrong_token_returns_the_present_rendezvous_state(backend: StoreBackend, token: object) -> None:
    _, right, _ = backend.set_state(b"one") or pytest.fail("nothing")
    assert backend.set_state(b"two", token) == (b"one", right, False)
    assert backend.get_state() == (b"one", right)


def test_a_token_of_a_deleted_rendezvous_state_sets_nothing(
    backend: StoreBackend, store: MemoryStore
) -> None:
    _, token, _ = backend.set_state(b"one") or pytest.fail("nothing")
    store.txn([], deletes=["run1/"])
    assert backend.set_state(b"two", token) is None
    assert backend.get_state() is None


def test_of_two_nodes_that_set_with_the_same_token_one_wins(store: MemoryStore) -> None:
    one, other = backend_of(store), backend_of(store)
    _, token, _ = one.set_state(b"start") or pytest.fail("nothing")
    won, lost = one.set_state(b"one", token), other.set_state(b"other", token)
    assert won is not None
    assert lost == (b"one", won[1], False)


def test_a_recreated_rendezvous_state_is_another_meeting(backend: StoreBackend, store: MemoryStore) -> None:
    backend.set_state(b"one")
    before = backend.meeting
    store.txn([], deletes=["run1/state/current"])
    backend.set_state(b"one")
    assert backend.meeting != before


def test_all_nodes_read_the_same_meeting_id(store: MemoryStore) -> None:
    one, other = backend_of(store), backend_of(store)
    one.set_state(b"one")
    other.get_state()
    assert one.meeting == other.meeting


@pytest.mark.parametrize("value", ["", "no json", "{}", '{"meeting": "m", "state": "%%%"}', "[1]"])
def test_a_foreign_rendezvous_state_is_an_error(
    backend: StoreBackend, store: MemoryStore, value: str
) -> None:
    store.txn([], [Put("run1/state/current", value)])
    with pytest.raises(RendezvousStateError, match="prefix"):
        backend.get_state()


def test_an_unanswered_set_state_that_was_applied_succeeds() -> None:
    store = Flaky()
    backend = backend_of(store)
    store.faults, store.done = [OutcomeUnknown("no answer")], True
    state, token, done = backend.set_state(b"one") or pytest.fail("nothing")
    assert (state, done) == (b"one", True)
    assert backend.get_state() == (b"one", token)


def test_an_unanswered_set_state_that_was_not_applied_fails() -> None:
    store = Flaky()
    backend = backend_of(store)
    _, token, _ = backend.set_state(b"one") or pytest.fail("nothing")
    store.faults = [OutcomeUnknown("no answer")]
    assert backend.set_state(b"two", token) == (b"one", token, False)


def test_the_rendezvous_backend_fails_at_once_when_the_store_is_away() -> None:
    store = Flaky()
    store.faults = [StoreAway("gone")]
    backend = backend_of(store)
    with pytest.raises(RendezvousConnectionError, match="gone"):
        backend.get_state()
    assert backend.away


def test_a_patient_rendezvous_backend_retries_while_the_store_is_away() -> None:
    store = Flaky()
    store.faults = [StoreAway("gone"), StoreAway("gone"), StoreAway("gone")]
    backend = backend_of(store)
    with backend.patient(WAIT):
        assert backend.get_state() is None
    assert not backend.away


def test_the_rendezvous_backend_does_not_retry_when_the_store_refuses() -> None:
    store = Flaky()
    store.faults = [StoreRefused("wrong password", "look into the file")]
    backend = backend_of(store)
    with backend.patient(WAIT), pytest.raises(RendezvousConnectionError, match="look into the file"):
        backend.get_state()


def test_old_heartbeats_are_ignored_during_an_outage_and_a_grace_period() -> None:
    store = Flaky()
    backend = backend_of(store, grace=1000)
    assert not backend.blinded
    store.faults = [StoreAway("gone")]
    with pytest.raises(RendezvousConnectionError):
        backend.get_state()
    assert backend.blinded
    backend.get_state()
    assert backend.blinded
    assert not backend.away


def test_wait_for_change_ends_with_a_change_by_another_node(store: MemoryStore) -> None:
    one, other = backend_of(store), backend_of(store)
    _, token, _ = one.set_state(b"one") or pytest.fail("nothing")
    waiting = Thread(target=one.wait_for_change, args=(token, 10 * WAIT), daemon=True)
    waiting.start()
    other.set_state(b"other", token)
    waiting.join(WAIT)
    assert not waiting.is_alive()


def test_wait_for_change_ends_at_once_after_a_missed_change(store: MemoryStore) -> None:
    one, other = backend_of(store), backend_of(store)
    _, token, _ = one.set_state(b"one") or pytest.fail("nothing")
    other.set_state(b"other", token)
    waiting = Thread(target=one.wait_for_change, args=(token, 10 * WAIT), daemon=True)
    waiting.start()
    waiting.join(WAIT)
    assert not waiting.is_alive()


def test_all_rendezvous_keys_expire_after_the_last_write() -> None:
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    backend_of(store, ttl=45).set_state(b"one")
    assert store.get_prefix("").items
    now[0] = 46
    assert store.get_prefix("").items == ()


def test_a_node_that_returns_after_its_lease_gets_a_new_one() -> None:
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    backend = backend_of(store, ttl=45)
    _, token, _ = backend.set_state(b"one") or pytest.fail("nothing")
    now[0] = 46
    assert backend.set_state(b"two", token) is None
    assert backend.set_state(b"two") is not None


def test_the_last_node_deletes_all_keys_of_its_run_only(store: MemoryStore) -> None:
    one, other, ten = backend_of(store, node="a/1"), backend_of(store, node="b"), backend_of(store, "run10/")
    _, token, _ = one.set_state(b"one") or pytest.fail("nothing")
    other.set_state(b"two", token)
    ten.set_state(b"ten")
    one.leave(["a/1", "b"])
    assert other.get_state() is not None
    other.leave(["a/1", "b"])
    assert [item.key for item in store.get_prefix("").items if not item.key.startswith("run10/")] == []
    assert ten.get_state() is not None


def test_the_key_of_a_former_member_does_not_keep_the_run(store: MemoryStore) -> None:
    killed, last = backend_of(store, node="killed"), backend_of(store, node="last")
    _, token, _ = killed.set_state(b"one") or pytest.fail("nothing")
    last.set_state(b"two", token)
    last.leave(["last"])
    assert store.get_prefix("").items == ()


def test_a_node_that_joins_while_the_last_one_leaves_keeps_the_run() -> None:
    class Slow(MemoryStore):
        """Another node joins while the last one reads the members."""

        seen = 0

        def get_prefix(self, prefix: str) -> Listing:
            there = super().get_prefix(prefix)
            backend_of(self, node="new").set_state(b"new", StateToken(self.seen, "m"))
            return there

    slow = Slow()
    last = backend_of(slow, node="last")
    _, token, _ = last.set_state(b"one") or pytest.fail("nothing")
    slow.seen = token.revision
    last.leave(["last"])
    assert last.get_state() is not None


def test_rendezvous_state_in_etcd_is_readable_json(store: MemoryStore) -> None:
    backend_of(store).set_state(b"one")
    (item,) = store.get_prefix("run1/state/").items
    assert set(json.loads(item.value)) == {"meeting", "state"}


def test_a_member_name_with_any_characters_has_a_key(store: MemoryStore) -> None:
    other, last = backend_of(store, node="a/1"), backend_of(store, node="last")
    _, token, _ = other.set_state(b"one") or pytest.fail("nothing")
    last.set_state(b"two", token)
    last.leave(["a/1", "last"])
    assert other.get_state() is not None


def test_the_last_node_deletes_the_keys_of_a_run_without_a_state(store: MemoryStore) -> None:
    store.txn([], [Put("run1/rounds/m.0/keys/a/value", ""), Put("run10/state/current", "")])
    backend_of(store).leave(["host_1_0"])
    assert [item.key for item in store.get_prefix("").items] == ["run10/state/current"]


def test_wait_for_change_ignores_the_known_state(store: MemoryStore) -> None:
    _, token, _ = backend_of(store).set_state(b"one") or pytest.fail("nothing")
    started = time.monotonic()
    backend_of(store).wait_for_change(token, 0.05)
    assert time.monotonic() - started >= 0.05
