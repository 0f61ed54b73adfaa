"""The output of a trainer's workers where the program writes: lines, and a live line for the bar of each rank."""

from __future__ import annotations

import io
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.waiting import WAIT_TIMEOUT
from unirun.train.output import FILE_INTERVAL, MOST, RankOutput, pieces


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class InParts(io.BytesIO):
    """Gives so many bytes at a time, as a pipe does."""

    def __init__(self, data: bytes, size: int) -> None:
        super().__init__(data)
        self._size = size

    def read1(self, size: int | None = -1, /) -> bytes:
        return self.read(self._size)


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


def bar(rank: int, state: str) -> str:
    return f"[worker:{rank}] {state}\r"


@given(st.lists(st.sampled_from(["a", "ü", "\n", "\r"]), max_size=20).map("".join), st.integers(1, 5))
def test_pieces_are_complete_whatever_parts_a_pipe_gives(text: str, size: int) -> None:
    found = [*pieces(InParts(text.encode(), size))]
    assert all(piece.endswith(("\n", "\r")) for piece in found)
    assert "".join(found).removesuffix("\n") == text.removesuffix("\n")


def test_a_state_of_a_bar_does_not_wait_for_the_end_of_its_line() -> None:
    found = pieces(InParts(b" 5%\r 10%\r", 4))
    assert next(found) == " 5%\r"


def test_in_a_file_a_bar_is_a_line_now_and_then_and_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, clock = io.StringIO(), Clock()
    monkeypatch.setattr(sys, "stderr", file)
    output = RankOutput(clock)
    for percent in range(0, 100, 10):
        output.show("stderr", bar(0, f"{percent}%"))
        clock.time += FILE_INTERVAL / 4
    output.show("stderr", "[worker:0] 100%\n")
    clock.time += FILE_INTERVAL
    output.show("stderr", bar(0, "the first state of the next bar"))
    output.show("stderr", bar(1, "2 it/s"))
    output.show("stderr", bar(1, "      "))
    output.close(1.0)
    assert file.getvalue().splitlines() == ["[worker:0] 40%", "[worker:0] 80%", "[worker:0] 100%"]


def test_on_a_terminal_each_rank_has_one_line_below_what_else_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    screen, clock = Terminal(), Clock()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", screen)
    output = RankOutput(clock)
    for percent in (10, 20, 30):
        for rank in range(MOST + 2):
            output.show("stderr", bar(rank, f"{percent}%"))
        clock.time += 1
    drawn = screen.getvalue().rpartition("\x1b[2K")[2]
    assert "\n" in drawn
    shown = [line.strip() for line in drawn.splitlines()]
    assert shown[-1] == "… and 2 more"
    assert len(shown) == MOST + 1
    assert shown[1].startswith("[worker:1] ")
    output.show("stdout", "[worker:1] a line\n")
    assert "[worker:1] a line" in screen.getvalue()
    output.close(1.0)
    assert screen.getvalue().endswith("\x1b[?25h\r\x1b[1A\x1b[2K"), "the cursor is back, and the line empty"
    assert sys.stderr is screen


@pytest.mark.parametrize("end", ["[worker:0] 100%\n", "[worker:0] \r"])
def test_bars_are_drawn_one_after_another(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen, clock = Terminal(), Clock()
    monkeypatch.setattr(sys, "stderr", screen)
    output = RankOutput(clock)
    for name in ("first", "second", "third"):
        clock.time += 1
        output.show("stderr", bar(0, f"{name} 10%"))
        assert f"{name} 10%" in screen.getvalue()
        output.show("stderr", end)
        assert sys.stderr is screen, "no bar is left"
    output.close(1.0)


def test_a_stdout_that_is_a_file_gets_its_lines_while_bars_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen, file = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", file)
    output = RankOutput(Clock())
    output.show("stderr", bar(0, "10%"))
    output.show("stdout", "[worker:0] a line\n")
    output.close(1.0)
    assert file.getvalue() == "[worker:0] a line\n"
    assert "10%" in screen.getvalue()
    assert "a line" not in screen.getvalue()


def test_the_end_does_not_wait_for_a_stream_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    held, free = threading.Event(), threading.Event()

    class Stopped(io.StringIO):
        def write(self, text: str) -> int:
            held.set()
            free.wait(WAIT_TIMEOUT)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Stopped())
    output = RankOutput()
    writer = threading.Thread(target=output.show, args=("stdout", "a line\n"))
    writer.start()
    assert held.wait(WAIT_TIMEOUT)
    output.close(0.01)
    assert writer.is_alive()
    free.set()
    writer.join(WAIT_TIMEOUT)


def test_a_line_that_ends_with_both_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    output = RankOutput()
    for piece in ("one\r", "\n", "two\r\n"):
        output.show("stderr", piece)
    assert file.getvalue().splitlines() == ["one", "two"]
