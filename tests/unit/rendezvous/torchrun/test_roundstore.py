"""What agents of one round tell each other, over the store in memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Thread

import pytest
from torch.distributed import DistStoreError, PrefixStore
from torch.distributed.elastic.utils.store import barrier, get_all

from unirun.errors import OutcomeUnknown, StoreAway
from unirun.rendezvous.store.memory import MemoryStore
from unirun.rendezvous.store.protocol import MAX_CHANGES, Compare, Listing, Outcome, Put
from unirun.rendezvous.torchrun.leased import LeasedWriter
from unirun.rendezvous.torchrun.roundstore import RoundStore

WAIT = 20.0


class Flaky(MemoryStore):
    """Raises the errors of `faults`, one per transaction; after making the change when `done`."""

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


def test_what_is_set_is_got_as_bytes(agents: RoundStore) -> None:
    agents.set("torchelastic/role_info/0", "tëxt")
    agents.set("bytes/", b"\x00\xff")
    assert agents.get("torchelastic/role_info/0") == "tëxt".encode()
    assert agents.multi_get(["bytes/", "torchelastic/role_info/0"]) == [b"\x00\xff", "tëxt".encode()]


def test_the_empty_value_is_a_value(agents: RoundStore) -> None:
    agents.set("key", "")
    assert agents.get("key") == b""
    assert agents.multi_get(["key", "key"]) == [b"", b""]


def test_who_waits_for_a_key_gets_it_when_it_is_set(agents: RoundStore, store: MemoryStore) -> None:
    with ThreadPoolExecutor() as pool:
        one, two = pool.submit(agents.get, "one"), pool.submit(agents.multi_get, ["one", "two"])
        other = round_store(store)
        other.set("two", "2")
        other.set("one", "1")
        assert one.result(WAIT) == b"1"
        assert two.result(WAIT) == [b"1", b"2"]


def test_a_wait_ends_with_torchs_error(agents: RoundStore) -> None:
    with pytest.raises(DistStoreError, match="'key'"):
        agents.wait(["key"], timedelta(milliseconds=20))
    agents.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(DistStoreError, match="'key'"):
        agents.get("key")


def test_check_does_not_wait(agents: RoundStore) -> None:
    agents.set("one", "1")
    assert agents.check(["one"])
    assert not agents.check(["one", "two"])


def test_more_keys_than_a_transaction_takes(agents: RoundStore) -> None:
    keys = [f"key{number}" for number in range(2 * MAX_CHANGES + 1)]
    agents.multi_set(keys, keys)
    assert agents.multi_get(keys) == [key.encode() for key in keys]


def test_a_key_is_not_its_neighbour(agents: RoundStore, store: MemoryStore) -> None:
    agents.set("a/b", "1")
    assert not agents.check(["a"])
    assert not round_store(store, "run1/rounds/m.1/").check(["a/b"])


def test_additions_from_many_threads_all_count(store: MemoryStore) -> None:
    agents = [round_store(store) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda each: each.add("members", 2), agents))
    assert sorted(sums) == [2, 4, 6, 8, 10, 12, 14, 16]
    assert agents[0].get("members") == b"16"


@pytest.mark.parametrize("done", [False, True], ids=["not done", "done"])
def test_an_addition_without_an_answer_counts_once(done: bool) -> None:
    agents = round_store(Flaky([OutcomeUnknown("no answer")], done=done))
    assert agents.add("members", 1) == 1
    assert agents.add("members", 1) == 2


def test_a_store_that_is_away_for_a_moment_is_waited_for() -> None:
    agents = round_store(Flaky([StoreAway("gone"), OutcomeUnknown("no answer")], done=False))
    agents.set("key", "1")
    assert agents.get("key") == b"1"


def test_a_store_that_stays_away_is_torchs_error() -> None:
    agents = round_store(Flaky([StoreAway("gone")] * 100, done=False))
    agents.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(DistStoreError, match="gone"):
        agents.set("key", "1")


@pytest.mark.parametrize("away", [3, 10**9])
def test_a_store_that_cannot_be_read_is_waited_for_as_long_as_a_call_may_take(
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
    calls = (lambda: agents.get("key"), lambda: agents.check(["key"]))
    for call in calls:
        if away < 10:
            assert call() in (b"1", True)
        else:
            with pytest.raises(DistStoreError, match="read .*: gone"):
                call()


def test_torchs_barrier_and_gathering_work_over_it(store: MemoryStore) -> None:
    def node(rank: int) -> list[bytes]:
        agents = round_store(store)
        agents.set(f"role{rank}", str(rank))
        gathered = get_all(agents, rank, "role", 3)
        barrier(agents, 3, "exit", WAIT)
        return gathered

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(node, range(3))) == [[b"0", b"1", b"2"]] * 3


def test_torchs_own_stores_can_stand_on_it(agents: RoundStore) -> None:
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
