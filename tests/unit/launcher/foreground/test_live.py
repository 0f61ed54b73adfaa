"""The live line leaves no trace and erases nothing else."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.launcher.foreground.screen import Screen
from tests.waiting import WAIT_TIMEOUT
from unirun.launcher.foreground.console import Console, LiveLine

SIZES = pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (1, 1)])
TEXT = "3.6 s  actor 0/4  rollout 0/4  critic 0/4  reward 0/16  importing torch and two more modules"


class Shown:
    """A live line on a screen."""

    def __init__(self, width: int, height: int, *, reflow: bool = True) -> None:
        self.screen, self.live = Screen(width, height, reflow=reflow), LiveLine()
        self.told = width
        """The width that the program knows, which may be outdated."""

    def replace(self, text: str) -> None:
        self.screen.feed(self.live.replace(text, self.told).encode())

    def write(self, text: str, *, own_row: bool = False) -> None:
        before = self.live.before() + (self.live.new_row if own_row else "")
        data = text.encode()
        self.screen.feed(before.encode() + data.replace(b"\n", b"\r\n"))
        self.screen.feed(self.live.after(data, self.told).encode())

    def resize(self, width: int, height: int) -> None:
        self.screen.resize(width, height)
        self.told = width


class TestALiveLine:
    @SIZES
    def test_a_live_line_is_one_row_however_long_its_text(self, width: int, height: int) -> None:
        shown = Shown(width, height)
        for second in range(16):
            shown.replace(f"{second} {TEXT}")
        (line,) = shown.screen.lines()
        assert line.startswith("15 " if width > 3 else "…")
        assert len(line) < max(width, 2)
        shown.replace("")
        assert shown.screen.lines() == []

    @SIZES
    def test_a_live_line_stays_below_workers_output(self, width: int, height: int) -> None:
        shown = Shown(width, height)
        long = "x" * 100
        for text in ("one\n", f"{long}\n", "two\nthree\n"):
            shown.replace(TEXT)
            shown.write(text)
            assert len(shown.screen.lines()[-1]) < max(width, 2), "the live line"
        shown.replace("")
        assert shown.screen.lines() == ["one", long, "two", "three"]

    def test_a_live_line_leaves_its_row_to_a_progress_bar(self) -> None:
        shown = Shown(80, 24)
        shown.replace(TEXT)
        shown.write("10%\r")
        shown.replace(f"4 {TEXT}")
        assert shown.screen.lines() == ["10%"]
        shown.write("20%\n")
        assert shown.screen.lines()[0] == "20%"
        assert shown.screen.lines()[1].startswith("4 3.6 s")

    def test_a_live_line_leaves_its_row_to_a_prompt(self) -> None:
        shown = Shown(40, 10)
        shown.replace("1 s")
        shown.write("name? ")
        shown.replace("2 s")
        assert shown.screen.lines() == ["name?"]
        shown.write("bob\n")
        assert shown.screen.lines() == ["name? bob", "2 s"]

    def test_a_live_line_and_notes_do_not_begin_on_a_progress_bar(self) -> None:
        shown = Shown(80, 24)
        shown.write("a long bar of a worker ####\r")
        shown.write("unirun: short\n", own_row=True)
        assert shown.screen.lines() == ["a long bar of a worker ####", "unirun: short"]

    @pytest.mark.parametrize("reflow", [True, False])
    def test_a_live_line_leaves_no_copy_when_the_window_is_resized(self, reflow: bool) -> None:
        shown = Shown(80, 24, reflow=reflow)
        shown.write("above\n")
        for width in (60, 40, 30, 100, 20, 80):
            shown.replace(f"{width} {TEXT}")
            shown.resize(width, 24)
            shown.replace(f"{width} again {TEXT}")
            assert [line[:2] for line in shown.screen.lines()] == ["ab", str(width)[:2]]
        shown.replace("")
        assert shown.screen.lines() == ["above"]

    def test_a_live_line_leaves_no_copy_on_a_terminal_narrower_than_reported(self) -> None:
        shown = Shown(80, 24)
        shown.write("above\n")
        shown.screen.resize(30, 10)
        for second in range(5):
            shown.replace(f"{second} {TEXT}")
        assert len(shown.screen.lines()) == 2
        shown.write("below\n")
        shown.replace("")
        assert shown.screen.lines() == ["above", "below"]

    def test_a_live_line_is_not_drawn_without_room_or_permission(self) -> None:
        shown = Shown(80, 24)
        shown.told = 0
        shown.replace(TEXT)
        assert shown.screen.lines() == []

    @given(
        st.lists(
            st.one_of(
                st.tuples(st.just("write"), st.text(st.characters(codec="ascii", categories=["L"]))),
                st.tuples(st.just("live"), st.sampled_from(["", "short", TEXT])),
                st.tuples(st.just("resize"), st.integers(1, 120)),
                st.tuples(st.just("late"), st.integers(1, 120)),
            ),
            max_size=30,
        )
    )
    def test_a_live_line_leaves_only_workers_output_after_any_history(
        self, history: list[tuple[str, str | int]]
    ) -> None:
        shown = Shown(80, 24)
        written = ["start"]
        shown.write("start\n")
        for what, value in history:
            if what == "write":
                shown.write(f"{value}|\n")
                written.append(f"{value}|")
            elif what == "live":
                shown.replace(str(value))
            elif what == "late":
                shown.screen.resize(int(value), 24)
            else:
                shown.resize(int(value), 24)
        shown.replace("")
        assert shown.screen.lines() == written


class Window:
    """A terminal with a program's stdout and stderr."""

    def __init__(self, width: int, height: int) -> None:
        self.screen = Screen(width, height)
        self._ours, theirs = os.openpty()
        self.stream = os.fdopen(theirs, "w", encoding="utf-8")
        self.raw = b""
        self._changed = threading.Condition()
        self.resize(width, height)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def resize(self, width: int, height: int) -> None:
        with self._changed:
            self.screen.resize(width, height)
            fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def await_lines(self, look: Callable[[list[str]], bool]) -> list[str]:
        """Wait until `look` accepts what is shown, and return it."""
        end = time.monotonic() + WAIT_TIMEOUT
        with self._changed:
            while not look(lines := self.screen.lines()):
                assert self._changed.wait(end - time.monotonic()), lines
            return lines

    def close(self) -> None:
        self.stream.close()
        self._reader.join(WAIT_TIMEOUT)
        os.close(self._ours)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 1 << 16)
            except OSError:
                return
            with self._changed:
                self.raw += data
                self.screen.feed(data)
                self._changed.notify_all()


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> Iterator[Window]:
    """A terminal of 80 × 24."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    made = Window(80, 24)
    yield made
    made.close()


@pytest.fixture
def console(window: Window) -> Iterator[Console]:
    """A console on that terminal."""
    made = Console(quiet=False, out=window.stream, err=window.stream)
    yield made
    made.close(20.0)


class TestTheConsoleOnATerminal:
    def test_the_console_keeps_the_live_line_below_lines_and_notes(
        self, window: Window, console: Console
    ) -> None:
        assert console.colour
        console.live(TEXT)
        window.await_lines(lambda lines: lines != [])
        console.lines(1, b"[a] ", b"one\n" + b"x" * 200 + b"\ncut off")
        console.lines(2, b"[a] ", b"err\n")
        console.note("note")
        console.live("now")
        expected = ["[a] one", "[a] " + "x" * 200, "[a] cut off", "[a] err", "unirun: note"]
        assert window.await_lines(lambda lines: lines[-1:] == ["now"]) == [*expected, "now"]
        window.resize(40, 10)
        console.live(TEXT)
        window.await_lines(lambda lines: lines[-1].endswith("…"))
        console.live("")
        assert window.await_lines(lambda lines: len(lines) == 5) == expected

    def test_a_quiet_console_has_no_live_line(self, window: Window) -> None:
        console = Console(quiet=True, out=window.stream, err=window.stream)
        console.live(TEXT)
        console.error("bad")
        console.close(20.0)
        assert window.await_lines(bool) == ["unirun: bad"]
        assert b"\x1b" not in window.raw

    def test_the_console_is_plain_on_a_dumb_terminal(
        self, window: Window, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TERM", "dumb")
        console = Console(quiet=False, out=window.stream, err=window.stream)
        assert not console.colour
        console.live(TEXT)
        console.note("note")
        console.close(20.0)
        assert window.await_lines(bool) == ["unirun: note"]
        assert b"\x1b" not in window.raw

    def test_the_console_has_a_live_line_without_colours_with_no_color(
        self, window: Window, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NO_COLOR", "1")
        console = Console(quiet=False, out=window.stream, err=window.stream)
        assert not console.colour
        console.live(TEXT)
        window.await_lines(bool)
        console.live("")
        window.await_lines(lambda lines: not lines)
        console.close(20.0)

    def test_the_console_has_no_live_line_when_another_program_reads_its_output(self, window: Window) -> None:
        reader, writer = os.pipe()
        with os.fdopen(writer, "w") as pipe:
            console = Console(quiet=False, out=pipe, err=window.stream)
            console.live(TEXT)
            console.note("note")
            console.close(20.0)
        os.close(reader)
        assert window.await_lines(bool) == ["unirun: note"]

    def test_the_console_escapes_control_characters_in_reports(
        self, window: Window, console: Console
    ) -> None:
        console.error("ValueError: \x1b[2J\x1b]0;title\x07 \ud800\n\tat\x9b31m")
        shown = window.await_lines(lambda lines: len(lines) == 2)
        assert shown == [
            "unirun: ValueError: \\x1b[2J\\x1b]0;title\\x07 \\ud800",
            "unirun: \tat\\x9b31m".expandtabs(8),
        ]
