"""Text from other processes is made printable."""

from __future__ import annotations

import os
from unicodedata import category

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.launcher.foreground.terminal import _to_null, printable_lines
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
