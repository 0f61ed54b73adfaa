"""Both ends of one socket: what is sent arrives, whole and in order, and nobody waits."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.wire.endpoints import credentials_in
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import CallError, FrameError
from unirun.roles.transport.frames import INLINE, REPLY, REQUEST
from unirun.roles.transport.protocol import Lent, Parcel
from unirun.roles.transport.sockets import BATCH, SEALS, FrameSocket, TlsFrameSocket
from unirun.roles.transport.stripes import STRIPED
from unirun.wire.credentials import server_name
from unirun.wire.handshake import new_token
from unirun.wire.sockets import listen_tcp, shut

KINDS = ("unix", "tcp", "tls")


class End:
    """One end, and whether it has something left to send."""

    def __init__(self, sock: socket.socket, *, opened: bool = True) -> None:
        self.wants, self.socket = False, sock
        if isinstance(sock, ssl.SSLSocket):
            self.connection: FrameSocket = TlsFrameSocket(self._want)
        else:
            self.connection = FrameSocket(self._want, shares=sock.family == socket.AF_UNIX)
        if opened:
            self.connection.open(sock)

    def _want(self, wanted: bool) -> None:
        self.wants = wanted

    def send(self, tag: int, parcel: Parcel, *, urgent: bool = True) -> bool:
        """Send a request."""
        return self.connection.send(REQUEST, tag, parcel, urgent=urgent)


def receive(sender: End, receiver: End, count: int) -> list[tuple[int, Parcel]]:
    """The next frames, while the sender sends what it has left."""
    found: list[tuple[int, Parcel]] = []
    poll = select.poll()
    poll.register(receiver.connection.socket, select.POLLIN)
    while len(found) < count:
        if sender.wants:
            sender.connection.flush()
        assert poll.poll(WAIT_TIMEOUT * 1000 if not sender.wants else 0) or sender.wants
        found += [(frame.tag, parcel) for frame, parcel in receiver.connection.receive()]
    return found


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[socket.socket, socket.socket]:
    """The two sockets."""
    if request.param == "unix":
        return socket.socketpair()
    with listen_tcp("127.0.0.1") as listener:
        ours, theirs = socket.create_connection(listener.getsockname()), listener.accept()[0]
    if request.param == "tcp":
        return ours, theirs
    credentials = credentials_in(tmp_path / "job", new_token(), "node")
    client, server = credentials.client_context(), credentials.server_context()
    assert client is not None
    assert server is not None
    with ThreadPoolExecutor() as pool:
        serving = pool.submit(server.wrap_socket, theirs, server_side=True)
        return client.wrap_socket(ours, server_hostname=server_name("node")), serving.result(WAIT_TIMEOUT)


@pytest.fixture
def ends(pair: tuple[socket.socket, socket.socket]) -> Iterator[tuple[End, End]]:
    """The two."""
    one, other = map(End, pair)
    yield one, other
    for end in (one, other):
        end.connection.close()


def parcel(head: bytes, *sizes: int, value: int = 1) -> Parcel:
    """A message."""
    return Parcel(head, tuple(memoryview(bytearray([value]) * size) for size in sizes))


def same(left: Parcel, right: Parcel) -> bool:
    """Return True if two are alike."""
    return left.head == right.head and [bytes(b) for b in left.buffers] == [bytes(b) for b in right.buffers]


@pytest.mark.parametrize(
    "sizes",
    [(), (0,), (1, 2, 3), (INLINE,), (INLINE + 1,), (INLINE, 1), (1 << 20, 0, 5, 1 << 21)],
    ids=str,
)
def test_a_parcel_arrives(ends: tuple[End, End], sizes: tuple[int, ...]) -> None:
    sent = parcel(b"head" * 100, *sizes)
    assert ends[0].send(5, sent)
    ((tag, found),) = receive(*ends, 1)
    assert tag == 5
    assert same(found, sent)
    for view in found.buffers:
        view[:] = bytes(view.nbytes)


def test_far_more_than_a_socket_takes_is_sent_bit_by_bit_and_in_order(ends: tuple[End, End]) -> None:
    sent = [
        # The socket takes a part of the first one.
        parcel(bytes([n]) * (100_000 if n else 1_000_000), 1000, (n + 1) % 3 * INLINE, value=n)
        for n in range(60)
    ]
    for number, each in enumerate(sent):
        ends[0].send(number, each)
    assert ends[0].wants, "and nobody has waited for it"
    found = receive(*ends, len(sent))
    assert [tag for tag, _ in found] == list(range(len(sent)))
    assert all(same(a, b) for (_, a), b in zip(found, sent, strict=True))
    assert not ends[1].connection._handles, "a descriptor came twice"
    ends[0].connection.flush()
    assert not ends[0].wants


def test_far_more_than_a_socket_takes_is_sent_when_it_was_asked_for_before_the_connection_is_open(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """1. It is asked for. 2. The socket could be written, before the peer has proved the token. 3. The peer has."""
    sender, receiver = End(pair[0], opened=False), End(pair[1])
    sent = parcel(b"x" * (32 << 20))
    sender.send(1, sent)
    sender.connection.flush()
    assert not sender.wants, "nothing may be sent yet"
    sender.connection.open(sender.socket)
    sender.connection.flush()
    assert sender.wants, "the socket has not taken all of it"
    ((_, found),) = receive(sender, receiver, 1)
    assert same(found, sent)
    for end in (sender, receiver):
        end.connection.close()


def test_a_frame_that_is_not_urgent_is_sent_with_the_next_one(ends: tuple[End, End]) -> None:
    for number in range(5):
        ends[0].send(number, parcel(b"later"), urgent=False)
    assert ends[0].wants
    ends[0].send(5, parcel(b"now"))
    assert [tag for tag, _ in receive(*ends, 6)] == list(range(6))


def test_frames_that_are_not_urgent_are_sent_in_batches(ends: tuple[End, End]) -> None:
    for number in range(3 * BATCH):
        ends[0].send(number, parcel(b"later"), urgent=False)
    ends[0].send(3 * BATCH, parcel(b"large", 1 << 20), urgent=False)
    assert [tag for tag, _ in receive(*ends, 3 * BATCH + 1)] == list(range(3 * BATCH + 1))


def test_a_segment_is_released_with_the_next_frame(ends: tuple[End, End]) -> None:
    one, other = ends
    count = len(os.listdir("/proc/self/fd"))
    for number in range(30):
        one.send(number, parcel(b"there", 1 << 20, value=number))
        ((_, found),) = receive(one, other, 1)
        tensor = torch.frombuffer(found.buffers[0], dtype=torch.uint8)
        assert int(tensor[-1]) == number
        del found, tensor
        other.connection.send(REPLY, number, parcel(b"back"))
        receive(other, one, 1)
    assert len(os.listdir("/proc/self/fd")) <= count + 2


@given(st.lists(st.sampled_from(("lend", "lend", "free", "close")), max_size=12))
def test_each_lender_is_told_once_that_its_memory_is_free(history: list[str]) -> None:
    """The receiver frees it, or the connection ends, perhaps before it was sent."""
    one, other = map(End, socket.socketpair())
    handle = os.memfd_create("lent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(handle, 4096)
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, SEALS)
    told, had, is_open = list[int](), dict[int, Parcel](), True
    expected: set[int] = set()
    for number, what in enumerate(history):
        if what == "lend":
            lent = Lent(handle, 4096, partial(told.append, number))
            assert one.send(number, Parcel(b"", (), lent)) is is_open
            if is_open:
                had |= dict(receive(one, other, 1))
            else:
                expected.add(number)
        elif what == "free" and had and is_open:
            first = min(had)
            del had[first]
            expected.add(first)
            other.connection.send(REPLY, 0, parcel(b"next"))
            receive(other, one, 1)
        elif what == "close":
            one.connection.close()
            expected |= had.keys()
            is_open = False
        assert sorted(told) == sorted(expected)
    for end in (one, other):
        end.connection.close()
    assert sorted(told) == sorted(expected | had.keys())
    os.close(handle)


def test_the_end_of_the_peer_is_an_eof_error(ends: tuple[End, End]) -> None:
    ends[0].connection.close()
    ends[0].connection.close()
    with pytest.raises(EOFError):
        receive(*ends, 1)
    assert not ends[0].send(1, parcel(b"x"))


def test_sending_to_an_ended_peer_fails_in_the_reading_thread(ends: tuple[End, End]) -> None:
    ends[1].connection.close()
    ends[0].send(1, parcel(b"x" * 1000, 1 << 20))
    with pytest.raises((EOFError, OSError)):
        receive(ends[1], ends[0], 1)


def test_a_frame_without_its_descriptor_is_refused(ends: tuple[End, End]) -> None:
    raw = ends[0].connection.socket
    from unirun.roles.transport.frames import encode_header

    raw.send(encode_header(REQUEST, 1, 0, [1 << 20], 3))
    with pytest.raises(FrameError, match="a frame without the (descriptor|1048576 bytes)"):
        receive(*ends, 1)


def test_a_frame_for_which_no_descriptor_is_free_cannot_be_sent_and_the_next_one_can() -> None:
    """It waits for the connection to be open, and its segment needs a second descriptor until then."""
    ours, theirs = socket.socketpair()
    one, other = End(ours, opened=False), End(theirs)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
    try:
        with pytest.raises(CallError, match="Too many open files"):
            one.send(1, parcel(b"first", INLINE + 1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert one.send(2, parcel(b"second", INLINE + 1))
    one.connection.open(ours)
    one.connection.flush()
    assert [tag for tag, _ in receive(one, other, 1)] == [2]
    assert len(one.connection._pool._lent) == 1, "nobody has the first segment, so that nobody gives it back"
    for end in (one, other):
        end.connection.close()


def test_buffers_that_are_kept_may_be_changed_before_they_are_sent(ends: tuple[End, End]) -> None:
    memory = bytearray(b"x") * (32 << 20)
    ends[0].send(1, Parcel(b"head", (memoryview(memory),)))
    ends[0].connection.keep()
    memory[:] = bytes(len(memory))
    ((_, found),) = receive(*ends, 1)
    assert bytes(found.buffers[0]) == b"x" * len(memory)


@pytest.mark.parametrize("pair", ["tls"], indirect=True)
def test_frames_wait_for_the_stripes_of_all_that_were_sent(ends: tuple[End, End]) -> None:
    """One connection carries the stripes of three frames, one after the other."""
    sending, receiving = socket.socketpair()
    connection: Any = ends[0].connection
    put, written = connection.put, list[int]()

    def noted_put(data: memoryview, handle: int | None = None) -> int:
        written.append(len(data))
        count: int = put(data, handle)
        return count

    connection.put = noted_put
    sender = threading.Thread(target=partial(connection.stripes.run, sending, sends=True))
    sender.start()
    eventually(lambda: connection.stripes._queues, "the connection for stripes is used")
    sent = [parcel(b"striped", STRIPED, value=number) for number in range(3)]
    for number, each in enumerate(sent):
        ends[0].send(number, each)
    receiving.settimeout(WAIT_TIMEOUT)
    come = 0
    for _ in sent:
        # The stripe that follows begins when what is to happen after the one before has happened.
        come += len(receiving.recv(1))
        assert not written, "a frame is written before its stripe has come"
        while come % (STRIPED + 32):
            come += len(receiving.recv(1 << 20))
        receiving.send(b"\0")
    eventually(lambda: len(written) == len(sent), "all frames are written")
    connection.close()
    receiving.close()
    sender.join(WAIT_TIMEOUT)


def test_a_connection_of_tls_that_has_ended_writes_nothing_in_the_clear(ends: tuple[End, End]) -> None:
    sock = ends[0].connection.socket
    shut(sock)
    if isinstance(sock, ssl.SSLSocket):
        inner = sock._sslobj  # type: ignore[attr-defined]
        assert inner is not None, "without it, Python would write what it is given"
    ends[0].send(1, parcel(b"secret"))
    with pytest.raises((EOFError, OSError)):
        receive(*ends, 1)


def test_a_socket_is_closed_only_after_a_thread_that_reads_it(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Else the thread would read from the file that gets the number next."""
    kind = TlsFrameSocket if isinstance(pair[0], ssl.SSLSocket) else FrameSocket

    class Closed(kind):  # type: ignore[misc, valid-type]
        """It is closed while it is read."""

        def get(self, space: memoryview) -> tuple[int, bool]:
            closing.start()
            closing.join(0.1)
            assert self.socket.fileno() >= 0
            found: tuple[int, bool] = super().get(space)
            return found

    connection = Closed(lambda wanted: None)
    connection.open(pair[0])
    closing = threading.Thread(target=connection.close)
    with pytest.raises(EOFError):
        list(connection.receive())
    closing.join(WAIT_TIMEOUT)
    assert connection.socket.fileno() < 0
    pair[1].close()


def test_closing_leaves_no_descriptor(ends: tuple[End, End]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(30):
        # Some are in the socket, some wait, and none is ever read.
        ends[0].send(number, parcel(b"x" * 100_000, 1 << 20))
    assert ends[0].wants
    for end in ends:
        end.connection.close()
    assert len(os.listdir("/proc/self/fd")) <= before - 2
