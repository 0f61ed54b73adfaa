"""Who reads: whoever waits for something to do, else the thread."""

from __future__ import annotations

import queue
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from unirun.errors import ChannelError
from unirun.roles.transport.loop import Desk, Loop

SOON = 10.0


class Line:
    """A connection to the desk: every byte on it is an order."""

    def __init__(self, desk: Desk) -> None:
        self.caller, self._socket = socket.socketpair()
        self._socket.setblocking(False)
        self.number, self._desk = self._socket.fileno(), desk
        self.readers: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
        desk.add(self)

    def ready(self, events: int) -> None:
        """Put all that has come."""
        data = self._socket.recv(1000)
        self.readers.put(threading.current_thread())
        if data == b"!":
            raise ValueError("a bug")
        for byte in data:
            self._desk.put(chr(byte))

    def close(self) -> None:
        """Hang up."""
        self._desk.remove(self)
        self._socket.close()

    def say(self, words: str) -> None:
        """What the caller sends."""
        self.caller.send(words.encode())

    def reader(self) -> threading.Thread:
        """Who has read next."""
        return self.readers.get(timeout=SOON)


@pytest.fixture
def loop() -> Iterator[Loop]:
    """One that is closed at the end."""
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def desk(loop: Loop) -> Desk:
    """One that the loop sees to."""
    desk = Desk(loop)
    loop.add(desk)
    return desk


class TestADesk:
    def test_who_waits_there_reads(self, desk: Desk) -> None:
        line, me = Line(desk), threading.current_thread()
        for word in "abc":
            # Said while this thread waits, or before.
            later = threading.Timer(0.05, line.say, [word])
            later.start()
            assert desk.get() == word
            assert line.reader() is me
            later.join()

    def test_while_nobody_waits_the_thread_reads(self, desk: Desk) -> None:
        line = Line(desk)
        for word in "abc":
            line.say(word)
            assert line.reader() is not threading.current_thread()
        assert [desk.get() for _ in range(3)] == ["a", "b", "c"]

    def test_what_came_on_one_line_stays_in_order_whoever_reads(self, desk: Desk) -> None:
        lines = [Line(desk) for _ in range(4)]

        def talk(line: Line, name: str) -> None:
            for _ in range(500):
                line.say(name.lower())
                line.say(name.upper())

        threads = [
            threading.Thread(target=talk, args=(line, name)) for line, name in zip(lines, "abcd", strict=True)
        ]
        for thread in threads:
            thread.start()
        heard = "".join(desk.get() for _ in range(4000))
        for thread in threads:
            thread.join(SOON)
        for name in "abcd":
            mine = "".join(word for word in heard if word.lower() == name)
            assert mine == (name + name.upper()) * 500

    def test_another_thread_may_put_something_at_any_time(self, desk: Desk) -> None:
        for number in range(200):
            threading.Thread(target=desk.put, args=(number,)).start()
            assert desk.get() == number

    def test_two_threads_can_make_each_other_work(self, loop: Loop, desk: Desk) -> None:
        other = Desk(loop)
        loop.add(other)

        def answer() -> None:
            for _ in range(1000):
                other.put(desk.get() + 1)

        thread = threading.Thread(target=answer)
        thread.start()
        for number in range(1000):
            desk.put(number)
            assert other.get() == number + 1
        thread.join(SOON)

    def test_a_signal_that_ends_the_wait_leaves_the_reading_to_the_thread(self, desk: Desk) -> None:
        class Alarm(Exception):
            pass

        def ring(signum: int, frame: FrameType | None) -> None:
            raise Alarm

        before = signal.signal(signal.SIGALRM, ring)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Alarm):
                desk.get()
        finally:
            signal.signal(signal.SIGALRM, before)
        line = Line(desk)
        line.say("x")
        assert line.reader() is not threading.current_thread()
        assert desk.get() == "x"

    def test_a_bug_ends_its_own_line_only(self, desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
        bad, good = Line(desk), Line(desk)
        bad.say("!")
        later = threading.Timer(0.05, good.say, ["a"])
        later.start()
        assert desk.get() == "a"
        later.join()
        assert bad.caller.recv(1) == b""
        assert "ValueError: a bug" in capsys.readouterr().err

    def test_who_waits_when_it_closes_is_told(self, loop: Loop, desk: Desk) -> None:
        told: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def wait() -> None:
            try:
                told.put(desk.get())
            except ChannelError as error:
                told.put(error)

        line = Line(desk)
        thread = threading.Thread(target=wait)
        thread.start()
        loop.close()
        desk.close()
        assert isinstance(told.get(timeout=SOON), ChannelError)
        thread.join(SOON)
        assert line.caller.recv(1) == b""
        with pytest.raises(ChannelError, match="closed"):
            desk.get()
        with pytest.raises(ChannelError, match="closed"):
            Line(desk)
