"""The live line of the PPO example: each line once, not too often, and the last one always."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest
import report
from hypothesis import given
from hypothesis import strategies as st


class Output(io.StringIO):
    """A terminal, or a file."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@given(st.lists(st.floats(0.0, 2 * report.SECONDS_PER_LINE), max_size=10), st.booleans())
def test_a_line_is_shown_once_unless_a_later_one_takes_its_place(
    seconds: list[float], terminal: bool
) -> None:
    now, last, held = 100.0, -1.0, ""
    expected = list[str]()
    output = Output(terminal)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        patch.setattr(report, "time", SimpleNamespace(monotonic=lambda: now))
        line = report.LiveLine()
        for number, since in enumerate(seconds):
            now += since
            held = str(number)
            line.show(held)
            if now >= last + report.SECONDS_PER_LINE:
                expected, last, held = [*expected, held], now, ""
        line.close()
    expected += [held] * bool(held)
    end = "\r" if terminal else "\n"
    assert output.getvalue() == "".join(each + end for each in expected) + "\n" * terminal
