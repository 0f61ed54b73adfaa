"""Text from other processes is made printable."""

from __future__ import annotations

import os
import signal
from unicodedata import category

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.launcher.foreground.terminal import _to_null, outlast_user_signals, printable_lines
from unirun.spec.read import printable


class TestPrintable:
    @given(st.text(st.characters()))
    def test_printable_text_is_one_line_of_visible_characters_and_blanks(self, text: str) -> None:
        shown = printable(text)
        assert all(c.isprintable() or category(c) == "Zs" for c in shown)
        shown.encode()
        for line in printable_lines(text):
            assert printable(line.replace("\t", "")) == line.replace("\t", "")

    @pytest.mark.parametrize("text", ["", "plain", "größer 训练 🚀", "5\u202f000 \u00a0%", "\\x1b"])
    def test_printable_text_is_unchanged(self, text: str) -> None:
        assert printable(text) == text

    def test_unprintable_characters_are_escaped_as_python_does(self) -> None:
        assert printable("\x1b[31m\n\t\x9b\u202e\ud800\u2028") == (
            "\\x1b[31m\\n\\t\\x9b\\u202e\\ud800\\u2028"
        )
        assert printable_lines("a\tb\n\x1bc\n") == ["a\tb", "\\x1bc"]


def test_a_stream_that_is_dropped_costs_no_descriptor() -> None:
    source, sink = os.pipe()
    before = os.listdir("/proc/self/fd")
    _to_null(sink)
    assert os.listdir("/proc/self/fd") == before
    assert os.read(source, 1) == b"", "the pipe has no writer any more"
    os.close(sink)
    os.close(source)


def test_signals_to_all_processes_of_a_job_do_nothing_and_ignored_ones_stay_ignored() -> None:
    """A signal that the shell ignores stays ignored, also when the streams are prepared twice."""

    def own(*_: object) -> None:
        pass

    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    try:
        for first, second in ((signal.SIG_IGN, own), (signal.SIG_DFL, signal.SIG_IGN)):
            signal.signal(signal.SIGUSR1, first)
            signal.signal(signal.SIGUSR2, second)
            for _ in range(2):
                outlast_user_signals()
                assert signal.getsignal(signal.SIGUSR2) is second
                assert (signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN) == (first is signal.SIG_IGN)
                os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_a_closed_standard_stream_becomes_one_that_programs_inherit() -> None:
    number = os.dup(0)
    os.close(number)
    _to_null(number)
    assert os.get_inheritable(number)
    assert os.path.samestat(os.fstat(number), os.stat(os.devnull))
    os.close(number)
