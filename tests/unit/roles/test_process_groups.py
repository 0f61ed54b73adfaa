"""The gloo groups of a process: which sockets are theirs, and how every wait in them is ended.

Both ranks of a group are threads of this process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import ProcessGroupGloo

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import GroupError
from unirun.roles.gloo import GlooGroup, _ends, _established, parse_published
from unirun.roles.process_groups import ProcessGroups, _watched_store, process_groups

pytestmark = pytest.mark.leaves

LONG = timedelta(minutes=30)


def published(ip: str, port: int, numbers: tuple[int, ...], host: bytes = b"host") -> bytes:
    """The value that a rank puts into the store, made by hand."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    storage = struct.pack("=H", family) + struct.pack(">H", port)
    storage += (b"\0" * 4 if family == socket.AF_INET6 else b"") + socket.inet_pton(family, ip)
    address = storage.ljust(128, b"\xa5") + struct.pack("=q", -1)
    pairs = b"".join(struct.pack("=q", number) for number in numbers)
    return struct.pack("=Q", len(host)) + host + struct.pack("=Q", len(address)) + address + pairs


@pytest.fixture
def groups() -> Iterator[ProcessGroups]:
    """Those of this process, without what other tests have left; all that a test has made ends with it."""
    process_groups().end_all()
    process_groups().release()
    yield process_groups()
    process_groups().end_all()


@pytest.fixture
def ranks(groups: ProcessGroups) -> Iterator[ThreadPoolExecutor]:
    """Threads that play ranks. One that still waits in a group when its test has failed is not waited for in turn."""
    with ThreadPoolExecutor(4) as pool:
        yield pool
        groups.end_all()


class Meeting:
    """A store in which ranks meet, and what tells that it is over."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.store = HashStore()
        self.over = threading.Event()
        self.made: list[GlooGroup] = []
        self.kept: list[Any] = []
        self._groups = groups

    def join(self, rank: int, size: int = 2) -> Any:
        """Form the group, as one rank."""
        with self._groups.forming(self.over.is_set) as made:
            group = ProcessGroupGloo(self.store, rank, size, timeout=LONG)
        self.made += made
        # A group that nobody holds closes its sockets.
        self.kept.append(group)
        return group

    def publish(self, key: str, value: bytes) -> None:
        """Do the same as a rank that forms the group; torch's types know values of text only."""
        self.store.set(key, value)  # type: ignore[arg-type]

    def end(self) -> None:
        """Its generation is over."""
        self.over.set()
        self._groups.end_outdated()


@pytest.fixture
def meeting(groups: ProcessGroups) -> Meeting:
    """One."""
    return Meeting(groups)


def eventually(look: Callable[[], object], what: str) -> None:
    """Wait until it is so."""
    deadline = time.monotonic() + WAIT_TIMEOUT
    while not look():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.005)


def formed(meeting: Meeting, ranks: ThreadPoolExecutor, size: int = 2) -> list[Any]:
    """The group, as each of its ranks has it."""
    waiting = [ranks.submit(meeting.join, rank, size) for rank in range(size)]
    return [each.result(WAIT_TIMEOUT) for each in waiting]


def summed(group: Any, value: float) -> float:
    """An all-reduce."""
    tensor = torch.tensor([value])
    group.allreduce(tensor).wait()
    return float(tensor)


class TestWhatARankPublishes:
    def test_is_read_from_what_gloo_writes(self, meeting: Meeting, ranks: ThreadPoolExecutor) -> None:
        formed(meeting, ranks)
        found = [parse_published(meeting.store.get(f"0/{rank}")) for rank in (0, 1)]
        here = {port for _, port in map(address_of, listening())}
        assert {port for (_, port), _ in found} <= here
        assert [len(numbers) for _, numbers in found] == [2, 2]

    @given(
        st.sampled_from(["127.0.0.1", "10.1.2.3", "::1", "fe80::1:2"]),
        st.integers(0, 65535),
        st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=5),
        st.binary(max_size=80),
    )
    def test_has_an_address_and_numbers(self, ip: str, port: int, numbers: list[int], host: bytes) -> None:
        value = published(ip, port, tuple(numbers), host)
        assert parse_published(value) == ((ip, port), tuple(numbers))

    @given(st.binary(max_size=400))
    def test_other_bytes_are_no_published_address(self, noise: bytes) -> None:
        with contextlib.suppress(ValueError):
            parse_published(noise)

    @given(st.data())
    def test_a_part_of_a_published_address_is_refused(self, data: st.DataObject) -> None:
        value = published("127.0.0.1", 1234, (1, 2))
        with contextlib.suppress(ValueError):
            address, _ = parse_published(value[: data.draw(st.integers(0, len(value)))])
            assert address[1] == 1234


class TestAWaitInAGroupThatIsOver:
    def test_a_wait_in_the_store_of_an_outdated_group_ends(
        self, meeting: Meeting, ranks: ThreadPoolExecutor
    ) -> None:
        waiting = ranks.submit(meeting.join, 0)
        eventually(lambda: meeting.store.check(["0/0"]), "it waits for the other's address")
        self.ends(meeting, waiting)

    @pytest.mark.parametrize("patience", [timedelta(milliseconds=900), timedelta(days=1)])
    def test_an_address_that_comes_in_time_is_waited_for(self, patience: timedelta) -> None:
        class Late(HashStore):
            looks = 0

            def check(self, keys: list[str]) -> bool:
                self.looks += 1
                return self.looks > 3

        store = Late()
        _watched_store(store, GlooGroup("", 2, lambda: False)).wait(["0/1"], patience)
        assert store.looks == 4

    def test_an_address_that_does_not_come_is_waited_for_so_long(self) -> None:
        store = _watched_store(HashStore(), GlooGroup("", 2, lambda: False))
        with pytest.raises(RuntimeError, match="0/1 not there after"):
            store.wait(["0/1"], timedelta(milliseconds=10))

    def test_ends_where_a_peer_has_published_and_never_connects(
        self, meeting: Meeting, ranks: ThreadPoolExecutor
    ) -> None:
        # The one with the lower port waits for the other.
        meeting.publish("0/1", published("127.0.0.1", 65535, (0, 1)))
        waiting = ranks.submit(meeting.join, 0)
        eventually(lambda: meeting.store.check(["0/0"]), "it listens")
        self.ends(meeting, waiting)

    def test_ends_where_several_never_connect(self, meeting: Meeting, ranks: ThreadPoolExecutor) -> None:
        for rank in (0, 1, 3):
            meeting.publish(f"0/{rank}", published("127.0.0.1", 65535, (0, 1, 2, 3)))
        waiting = ranks.submit(meeting.join, 2, 4)
        eventually(lambda: meeting.store.check(["0/2"]), "it listens")
        self.ends(meeting, waiting)

    def test_ends_where_a_peer_takes_the_connection_and_says_nothing(
        self, meeting: Meeting, ranks: ThreadPoolExecutor
    ) -> None:
        """Then the group counts as formed, and its first collective waits."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            meeting.publish("0/1", published("127.0.0.1", 1, (0, 1)))
            meeting.publish("0/1", published("127.0.0.1", silent.getsockname()[1], (0, 1)))
            waiting = ranks.submit(lambda: summed(meeting.join(0), 1.0))
            eventually(lambda: meeting.store.check(["0/0"]), "it connects or listens")
            self.ends(meeting, waiting)

    def test_a_collective_in_an_outdated_group_ends(
        self, meeting: Meeting, ranks: ThreadPoolExecutor
    ) -> None:
        group, _ = formed(meeting, ranks)
        waiting = ranks.submit(summed, group, 1.0)
        self.ends(meeting, waiting)

    def test_ends_in_a_group_that_was_over_before_it_began(
        self, meeting: Meeting, ranks: ThreadPoolExecutor
    ) -> None:
        meeting.over.set()
        with pytest.raises(GroupError, match="was ended while it was formed"):
            ranks.submit(meeting.join, 0).result(WAIT_TIMEOUT)

    @staticmethod
    def ends(meeting: Meeting, waiting: Future[Any]) -> None:
        assert not waiting.done()
        meeting.end()
        with pytest.raises((GroupError, RuntimeError)):
            waiting.result(WAIT_TIMEOUT)


class TestAGroup:
    def test_that_stands_is_intact_until_it_is_ended(
        self, meeting: Meeting, ranks: ThreadPoolExecutor
    ) -> None:
        one, other = formed(meeting, ranks)
        assert all(group.intact() and group.open for group in meeting.made)
        sums = [ranks.submit(summed, one, 1.0), ranks.submit(summed, other, 2.0)]
        assert [each.result(WAIT_TIMEOUT) for each in sums] == [3.0, 3.0]
        meeting.end()
        assert not any(group.intact() for group in meeting.made)

    def test_that_is_over_is_ended_once_however_many_views_come_after_that(
        self, meeting: Meeting, ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        formed(meeting, ranks)
        ended, end = list[GlooGroup](), GlooGroup.end

        def noted_end(group: GlooGroup) -> None:
            ended.append(group)
            end(group)

        monkeypatch.setattr(GlooGroup, "end", noted_end)
        for _ in range(3):
            meeting.end()
        assert sorted(map(id, ended)) == sorted(map(id, meeting.made))

    def test_that_is_the_default_one_is_broken_by_itself_alone(self, groups: ProcessGroups) -> None:
        """One of an earlier generation has its name and, while it is used somewhere, its sockets."""
        ours, theirs = socket.socketpair()
        earlier = GlooGroup("", 2, lambda: False)
        earlier.formed, earlier._sockets = True, {ours.fileno(): os.fstat(ours.fileno()).st_ino}
        groups._groups.append(earlier)
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        found, default = groups._groups
        earlier.name = default.name
        assert found is earlier
        assert not earlier.intact()
        assert not groups.broken()
        default.end()
        assert groups.broken()
        dist.destroy_process_group()
        ours.close()
        theirs.close()

    def test_that_is_of_the_present_is_not_ended(
        self, groups: ProcessGroups, ranks: ThreadPoolExecutor
    ) -> None:
        old, new = Meeting(groups), Meeting(groups)
        formed(old, ranks)
        one, other = formed(new, ranks)
        old.end()
        sums = [ranks.submit(summed, one, 1.0), ranks.submit(summed, other, 2.0)]
        assert [each.result(WAIT_TIMEOUT) for each in sums] == [3.0, 3.0]

    def test_that_its_owner_has_let_go_of_is_forgotten(
        self, groups: ProcessGroups, ranks: ThreadPoolExecutor
    ) -> None:
        for _ in range(5):
            formed(Meeting(groups), ranks)
        # A thread of the pool holds its group for a moment after it has given it away.
        eventually(lambda: not any(group.open for group in groups._groups), "nobody holds a group")
        formed(Meeting(groups), ranks)
        assert len(groups._groups) == 2

    def test_that_failed_to_form_is_forgotten(self, meeting: Meeting, groups: ProcessGroups) -> None:
        meeting.over.set()
        with pytest.raises(GroupError):
            meeting.join(0)
        assert groups._groups == []

    def test_that_nobody_watches_is_left_alone(
        self, groups: ProcessGroups, ranks: ThreadPoolExecutor
    ) -> None:
        store = HashStore()
        waiting = [ranks.submit(ProcessGroupGloo, store, rank, 2, timeout=LONG) for rank in (0, 1)]
        one, other = (each.result(WAIT_TIMEOUT) for each in waiting)
        groups.end_all()
        sums = [ranks.submit(summed, one, 1.0), ranks.submit(summed, other, 2.0)]
        assert [each.result(WAIT_TIMEOUT) for each in sums] == [3.0, 3.0]


class TestAnEndedGroup:
    """torch's destructor of a group joins gloo's threads, which may be in a collective that gloo has forgotten."""

    def test_is_kept_until_no_collective_of_it_is_under_way(
        self, groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        under_way = True
        monkeypatch.setattr("unirun.roles.process_groups.forgotten", lambda found: under_way and bool(found))
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        group = weakref.ref(dist.distributed_c10d._get_default_group())
        groups.end_all()
        dist.destroy_process_group()
        groups.release()
        assert group() is not None
        under_way = False
        groups.release()
        assert group() is None

    def test_the_default_group_outlives_its_destruction_by_the_user_until_the_next_one(
        self, groups: ProcessGroups
    ) -> None:
        found = []
        for _ in range(2):
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            found.append(weakref.ref(dist.distributed_c10d._get_default_group()))
            dist.destroy_process_group()
        assert [each() is None for each in found] == [True, False]
        groups.release()
        assert found[1]() is None


class Others:
    """Connections of this process that are none of a group's: one that stays, and some that come and go."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._stop = threading.Event()
        self.failed: list[OSError] = []
        self.made = 0
        self._threads = [threading.Thread(target=run) for run in (self._serve, self._come_and_go)]
        self._stays = socket.create_connection(self._server.getsockname())
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        self._server.settimeout(0.05)
        with ThreadPoolExecutor() as pool:
            while not self._stop.is_set():
                with contextlib.suppress(TimeoutError):
                    pool.submit(self._echo, self._server.accept()[0])

    def _echo(self, sock: socket.socket) -> None:
        with sock:
            while data := sock.recv(64):
                sock.sendall(data)

    def _come_and_go(self) -> None:
        while not self._stop.is_set():
            try:
                with socket.create_connection(self._server.getsockname(), timeout=WAIT_TIMEOUT) as sock:
                    self._ask(sock)
                self.made += 1
            except OSError as error:
                self.failed.append(error)

    @staticmethod
    def _ask(sock: socket.socket) -> None:
        sock.sendall(b"ping")
        if sock.recv(64) != b"ping":
            raise OSError("the connection was shut down")

    def among(self, numbers: Iterable[int]) -> bool:
        """Return True if one of these descriptors is an end of its connections."""
        return any(self._server.getsockname() in _ends(number) for number in numbers)

    def __enter__(self) -> Others:
        return self

    def __exit__(self, *_: object) -> None:
        self._ask(self._stays)
        self._stop.set()
        self._stays.close()
        for thread in self._threads:
            thread.join(WAIT_TIMEOUT)
        self._server.close()


class TestOtherPeoplesConnections:
    def test_are_none_of_a_groups_while_groups_form_and_end(
        self, groups: ProcessGroups, ranks: ThreadPoolExecutor
    ) -> None:
        with Others() as others:
            for _ in range(10):
                meeting = Meeting(groups)
                formed(meeting, ranks)
                assert all(group._sockets and not others.among(group._sockets) for group in meeting.made)
                assert all(group.intact() for group in meeting.made)
                before = others.made
                eventually(lambda before=before: others.made > before, "others have come and gone")  # type: ignore[misc]
                assert all(group.intact() for group in meeting.made), "although others have closed theirs"
                meeting.end()
        assert others.failed == []

    def test_to_the_address_of_a_group_leave_it_intact_when_they_end(
        self, meeting: Meeting, ranks: ThreadPoolExecutor
    ) -> None:
        first = ranks.submit(meeting.join, 0)
        eventually(lambda: meeting.store.check(["0/0"]), "it listens")
        address, _ = parse_published(meeting.store.get("0/0"))
        strangers = [socket.create_connection(address) for _ in range(4)]
        one, other = ranks.submit(meeting.join, 1).result(WAIT_TIMEOUT), first.result(WAIT_TIMEOUT)
        for stranger in strangers:
            stranger.close()
        made = meeting.made
        # Both ends of a stranger are in this process: one seems to be rank 0's, the other one rank 1's.
        assert [len(group._sockets) for group in made] == [5, 5]
        eventually(
            lambda: {sum(map(_established, each._sockets)) for each in made} == {1}, "strangers are gone"
        )
        assert all(group.intact() for group in meeting.made)
        sums = [ranks.submit(summed, one, 1.0), ranks.submit(summed, other, 2.0)]
        assert [each.result(WAIT_TIMEOUT) for each in sums] == [3.0, 3.0]
        meeting.end()
        assert not any(group.intact() for group in meeting.made)

    def test_are_none_of_a_groups_while_it_waits(
        self, groups: ProcessGroups, ranks: ThreadPoolExecutor
    ) -> None:
        with Others() as others:
            for _ in range(5):
                meeting = Meeting(groups)
                meeting.publish("0/1", published("127.0.0.1", 65535, (0, 1)))
                waiting = ranks.submit(meeting.join, 0)
                eventually(lambda meeting=meeting: meeting.store.check(["0/0"]), "it listens")  # type: ignore[misc]
                meeting.end()
                assert waiting.exception(WAIT_TIMEOUT) is not None
        assert others.failed == []


def listening() -> Iterator[int]:
    """The listening sockets of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield int(name)


def address_of(number: int) -> tuple[str, int]:
    """The address at which it listens."""
    with socket.socket(fileno=os.dup(number)) as sock:
        found: tuple[str, int] = sock.getsockname()[:2] if sock.family != socket.AF_UNIX else ("", 0)
        return found
