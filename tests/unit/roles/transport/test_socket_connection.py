from __future__ import annotations

import contextlib
import queue
import resource
import select
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.wire.endpoints import credentials_in
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import CallError
from unirun.roles.transport import socket_transport, stripes
from unirun.roles.transport.frames import INLINE, OPEN, encode_header
from unirun.roles.transport.protocol import Parcel
from unirun.roles.transport.socket_transport import SocketConnection, SocketTransport, _Served
from unirun.roles.transport.sockets import File, FrameSocket, Loop, RequestInbox
from unirun.roles.transport.stripes import Stripes
from unirun.values import WorkerId
from unirun.wire.address import Address, UnixAddress
from unirun.wire.blocking import BlockingStream
from unirun.wire.credentials import Credentials
from unirun.wire.handshake import HANDSHAKE_TIMEOUT, HELLO_SIZE, new_token

LATE = "a thread that is late"


class Late(FrameSocket):
    """A connection of which one thread takes long to see that there is nothing to read."""

    entered, let_go = threading.Event(), threading.Event()

    def get(self, space: memoryview) -> tuple[int, bool]:
        if threading.current_thread().name == LATE:
            self.entered.set()
            assert self.let_go.wait(WAIT_TIMEOUT)
            raise BlockingIOError
        return super().get(space)


@pytest.fixture
def replies() -> queue.SimpleQueue[Callable[[], None]]:
    """One for each request that has come: sends the answer."""
    return queue.SimpleQueue()


@pytest.fixture
def connection(
    tmp_path: Path, replies: queue.SimpleQueue[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[SocketConnection]:
    credentials = credentials_in(tmp_path / "worker", new_token(), "worker", tls=False)
    worker = SocketTransport(tmp_path / "calls", credentials)
    path = worker.serve(WorkerId("desk", 0, 0), lambda parcel, reply: replies.put(lambda: reply(parcel)))
    monkeypatch.setattr(socket_transport, "FrameSocket", Late)
    loop = Loop()
    yield SocketConnection(UnixAddress.here(path), credentials, loop, lambda reason: None)
    loop.close()
    worker.close()


def test_one_that_is_closed_while_it_connects_leaves_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, made = BlockingStream.connect, list[BlockingStream]()
    connects, closed = threading.Event(), threading.Event()

    def late(address: Address, credentials: Credentials) -> BlockingStream:
        made.append(connect(address, credentials))
        connects.set()
        assert closed.wait(WAIT_TIMEOUT)
        return made[0]

    credentials = credentials_in(tmp_path / "worker", new_token(), "worker", tls=False)
    worker, loop = SocketTransport(tmp_path / "calls", credentials), Loop()
    path = worker.serve(WorkerId("desk", 0, 0), lambda parcel, reply: None)
    monkeypatch.setattr(BlockingStream, "connect", late)
    closing = SocketConnection(UnixAddress.here(path), credentials, loop, lambda reason: None)
    assert connects.wait(WAIT_TIMEOUT)
    closing.close()
    closed.set()
    eventually(lambda: made[0].socket.fileno() == -1, "its socket is closed")
    loop.close()
    worker.close()


def test_an_answer_is_read_after_the_loop_was_late_with_an_event_of_the_call_before(
    connection: SocketConnection, replies: queue.SimpleQueue[Callable[[], None]]
) -> None:
    """The loop's thread handles an event that a caller's thread has taken care of. Meanwhile there is another call."""
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def call(head: bytes, patience: float) -> None:
        wait = connection.call(Parcel(head), lambda parcel: answers.put(parcel.head), patience)
        if wait is not None:
            wait()

    for head in (b"the handshake is over", b"this thread has read"):
        calling = threading.Thread(target=call, args=(head, WAIT_TIMEOUT))
        calling.start()
        replies.get(timeout=WAIT_TIMEOUT)()
        assert answers.get(timeout=WAIT_TIMEOUT) == head
        calling.join(WAIT_TIMEOUT)
    late = threading.Thread(target=connection.ready, args=(select.EPOLLIN,), name=LATE)
    late.start()
    assert Late.entered.wait(WAIT_TIMEOUT)
    call(b"meanwhile", WAIT_TIMEOUT)
    Late.let_go.set()
    late.join(WAIT_TIMEOUT)
    replies.get(timeout=WAIT_TIMEOUT)()
    assert answers.get(timeout=WAIT_TIMEOUT) == b"meanwhile"


def test_a_connection_that_is_closed_keeps_nothing_of_its_calls(
    connection: SocketConnection, replies: queue.SimpleQueue[Callable[[], None]]
) -> None:
    """Its callbacks hold arguments and results."""

    class Caller:
        def done(self, parcel: Parcel) -> None:
            raise AssertionError("the connection is closed")

    caller = Caller()
    gone = weakref.ref(caller)
    connection.call(Parcel(b"call"), caller.done)
    answer = replies.get(timeout=WAIT_TIMEOUT)
    del caller
    connection.close()
    answer()
    assert gone() is None


def test_a_request_that_cannot_be_sent_is_not_open(
    connection: SocketConnection, replies: queue.SimpleQueue[Callable[[], None]]
) -> None:
    answered = threading.Event()
    connection.call(Parcel(b"the handshake is over"), lambda parcel: answered.set())
    replies.get(timeout=WAIT_TIMEOUT)()
    assert answered.wait(WAIT_TIMEOUT)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(CallError, match="no shared memory"):
            connection.call(Parcel(b"", (memoryview(bytes(INLINE + 1)),)), lambda parcel: None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not connection._pending


def test_a_listener_that_is_closed_ends_those_that_have_not_proved_the_token(tmp_path: Path) -> None:
    credentials = credentials_in(tmp_path / "worker", new_token(), "worker", tls=False)
    worker = SocketTransport(tmp_path / "calls", credentials)
    path = worker.serve(WorkerId("desk", 0, 0), lambda parcel, reply: None)
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for each in strangers:
        each.settimeout(HANDSHAKE_TIMEOUT / 2)
        each.connect(path)
        assert len(each.recv(1000)) == HELLO_SIZE
    worker.close()
    for each in strangers:
        with each, contextlib.suppress(ConnectionError):
            assert each.recv(1) == b""


def test_answers_that_no_thread_waits_for_are_read_while_and_after_one_waits_for_another(
    connection: SocketConnection, replies: queue.SimpleQueue[Callable[[], None]]
) -> None:
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def call(head: bytes, patience: float | None = None) -> None:
        wait = connection.call(Parcel(head), lambda parcel: answers.put(parcel.head), patience)
        if wait is not None:
            wait()

    call(b"the handshake is over")
    replies.get(timeout=WAIT_TIMEOUT)()
    assert answers.get(timeout=WAIT_TIMEOUT) == b"the handshake is over"
    for patience in (0.001, WAIT_TIMEOUT):
        call(b"later")
        later = replies.get(timeout=WAIT_TIMEOUT)
        waiting = threading.Thread(target=call, args=(b"now", patience))
        waiting.start()
        now = replies.get(timeout=WAIT_TIMEOUT)
        if patience < 1.0:
            # Nothing has come when it gives up.
            waiting.join(WAIT_TIMEOUT)
        now()
        assert answers.get(timeout=WAIT_TIMEOUT) == b"now"
        waiting.join(WAIT_TIMEOUT)
        later()
        assert answers.get(timeout=WAIT_TIMEOUT) == b"later"


def test_stripes_for_which_there_is_no_thread_end_their_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other end goes on without them."""
    monkeypatch.setattr(stripes, "_places", threading.BoundedSemaphore(1))
    assert stripes._places.acquire()
    loop = Loop()
    inbox, there = RequestInbox(loop), Stripes(lambda: None)
    inbox.stripes["key"] = there
    mine, its = socket.socketpair()
    served = _Served(its, inbox)
    inbox.add(served)
    mine.sendall(encode_header(OPEN, 0, len(b"stripes key"), []) + b"stripes key")
    served.ready(select.EPOLLIN)
    mine.settimeout(WAIT_TIMEOUT)
    assert mine.recv(1) == b""
    mine.close()
    inbox.close()
    loop.close()


def test_a_connection_whose_answer_cannot_be_taken_breaks_so_that_its_calls_are_sent_again(
    tmp_path: Path,
) -> None:
    """Otherwise the calls on it wait until their deadlines."""
    credentials = credentials_in(tmp_path / "worker", new_token(), "worker", tls=False)
    worker, loop = SocketTransport(tmp_path / "calls", credentials), Loop()
    path = worker.serve(WorkerId("desk", 0, 0), lambda parcel, reply: reply(parcel))
    broken: queue.SimpleQueue[str] = queue.SimpleQueue()
    connection = SocketConnection(UnixAddress.here(path), credentials, loop, broken.put)

    def fail(parcel: Parcel) -> None:
        raise MemoryError("no room")

    connection.call(Parcel(b"x"), fail)
    assert "no room" in broken.get(timeout=WAIT_TIMEOUT)
    loop.close()
    worker.close()


class Crowded(Loop):
    """One for which there is no thread."""

    def add(self, file: File) -> None:
        raise RuntimeError("can't start new thread")


def test_a_connection_that_finds_no_thread_to_read_it_breaks(tmp_path: Path) -> None:
    credentials = credentials_in(tmp_path / "worker", new_token(), "worker", tls=False)
    worker, loop = SocketTransport(tmp_path / "calls", credentials), Crowded()
    path = worker.serve(WorkerId("desk", 0, 0), lambda parcel, reply: reply(parcel))
    broken: queue.SimpleQueue[str] = queue.SimpleQueue()
    SocketConnection(UnixAddress.here(path), credentials, loop, broken.put)
    assert broken.get(timeout=10.0) == "can't start new thread"
    loop.close()
    worker.close()
