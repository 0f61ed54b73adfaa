"""Servers that die, hang and restart while clients read, write and watch."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.contract.store.backends import read
from tests.contract.store.etcd_server import EtcdCluster, EtcdMember, free_port
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import OutcomeUnknown, StoreAway, StoreError
from unirun.rendezvous.store.protocol import Change, Listing, Put, Store, ValueIs, Watch
from unirun.rendezvous.store.url import open_store


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    servers = EtcdCluster(tmp_path_factory.mktemp("trio"), 3)
    yield servers
    servers.stop()


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[EtcdCluster]:
    servers = EtcdCluster(tmp_path, flags=("--heartbeat-interval", "20", "--election-timeout", "200"))
    yield servers
    servers.stop()


@pytest.fixture
def opened() -> Iterator[list[Store]]:
    stores: list[Store] = []
    yield stores
    for store in stores:
        store.close()


class Writer(threading.Thread):
    """Puts 0, 1, 2, … under one key, each exactly once, reading back after unknown outcomes."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__(daemon=True)
        self._store, self._key = store, key
        self._enough = threading.Event()
        self.number = 0
        self.unknown = 0

    def run(self) -> None:
        self._store.txn([], [Put(self._key, "0")])
        while not self._enough.is_set():
            try:
                if not self._write():
                    return
            except OutcomeUnknown:
                self.unknown += 1
            except StoreAway:
                continue

    def _write(self) -> bool:
        item = self._store.get(self._key)
        assert item is not None
        self.number = int(item.value)
        return self._store.txn(
            [ValueIs(self._key, item.value)], [Put(self._key, str(self.number + 1))]
        ).succeeded

    def stop(self) -> int:
        """The last number in the store."""
        self._enough.set()
        self.join(WAIT_TIMEOUT)
        item = self._store.get(self._key)
        assert item is not None
        return int(item.value)


def patiently(watch: Watch) -> tuple[Change, ...]:
    """Changes that a watch returns, ignoring outages of its server."""
    try:
        news = watch.changes(1)
    except StoreAway:
        return ()
    assert not isinstance(news, Listing)
    return news


def follow(watch: Watch, until: int) -> list[str]:
    seen: list[str] = []
    deadline = time.monotonic() + WAIT_TIMEOUT
    while str(until) not in seen:
        assert time.monotonic() < deadline, f"{until} did not come after {seen[-3:]}"
        seen += [change.value for change in patiently(watch)]
    return seen


@pytest.mark.parametrize("victim", ["leader", "follower"])
def test_no_change_is_lost_when_an_etcd_member_is_killed_and_restarted(
    trio: EtcdCluster, opened: list[Store], victim: str
) -> None:
    opened += [open_store(trio.url(prefix=f"/{victim}/")) for _ in range(4)]
    writer = Writer(opened[0], "n")
    start = opened[1].get_prefix("").revision + 1
    watches = [store.watch("", start) for store in opened[1:]]
    writer.start()
    eventually(lambda: writer.number > 20)
    leader = trio.leader()
    killed = leader if victim == "leader" else next(each for each in trio.members if each is not leader)
    killed.kill()
    reached = writer.number
    eventually(lambda: writer.number > reached + 20)
    trio.start(killed)
    reached = writer.number
    eventually(lambda: writer.number > reached + 20)
    last = writer.stop()
    for watch in watches:
        assert follow(watch, last) == [str(number) for number in range(last + 1)], "none lost, none twice"


def test_an_etcd_client_fails_over_when_its_member_hangs(trio: EtcdCluster, opened: list[Store]) -> None:
    """A stopped process keeps its connections: only its silence shows that it is away."""
    leader = trio.leader()
    hanging = next(member for member in trio.members if member is not leader)
    rest = [member.endpoint for member in trio.members if member is not hanging]
    store = open_store(f"etcd://{','.join([hanging.endpoint, *rest])}?prefix=/hangs/&timeout=20")
    opened.append(store)
    store.txn([], [Put("a", "1")])
    with stopped(hanging):
        item = store.get("a")
        assert item is not None
        assert store.txn([], [Put("a", "2")]).succeeded


def test_an_etcd_watch_fails_over_when_its_member_hangs(trio: EtcdCluster, opened: list[Store]) -> None:
    leader = trio.leader()
    hanging = next(member for member in trio.members if member is not leader)
    rest = [member.endpoint for member in trio.members if member is not hanging]
    opened += [
        open_store(f"etcd://{','.join([hanging.endpoint, *rest])}?prefix=/hanging-watch/"),
        open_store(f"etcd://{','.join(rest)}?prefix=/hanging-watch/"),
    ]
    watching, writing = opened
    watch = watching.watch("", watching.get_prefix("").revision + 1)
    writing.txn([], [Put("a", "1")])
    assert follow(watch, 1) == ["1"]
    with stopped(hanging):
        for number in range(2, 6):
            writing.txn([], [Put("a", str(number))])
        assert follow(watch, 5) == ["2", "3", "4", "5"]


def test_without_a_quorum_etcd_reads_and_writes_nothing(trio: EtcdCluster, opened: list[Store]) -> None:
    store = open_store(trio.url(prefix="/quorum/", timeout=2))
    opened.append(store)
    store.txn([], [Put("a", "1")])
    killed = trio.members[:2]
    for member in killed:
        member.kill()
    try:
        with pytest.raises(StoreAway, match=r"has not answered for 2 s(.|\n)*etcdctl endpoint health"):
            store.get("a")
        with pytest.raises((StoreAway, OutcomeUnknown)):
            store.txn([], [Put("a", "2")])
    finally:
        for member in killed:
            trio.start(member)
    eventually(lambda: not fails(store))


def fails(store: Store) -> bool:
    try:
        store.get("a")
    except StoreError:
        return True
    return False


@contextmanager
def stopped(member: EtcdMember) -> Iterator[None]:
    """Suspend a member."""
    assert member.process is not None
    os.kill(member.process.pid, signal.SIGSTOP)
    # Each of its threads stops for itself, and one may have answered meanwhile.
    os.waitid(os.P_PID, member.process.pid, os.WSTOPPED)
    try:
        yield
    finally:
        os.kill(member.process.pid, signal.SIGCONT)


def test_a_watch_continues_after_its_only_etcd_server_restarts(
    lone: EtcdCluster, opened: list[Store]
) -> None:
    opened += [open_store(lone.url()), open_store(lone.url())]
    store, other_store = opened
    watch = other_store.watch("", store.get_prefix("").revision + 1)
    store.txn([], [Put("a", "1")])
    assert [change.value for change in read(watch, lambda seen: len(seen) == 1)] == ["1"]
    [member] = lone.members
    for number in ("2", "3"):
        member.kill()
        lone.start(member)
        # A read is asked again until the server is back; a write on the broken connection may or may not be done.
        assert store.get("a") is not None
        store.txn([], [Put("a", number)])
        assert follow(watch, int(number)) == [number]


def test_a_watch_reports_an_away_etcd_server_and_continues_when_it_is_back(
    lone: EtcdCluster, opened: list[Store]
) -> None:
    store = open_store(lone.url(timeout=3))
    opened.append(store)
    watch = store.watch("", store.get_prefix("").revision + 1)
    assert watch.changes(0.2) == ()
    [member] = lone.members
    member.kill()
    started = time.monotonic()
    with pytest.raises(StoreAway):
        endure(watch, started + WAIT_TIMEOUT)
    lone.start(member)
    eventually(lambda: not fails(store))
    store.txn([], [Put("a", "1")])
    assert follow(watch, 1) == ["1"]


def endure(watch: Watch, until: float) -> None:
    while time.monotonic() < until:
        assert watch.changes(1) == ()


def test_a_compaction_while_an_etcd_watch_is_broken_gives_a_listing(
    lone: EtcdCluster, opened: list[Store]
) -> None:
    opened += [open_store(lone.url()), open_store(lone.url())]
    store, other_store = opened
    watch = other_store.watch("", store.get_prefix("").revision + 1)
    store.txn([], [Put("a", "1"), Put("b", "1")])
    assert len(read(watch, lambda seen: len(seen) == 2)) == 2
    [member] = lone.members
    member.kill()
    known, member.client_port = member.client_port, free_port()
    lone.start(member)  # the same data behind a port that the watch does not know
    writer = open_store(lone.url())
    writer.txn([], [Put("a", "2")], ["b"])
    lone.ctl("compact", str(writer.txn([], [Put("c", "1")]).revision))
    expected = writer.get_prefix("")
    writer.close()
    member.kill()
    member.client_port = known
    lone.start(member)
    deadline = time.monotonic() + WAIT_TIMEOUT
    news: tuple[Change, ...] | Listing = ()
    while not news and time.monotonic() < deadline:
        try:
            news = watch.changes(1)
        except StoreAway:
            continue
    assert news == expected
    store.txn([], [Put("a", "3")])
    assert follow(watch, 3) == ["3"]


def test_a_write_to_an_unreachable_etcd_server_is_not_done(lone: EtcdCluster, opened: list[Store]) -> None:
    store = open_store(lone.url(timeout=1))
    opened.append(store)
    lone.members[0].kill()
    eventually(lambda: fails(store))
    with pytest.raises(StoreAway, match=r"onnect|has not answered"):
        store.txn([], [Put("a", "1")])


def test_a_write_to_a_hanging_etcd_server_has_an_unknown_outcome(
    lone: EtcdCluster, opened: list[Store]
) -> None:
    # The server may just be starting: the patient one comes first.
    opened.append(other_store := open_store(lone.url()))
    opened.append(store := open_store(lone.url(timeout=1)))
    with stopped(lone.members[0]), pytest.raises(OutcomeUnknown, match="read back"):
        store.txn([], [Put("a", "1")])
    eventually(lambda: not fails(other_store))
    with stopped(lone.members[0]), pytest.raises(StoreAway):
        store.get("a")


def test_a_closed_etcd_store_leaves_no_thread_or_socket(lone: EtcdCluster) -> None:
    before = set(threading.enumerate())
    store = open_store(lone.url())
    watches = [store.watch("", 1) for _ in range(3)]
    store.keep_alive(store.grant(30))
    store.txn([], [Put("a", "1")])
    for watch in watches:
        read(watch, lambda seen: len(seen) == 1)
    watches[0].close()
    store.close()
    eventually(lambda: set(threading.enumerate()) <= before)
    assert connections(lone.members[0].client_port) == 0


def connections(port: int) -> int:
    """Established connections of this process to `port`."""
    inodes = {
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}")
    }
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and f"socket:[{row[9]}]" in inodes for row in rows)


def test_a_call_is_repeated_when_another_thread_closes_its_channel(
    lone: EtcdCluster, opened: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a watch does after it found its server silent."""
    store = open_store(lone.url())
    opened.append(store)
    cluster = store._cluster  # type: ignore[attr-defined]
    find, closed = cluster._channel, list[object]()

    def found_and_closed_at_once(member: str) -> object:
        channel = find(member)
        if len(closed) < 3:
            closed.append(channel)
            cluster._drop(member)
        return channel

    monkeypatch.setattr(cluster, "_channel", found_and_closed_at_once)
    assert store.txn([], [Put("a", "1")]).succeeded
    item = store.get("a")
    assert item is not None
    assert (item.value, len(closed)) == ("1", 3)
