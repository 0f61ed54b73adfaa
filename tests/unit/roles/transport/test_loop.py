"""The thread that reads: one that waits for something, else the loop's own."""

from __future__ import annotations

import os
import queue
import re
import select
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import ChannelError
from unirun.roles.transport.sockets import (
    PREEMPTED_SECONDS,
    SPIN_PAUSE_SECONDS,
    SPIN_SECONDS,
    Loop,
    Poller,
    RequestInbox,
    SpinningPoll,
)


class OrderConnection:
    """A connection to the inbox: every byte on it is an order."""

    def __init__(self, inbox: RequestInbox) -> None:
        self.caller, self._socket = socket.socketpair()
        self._socket.setblocking(False)
        self.number, self._inbox = self._socket.fileno(), inbox
        self.readers: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
        inbox.add(self)

    def ready(self, events: int) -> None:
        """Put all that has come."""
        data = self._socket.recv(1000)
        self.readers.put(threading.current_thread())
        if data == b"!":
            raise ValueError("a bug")
        for byte in data:
            self._inbox.put(chr(byte))

    def close(self) -> None:
        """Hang up."""
        self._inbox.remove(self)
        self._socket.close()

    def say(self, words: str) -> None:
        """Send as the caller."""
        self.caller.send(words.encode())

    def reader(self) -> threading.Thread:
        """The thread that has read next."""
        return self.readers.get(timeout=WAIT_TIMEOUT)


@pytest.fixture
def loop() -> Iterator[Loop]:
    """One that is closed at the end."""
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def inbox(loop: Loop) -> RequestInbox:
    """One that the loop sees to."""
    inbox = RequestInbox(loop)
    loop.add(inbox)
    return inbox


def test_the_loop_goes_on_after_a_moment_in_which_no_thread_could_be_started(loop: Loop) -> None:
    inbox = RequestInbox(loop)
    # So large a stack has no place.
    before = threading.stack_size(1 << 47)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            loop.add(inbox)
    finally:
        threading.stack_size(before)
    loop.add(RequestInbox(loop))
    connection = OrderConnection(inbox)
    connection.say("x")
    assert connection.readers.get(timeout=10.0).name == "unirun-socket"


class TestARequestInbox:
    def test_the_thread_that_waits_in_an_inbox_reads(self, inbox: RequestInbox) -> None:
        connection, me = OrderConnection(inbox), threading.current_thread()
        for word in "abc":
            # Said while this thread waits, or before.
            later = threading.Timer(0.05, connection.say, [word])
            later.start()
            assert inbox.get() == word
            assert connection.reader() is me
            later.join()

    def test_the_loops_thread_reads_while_nobody_waits(self, inbox: RequestInbox) -> None:
        connection = OrderConnection(inbox)
        for word in "abc":
            connection.say(word)
            assert connection.reader() is not threading.current_thread()
        assert [inbox.get() for _ in range(3)] == ["a", "b", "c"]

    def test_what_came_on_one_line_stays_in_order_whoever_reads(self, inbox: RequestInbox) -> None:
        lines = [OrderConnection(inbox) for _ in range(4)]

        def talk(connection: OrderConnection, name: str) -> None:
            for _ in range(500):
                connection.say(name.lower())
                connection.say(name.upper())

        threads = [
            threading.Thread(target=talk, args=(connection, name))
            for connection, name in zip(lines, "abcd", strict=True)
        ]
        for thread in threads:
            thread.start()
        heard = "".join(inbox.get() for _ in range(4000))
        for thread in threads:
            thread.join(WAIT_TIMEOUT)
        for name in "abcd":
            mine = "".join(word for word in heard if word.lower() == name)
            assert mine == (name + name.upper()) * 500

    def test_another_thread_may_put_something_at_any_time(self, inbox: RequestInbox) -> None:
        for number in range(200):
            threading.Thread(target=inbox.put, args=(number,)).start()
            assert inbox.get() == number

    def test_two_threads_can_make_each_other_work(self, loop: Loop, inbox: RequestInbox) -> None:
        other = RequestInbox(loop)
        loop.add(other)

        def answer() -> None:
            for _ in range(1000):
                other.put(inbox.get() + 1)

        thread = threading.Thread(target=answer)
        thread.start()
        for number in range(1000):
            inbox.put(number)
            assert other.get() == number + 1
        thread.join(WAIT_TIMEOUT)

    def test_a_signal_that_ends_the_wait_leaves_the_reading_to_the_thread(self, inbox: RequestInbox) -> None:
        class Alarm(Exception):
            pass

        def wake(signum: int, frame: FrameType | None) -> None:
            raise Alarm

        before = signal.signal(signal.SIGALRM, wake)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Alarm):
                inbox.get()
        finally:
            signal.signal(signal.SIGALRM, before)
        connection = OrderConnection(inbox)
        connection.say("x")
        assert connection.reader() is not threading.current_thread()
        assert inbox.get() == "x"

    def test_a_bug_ends_its_own_line_only(
        self, inbox: RequestInbox, capsys: pytest.CaptureFixture[str]
    ) -> None:
        bad, good = OrderConnection(inbox), OrderConnection(inbox)
        bad.say("!")
        later = threading.Timer(0.05, good.say, ["a"])
        later.start()
        assert inbox.get() == "a"
        later.join()
        assert bad.caller.recv(1) == b""
        assert "ValueError: a bug" in capsys.readouterr().err

    def test_closing_an_inbox_ends_the_wait_with_an_error(self, loop: Loop, inbox: RequestInbox) -> None:
        told: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def wait() -> None:
            try:
                told.put(inbox.get())
            except ChannelError as error:
                told.put(error)

        connection = OrderConnection(inbox)
        thread = threading.Thread(target=wait)
        thread.start()
        loop.close()
        inbox.close()
        assert isinstance(told.get(timeout=WAIT_TIMEOUT), ChannelError)
        thread.join(WAIT_TIMEOUT)
        assert connection.caller.recv(1) == b""
        with pytest.raises(ChannelError, match="closed"):
            inbox.get()
        with pytest.raises(ChannelError, match="closed"):
            OrderConnection(inbox)


class Polled:
    """A file with the descriptor `number`, which an earlier file may have had."""

    def __init__(self, number: int) -> None:
        self.number = number

    def ready(self, events: int) -> None:
        """It is never called here."""

    def close(self) -> None:
        """Others have its descriptor."""


def wanted_of(poller: Poller) -> dict[int, int]:
    """The events of the files that the kernel polls."""
    told = Path(f"/proc/self/fdinfo/{poller._epoll.fileno()}").read_text()
    found = re.findall(r"tfd: *(\d+) events: *([0-9a-f]+)", told)
    always = select.EPOLLERR | select.EPOLLHUP
    return {int(number): int(events, 16) & ~always for number, events in found}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("add", "remove", "readable", "writable")), st.integers(0, 3), st.booleans()
        ),
        max_size=20,
    )
)
def test_the_kernel_polls_for_what_is_wanted_of_the_files_that_are_there(
    history: list[tuple[str, int, bool]],
) -> None:
    """A file has nothing to say any more when it was removed, also if another one has its descriptor."""
    poller, numbers = Poller(), [os.eventfd(0) for _ in range(2)]
    kinds = {"readable": select.EPOLLIN, "writable": select.EPOLLOUT}
    files, there = [Polled(number) for number in numbers * 2], dict[int, Polled]()
    wanted = wanted_of(poller)
    try:
        for what, which, on in history:
            file = files[which]
            number, known = file.number, there.get(file.number) is file
            if what == "add" and number not in there:
                poller.add(file)
                there[number], wanted[number] = file, select.EPOLLIN
            elif what == "remove":
                poller.remove(file)
                if known:
                    del there[number]
                    wanted.pop(number, None)
            elif what in kinds:
                (poller.readable if what == "readable" else poller.writable)(file, on)
                if known:
                    before = wanted.pop(number, 0)
                    events = before | kinds[what] if on else before & ~kinds[what]
                    wanted |= {number: events} if events else {}
            assert wanted_of(poller) == wanted
    finally:
        poller._release()
        for number in numbers:
            os.close(number)


class Arrival:
    """A poll, and its clock, on which each poll takes `each` seconds. Something arrives at the time `arrives`."""

    def __init__(self) -> None:
        self.now = self.arrives = 0.0
        self.each = 1e-6
        self.slept = False

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        self.now += self.each
        if timeout != 0:
            self.slept = True
            self.now = max(
                self.now, self.arrives if timeout is None else min(self.now + timeout, self.arrives)
            )
        return [(1, 1)] if self.now >= self.arrives else []


class TestASpinningPoll:
    def sleeps(self, *waits: float, timeout: float | None = None) -> list[bool]:
        """For each of these waits, one after the other, True if it sleeps in it."""
        arrival, slept = Arrival(), []
        poll = SpinningPoll(arrival.poll, lambda: arrival.now)
        for wait in waits:
            arrival.arrives, arrival.slept = arrival.now + wait, False
            assert bool(poll(timeout)) == (timeout is None or wait <= timeout)
            slept.append(arrival.slept)
        return slept

    def test_does_not_sleep_after_a_short_wait(self) -> None:
        assert self.sleeps(SPIN_SECONDS / 2, SPIN_SECONDS / 2, SPIN_SECONDS / 2) == [True, False, False]

    def test_sleeps_when_nothing_comes_for_long(self) -> None:
        assert self.sleeps(SPIN_SECONDS / 2, 10 * SPIN_SECONDS) == [True, True]

    def test_sleeps_at_once_after_a_long_wait(self) -> None:
        assert self.sleeps(SPIN_SECONDS / 2, 10 * SPIN_SECONDS, SPIN_SECONDS / 2, SPIN_SECONDS / 2) == [
            True,
            True,
            True,
            False,
        ]

    def test_returns_at_its_timeout(self) -> None:
        assert self.sleeps(10.0, 10.0, timeout=1.0) == [True, True]

    def test_pauses_when_other_threads_have_the_processor(self) -> None:
        """1. It spins. 2. Another thread has the processor between two polls. 3. It sleeps for `SPIN_PAUSE_SECONDS` seconds, however
        short the waits are. 4. It spins again."""
        arrival = Arrival()
        poll = SpinningPoll(arrival.poll, lambda: arrival.now)

        def sleeps() -> bool:
            arrival.arrives, arrival.slept = arrival.now + SPIN_SECONDS / 2, False
            poll(None)
            return arrival.slept

        assert [sleeps(), sleeps()] == [True, False]
        arrival.arrives, arrival.each = arrival.now + 3 * PREEMPTED_SECONDS, 2 * PREEMPTED_SECONDS
        poll(None)
        arrival.each = 1e-6
        assert [sleeps(), sleeps()] == [True, True]
        arrival.now += SPIN_PAUSE_SECONDS
        assert [sleeps(), sleeps()] == [False, False]
