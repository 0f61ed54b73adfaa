"""Tables of commands: as wide as the screen, whatever is in them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.cli.output import age, folded, screen_width, table_lines

HEADERS = ("WORKER", "STATE", "CAUSE")
ROWS = (("actor:0", "running", ""), ("actor:10", "exit code 1", "the wrong shape: (3, 4), not (3, 4, 5)"))


def test_a_table_is_as_wide_as_its_cells() -> None:
    assert [*table_lines(HEADERS, ROWS, None)] == [
        "WORKER    STATE        CAUSE",
        "actor:0   running",
        "actor:10  exit code 1  the wrong shape: (3, 4), not (3, 4, 5)",
    ]
    assert [*table_lines(HEADERS, ROWS, 100)] == [*table_lines(HEADERS, ROWS, None)]


def test_columns_that_do_not_fit_are_below_their_row() -> None:
    assert [*table_lines(HEADERS, ROWS, 40)] == [
        "WORKER    STATE",
        "actor:0   running",
        "actor:10  exit code 1",
        "    CAUSE the wrong shape: (3, 4), not",
        "      (3, 4, 5)",
    ]


def test_a_table_that_fits_to_the_column_is_not_folded() -> None:
    whole = [*table_lines(HEADERS, ROWS, None)]
    width = max(map(len, whole))
    assert [*table_lines(HEADERS, ROWS, width)] == whole
    assert len([*table_lines(HEADERS, ROWS, width - 1)]) > len(whole)


@given(
    st.lists(st.tuples(*[st.text(st.sampled_from("ab "), max_size=30)] * 3), max_size=5), st.integers(40, 90)
)
def test_a_table_is_no_wider_than_the_screen(rows: list[tuple[str, ...]], width: int) -> None:
    lines = [*table_lines(HEADERS, rows, width)]
    assert max(map(len, lines)) <= width
    assert len(lines) >= 1 + len(rows)


def test_characters_that_take_two_columns_are_counted_so() -> None:
    assert [*table_lines(("A", "B"), [("日本", "1"), ("abcd", "2")], None)][1:] == ["日本  1", "abcd  2"]


def test_texts_with_characters_that_take_two_columns_are_folded_by_their_columns() -> None:
    assert folded("訓練 失敗 訓練 ok", 10) == ["訓練 失敗", "  訓練 ok"]


def test_states_are_coloured_with_their_room() -> None:
    header, row, _ = table_lines(HEADERS, ROWS, None, in_colours=True)
    assert "\x1b[" not in header
    assert "\x1b[" in row
    assert "running" in row


def test_words_are_kept_whole_where_they_are_longer_than_the_screen() -> None:
    path = "/" + "long/" * 20
    assert folded(f"logs: {path}", 40) == ["logs:", f"  {path}"]
    assert folded("short", 0) == ["short"]


def test_the_width_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert screen_width() is None, "a program reads"
    for text, width in (("80", 80), ("1", 20), ("0", None), ("wide", None)):
        monkeypatch.setenv("COLUMNS", text)
        assert screen_width() == width


SECONDS = {"d": 86400, "h": 3600, "min": 60, "s": 1}


@given(st.floats(-10, 1e8))
def test_an_age_is_what_it_says_but_for_less_than_its_smallest_unit(seconds: float) -> None:
    words = age(seconds).split()
    parts = [(int(number), SECONDS[unit]) for number, unit in zip(words[::2], words[1::2], strict=True)]
    assert 0 <= max(seconds, 0) - sum(number * unit for number, unit in parts) < parts[-1][1]
    assert all(number < larger // unit for (_, larger), (number, unit) in pairwise(parts))
