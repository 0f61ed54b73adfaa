"""The store of one round, over the store in memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Thread
from types import SimpleNamespace
from typing import NoReturn

import pytest
from torch.distributed import DistStoreError, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.utils.store import barrier, get_all

from unirun.errors import OutcomeUnknown, StoreAway, StoreRefused
from unirun.rendezvous.store.memory import MemoryStore, MemoryWatch
from unirun.rendezvous.store.protocol import MAX_CHANGES, Compare, KeyValue, Listing, Outcome, Put
from unirun.rendezvous.torchrun import handler
from unirun.rendezvous.torchrun.handler import LeasedWriter, RoundStore

WAIT = 20.0


class Flaky(MemoryStore):
    """Raises the errors of `faults`, one per transaction; with `done` after applying it."""

    def __init__(self, faults: Sequence[Exception], *, done: bool) -> None:
        super().__init__()
        self.faults, self.done = list(faults), done

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        fault = self.faults.pop(0) if self.faults else None
        if fault and not self.done:
            raise fault
        outcome = super().txn(compares, puts, deletes)
        if fault:
            raise fault
        return outcome


def round_store(store: MemoryStore, prefix: str = "run1/rounds/m.0/") -> RoundStore:
    return RoundStore(store, LeasedWriter(store, 45), prefix)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def agents(store: MemoryStore) -> RoundStore:
    return round_store(store)


def test_round_store_get_returns_a_set_value_as_bytes(agents: RoundStore) -> None:
    agents.set("torchelastic/role_info/0", "tëxt")
    agents.set("bytes/", b"\x00\xff")
    assert agents.get("torchelastic/role_info/0") == "tëxt".encode()
    assert agents.multi_get(["bytes/", "torchelastic/role_info/0"]) == [b"\x00\xff", "tëxt".encode()]


def test_round_store_keeps_an_empty_value(agents: RoundStore) -> None:
    agents.set("key", "")
    assert agents.get("key") == b""
    assert agents.multi_get(["key", "key"]) == [b"", b""]


def test_round_store_get_waits_until_the_key_is_set(agents: RoundStore, store: MemoryStore) -> None:
    with ThreadPoolExecutor() as pool:
        one, two = pool.submit(agents.get, "one"), pool.submit(agents.multi_get, ["one", "two"])
        other = round_store(store)
        other.set("two", "2")
        other.set("one", "1")
        assert one.result(WAIT) == b"1"
        assert two.result(WAIT) == [b"1", b"2"]


def test_round_store_wait_times_out_with_torchs_error(agents: RoundStore) -> None:
    with pytest.raises(DistStoreError, match="'key'"):
        agents.wait(["key"], timedelta(milliseconds=20))
    agents.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(DistStoreError, match="'key'"):
        agents.get("key")


def test_round_store_check_does_not_wait(agents: RoundStore) -> None:
    agents.set("one", "1")
    assert agents.check(["one"])
    assert not agents.check(["one", "two"])


def test_round_store_multi_set_splits_more_keys_than_a_transaction_takes(agents: RoundStore) -> None:
    keys = [f"key{number}" for number in range(2 * MAX_CHANGES + 1)]
    agents.multi_set(keys, keys)
    assert agents.multi_get(keys) == [key.encode() for key in keys]


def test_round_store_keys_with_a_common_beginning_are_distinct(
    agents: RoundStore, store: MemoryStore
) -> None:
    agents.set("a/b", "1")
    assert not agents.check(["a"])
    assert not round_store(store, "run1/rounds/m.1/").check(["a/b"])


def test_round_store_additions_from_many_threads_all_count(store: MemoryStore) -> None:
    agents = [round_store(store) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda each: each.add("members", 2), agents))
    assert sorted(sums) == [2, 4, 6, 8, 10, 12, 14, 16]
    assert agents[0].get("members") == b"16"


@pytest.mark.parametrize("done", [False, True], ids=["not done", "done"])
def test_round_store_addition_of_unknown_outcome_counts_once(done: bool) -> None:
    agents = round_store(Flaky([OutcomeUnknown("no answer")], done=done))
    assert agents.add("members", 1) == 1
    assert agents.add("members", 1) == 2


def test_round_store_retries_during_a_short_outage() -> None:
    agents = round_store(Flaky([StoreAway("gone"), OutcomeUnknown("no answer")], done=False))
    agents.set("key", "1")
    assert agents.get("key") == b"1"


def test_round_store_raises_torchs_error_in_a_long_outage() -> None:
    agents = round_store(Flaky([StoreAway("gone")] * 100, done=False))
    agents.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(DistStoreError, match="gone"):
        agents.set("key", "1")


@pytest.mark.parametrize("away", [3, 10**9])
def test_round_store_retries_reads_until_its_timeout(
    agents: RoundStore, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, away: int
) -> None:
    agents.set("key", "1")
    read, faults = store.get_prefix, [StoreAway("gone")] * min(away, 10)

    def get_prefix(prefix: str) -> Listing:
        if faults:
            if away < 10:
                faults.pop()
            raise StoreAway("gone")
        return read(prefix)

    monkeypatch.setattr(store, "get_prefix", get_prefix)
    agents.set_timeout(timedelta(seconds=WAIT if away < 10 else 0.02))
    calls = (
        lambda: agents.get("key"),
        lambda: agents.multi_get(["key", "key"])[1],
        lambda: agents.check(["key"]),
    )
    for call in calls:
        if away < 10:
            assert call() in (b"1", True)
        else:
            with pytest.raises(DistStoreError, match="read .*: gone"):
                call()


def test_torchs_barrier_and_gather_work_over_a_round_store(store: MemoryStore) -> None:
    def node(rank: int) -> list[bytes]:
        agents = round_store(store)
        agents.set(f"role{rank}", str(rank))
        gathered: list[bytes] = get_all(agents, rank, "role", 3)
        barrier(agents, 3, "exit", WAIT)
        return gathered

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(node, range(3))) == [[b"0", b"1", b"2"]] * 3


def test_torchs_prefix_store_works_over_a_round_store(agents: RoundStore) -> None:
    """Through C++, as `PrefixStore` and process groups would call it."""
    prefixed = PrefixStore("torch", agents)
    waiting = Thread(target=prefixed.wait, args=(["key"], timedelta(seconds=WAIT)), daemon=True)
    waiting.start()
    prefixed.set("key", "value")
    waiting.join(WAIT)
    assert not waiting.is_alive()
    assert prefixed.get("key") == b"value"
    assert prefixed.add("count", 3) == 3
    assert agents.get("torch/key") == b"value"


def test_round_store_multi_set_needs_as_many_values_as_keys(agents: RoundStore) -> None:
    with pytest.raises(ValueError, match="shorter"):
        agents.multi_set(["one", "two"], ["1"])
    assert not agents.check(["one"])


def test_round_store_timeout_names_the_operation() -> None:
    agents = round_store(Flaky([StoreAway("gone")] * 100, done=False))
    agents.set_timeout(timedelta(milliseconds=1))
    with pytest.raises(DistStoreError, match="set 'one': gone"):
        agents.multi_set(["one", "two"], ["1", "2"])
    with pytest.raises(DistStoreError, match="add to 'members': gone"):
        agents.add("members", 1)


class Counted(MemoryStore):
    """Records its calls, and can let another client add first."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.before_addition: list[RoundStore] = []

    def get(self, key: str) -> KeyValue | None:
        self.calls.append(f"get {key.split('/')[3]}")
        return super().get(key)

    def get_prefix(self, prefix: str) -> Listing:
        self.calls.append(f"list {prefix.removeprefix('run1/rounds/m.0/')}")
        return super().get_prefix(prefix)

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        while compares and self.before_addition:
            self.before_addition.pop().add("members", 10)
        self.calls.append("txn")
        return super().txn(compares, puts, deletes)


class TestRoundStoreRequests:
    @pytest.fixture
    def store(self) -> Counted:
        return Counted()

    def test_round_store_multi_get_makes_one_request(self, store: Counted) -> None:
        agents = round_store(store)
        agents.multi_set(["one", "two", "three"], ["1", "2", "3"])
        assert agents.multi_get(["one", "two"]) == [b"1", b"2"]
        assert agents.get("three") == b"3"
        assert store.calls == ["txn", "list keys/", "list keys/three/"]

    def test_round_store_multi_set_makes_as_few_requests_as_possible(self, store: Counted) -> None:
        keys = [f"key{number}" for number in range(2 * MAX_CHANGES + 1)]
        round_store(store).multi_set(keys, keys)
        assert store.calls == ["txn"] * 3

    def test_round_store_addition_without_contention_is_one_transaction(self, store: Counted) -> None:
        assert round_store(store).add("members", 1) == 1
        assert store.calls == ["get added", "get keys", "txn"]

    def test_round_store_addition_is_repeated_after_a_conflict(self, store: Counted) -> None:
        store.before_addition.append(round_store(store))
        assert round_store(store).add("members", 1) == 11
        assert round_store(store).get("members") == b"11"


class Watched(MemoryStore):
    """Sets a key as soon as it is watched; with `compacted` the watch gets a listing."""

    def __init__(self, *, compacted: bool) -> None:
        super().__init__()
        self.compacted = compacted

    def watch(self, prefix: str, from_revision: int) -> MemoryWatch:
        self.txn([], [Put(f"{prefix}value", "bmV3")])
        watch = super().watch(prefix, from_revision)
        if self.compacted:
            self.compact(self.get_prefix("").revision + 1)
        return watch


@pytest.mark.parametrize("compacted", [False, True])
def test_round_store_get_sees_a_change_within_a_wait_of_less_than_a_second(
    monkeypatch: pytest.MonkeyPatch, compacted: bool
) -> None:
    monkeypatch.setattr(handler, "time", SimpleNamespace(monotonic=lambda: 0.0))
    agents = round_store(Watched(compacted=compacted))
    agents.set_timeout(timedelta(milliseconds=500))
    assert agents.get("key") == b"new"


def test_round_store_get_does_not_return_a_deleted_value(store: MemoryStore, agents: RoundStore) -> None:
    agents.set("key", "old")
    store.txn([], deletes=["run1/"])
    agents.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(DistStoreError, match="wait for 'key': nobody has set it in time"):
        agents.get("key")


def test_round_store_get_raises_torchs_error_when_the_store_refuses_while_it_waits() -> None:
    class Refusing(MemoryStore):
        """Refuses as soon as it is watched, as etcd does when a role has lost its permission."""

        def watch(self, prefix: str, from_revision: int) -> MemoryWatch:
            watch = super().watch(prefix, from_revision)
            watch.changes = self._refuse  # type: ignore[method-assign]
            return watch

        def _refuse(self, timeout: float) -> NoReturn:
            raise StoreRefused("it does not let this client read", "grant it")

    with pytest.raises(DistStoreError, match="wait for 'key': it does not let this client read"):
        round_store(Refusing()).get("key")
