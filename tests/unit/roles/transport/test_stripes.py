"""Stripes of large buffers: what is sent comes whole, in the receiver's memory, or the connection ends."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import FrameError
from unirun.roles.transport import stripes
from unirun.roles.transport.frames import offsets
from unirun.roles.transport.stripes import Stripes, cut

SIZES = [100_000, 1, 0, 3 * stripes.CHUNK + 5]


def memory(size: int) -> memoryview:
    return memoryview(bytearray(os.urandom(size)))


class Ends:
    """A sender and a receiver, with so many connections between them."""

    def __init__(self, count: int) -> None:
        self.arrived: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.sender = Stripes(lambda: self.lost.put("sender"))
        self.receiver = Stripes(lambda: self.lost.put("receiver"))
        self.sockets = [socket.socketpair() for _ in range(count)]
        self.threads = [
            threading.Thread(target=partial(end.run, sock, sends=end is self.sender))
            for pair in self.sockets
            for end, sock in zip((self.sender, self.receiver), pair, strict=True)
        ]

    def run(self) -> None:
        """Use the connections."""
        for thread in self.threads:
            thread.start()
        eventually(lambda: len(self.sender._queues) == len(self.sockets), "all connections are used")

    def send(self, buffers: list[memoryview]) -> int:
        """Send a segment. Returns its number."""
        sizes = [len(each) for each in buffers]
        number = self.sender.send(buffers, sizes, lambda: self.arrived.put("all"))
        assert number is not None
        return number

    def close(self) -> None:
        """End both, and all threads."""
        self.sender.close()
        self.receiver.close()
        for thread in self.threads:
            if thread.ident is not None:
                thread.join(WAIT_TIMEOUT)
                assert not thread.is_alive()


@pytest.fixture(params=[1, 3])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(request.param)
    yield made
    made.close()


@given(st.lists(st.integers(0, 200_000), max_size=5), st.integers(1, 5))
def test_parts_are_the_segment(sizes: list[int], count: int) -> None:
    places, total = offsets(sizes)
    buffers = [memory(size) for size in sizes]
    size = max(-(-total // count), 1)
    parts = [b"".join(part) for part in cut(buffers, size)]
    whole = b"".join(parts)
    assert len(whole) == total
    assert len(parts) <= count
    assert all(len(part) == size for part in parts[:-1])
    assert [whole[place : place + len(each)] for place, each in zip(places, buffers, strict=True)] == buffers


def test_a_segment_comes_as_it_was_sent(ends: Ends) -> None:
    ends.run()
    for _ in range(5):
        buffers = [memory(size) for size in SIZES]
        number = ends.send(buffers)
        assert ends.arrived.get(timeout=WAIT_TIMEOUT) == "all"
        assert list(ends.receiver.take(number, SIZES)) == buffers
    assert ends.arrived.empty()


def test_what_is_kept_may_be_changed(ends: Ends) -> None:
    ends.run()
    buffers = [memory(20 * stripes.CHUNK)]
    before = bytes(buffers[0])
    number = ends.send(buffers)
    ends.sender.keep()
    buffers[0][:] = bytes(len(before))
    assert ends.arrived.get(timeout=WAIT_TIMEOUT) == "all"
    assert [bytes(each) for each in ends.receiver.take(number, [len(before)])] == [before]


def test_without_connections_nothing_is_sent() -> None:
    assert Stripes(lambda: None).send([memory(5)], [5], lambda: None) is None


def test_a_frame_whose_stripes_have_not_come_is_an_error(ends: Ends) -> None:
    ends.run()
    with pytest.raises(FrameError, match="without the 64 bytes of its segment 7"):
        ends.receiver.take(7, [5])
    number = ends.send([memory(100)])
    ends.arrived.get(timeout=WAIT_TIMEOUT)
    with pytest.raises(FrameError, match="without the 64 bytes"):
        ends.receiver.take(number, [5])


def test_a_segment_of_which_a_stripe_is_missing_has_not_come() -> None:
    ends = Ends(1)
    theirs, ours = ends.sockets[0]
    receiving = threading.Thread(target=partial(ends.receiver.run, ours, sends=False))
    receiving.start()
    with theirs:
        theirs.settimeout(WAIT_TIMEOUT)
        theirs.sendall(struct.pack("<QQQQ", 1, 128, 0, 64) + bytes(64))
        assert theirs.recv(1)
        with pytest.raises(FrameError, match="without the 128 bytes of its segment 1"):
            ends.receiver.take(1, [128])
    receiving.join(WAIT_TIMEOUT)
    ends.close()


@pytest.mark.parametrize("stripe", [(1, 100, 90, 20), (1, 100, 0, 101), (1, 1 << 62, 0, 1)])
def test_a_stripe_that_does_not_fit_ends_the_connection(stripe: tuple[int, int, int, int]) -> None:
    ends = Ends(1)
    theirs, ours = ends.sockets[0]
    with contextlib.suppress(OSError):
        theirs.sendall(struct.pack("<QQQQ", *stripe))
    ends.receiver.run(ours, sends=False)
    assert ends.lost.get(timeout=WAIT_TIMEOUT) == "receiver"
    theirs.close()


def test_the_end_of_one_connection_is_told_at_both_ends(ends: Ends) -> None:
    ends.run()
    with contextlib.suppress(OSError):
        ends.sockets[0][0].shutdown(socket.SHUT_RDWR)
    assert ends.lost.get(timeout=WAIT_TIMEOUT) == "receiver"
    ends.send([memory(1000)])
    assert ends.lost.get(timeout=WAIT_TIMEOUT) == "sender"


def test_a_process_has_a_limited_number_of_threads_for_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stripes, "_places", threading.BoundedSemaphore(2))
    gate = threading.Event()

    def wait() -> None:
        gate.wait(WAIT_TIMEOUT)

    assert [stripes.start(wait) for _ in range(3)] == [True, True, False]
    gate.set()
    eventually(lambda: stripes.start(wait), "an ended thread makes room")


def test_stripes_for_which_no_thread_can_be_started_leave_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stripes, "_places", threading.BoundedSemaphore(1))
    # So large a stack has no place.
    before = threading.stack_size(1 << 47)
    try:
        assert not stripes.start(lambda: None)
    finally:
        threading.stack_size(before)
    done = threading.Event()
    assert stripes.start(done.set)
    assert done.wait(WAIT_TIMEOUT)
