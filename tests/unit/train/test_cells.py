"""The source of functions that are in no file."""

from __future__ import annotations

import linecache
import traceback
from typing import Any

from unirun.train.task import cell_of, show_cell

SOURCE = "def function():\n    raise KeyError('here')  # the line\n"


def defined(file: str) -> Any:
    names: dict[str, Any] = {}
    exec(compile(SOURCE, file, "exec"), names)  # noqa: S102 - as a notebook does
    return names["function"]


def test_a_traceback_shows_the_line_of_a_cell() -> None:
    function = defined("<cell 1>")
    show_cell(function, SOURCE.splitlines(keepends=True))
    # As the traceback module does before it looks.
    linecache.checkcache()
    assert "".join(cell_of(function)) == SOURCE
    try:
        function()
    except KeyError:
        assert "raise KeyError('here')  # the line" in traceback.format_exc()


def test_a_function_of_a_file_has_none() -> None:
    assert cell_of(defined) == []


def test_nor_has_one_whose_lines_are_not_known() -> None:
    assert cell_of(defined("<stdin>")) == []


def test_nor_has_what_is_not_written_in_python() -> None:
    assert cell_of(len) == []
