"""The output of subcommands, printed and written: tables, durations, sizes, files.

Tables fit the screen, and are coloured on a terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import isfinite, nan
from pathlib import Path
from textwrap import wrap
from unicodedata import east_asian_width

from unirun.collocation.graph.svg import coloured
from unirun.errors import UsageError
from unirun.launcher.foreground.terminal import columns, in_colour, say
from unirun.spec.read import as_duration, printable
from unirun.values import natural

LEAST = 20
"""The fewest columns that a screen is taken to have."""


def screen_width() -> int | None:
    """The columns of the screen: $COLUMNS, or those of the terminal; None when another program reads."""
    if told := natural(os.environ.get("COLUMNS", "")):
        return max(told, LEAST)
    return max(columns(sys.stdout.fileno()), LEAST) if sys.stdout.isatty() else None


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print `rows` under `headers`, no wider than the screen; a word that names a state is coloured on a terminal."""
    for line in table_lines(headers, rows, screen_width(), in_colours=in_colour(sys.stdout)):
        # Its cells are printable.
        sys.stdout.write(f"{line}\n")


def table_lines(
    headers: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, *, in_colours: bool = False
) -> Iterator[str]:
    """The lines of a table that is at most `width` wide (None: any width). The last columns, as far as they do not fit
    beside the others, are below each row, with their headers."""
    rows = [[printable(cell) for cell in row] for row in rows]
    sizes = [max(_size(row[i]) for row in (headers, *rows)) for i in range(len(headers))]
    ends = accumulate(size + 2 for size in sizes)
    beside = max(sum(width is None or end - 2 <= width for end in ends), 1)
    for row in (headers, *rows):
        cells = [
            f"{cell}{' ' * (size - _size(cell))}" for cell, size in zip(row[:beside], sizes, strict=False)
        ]
        cells[-1] = cells[-1].rstrip()
        coloured_cells = [coloured(cell, cell.partition(" ")[0]) for cell in cells] if in_colours else cells
        yield "  ".join(coloured_cells).rstrip()
        for header, cell in zip(headers[beside:], row[beside:], strict=True):
            if row is not headers and cell:
                yield from folded(f"    {header} {cell}", width or 0, "      ")


def tell(text: str) -> None:
    """Print a text, folded as the screen is wide."""
    for line in folded(printable(text), screen_width() or 0):
        say(line)


_FILLER = "\0"
"""A character that no printed text has."""


def folded(text: str, width: int, indent: str = "  ") -> list[str]:
    """The lines of `text`, none wider than `width` if its words allow it (0: any width); all but the first begin with
    `indent`."""
    if not width or _size(text) <= width:
        return [text]
    # As many characters as each takes columns.
    spread = "".join(each + _FILLER * (_size(each) - 1) for each in text)
    lines = wrap(spread, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return [line.replace(_FILLER, "") for line in lines]


def _size(text: str) -> int:
    """The columns that `text` takes on a screen."""
    return len(text) if text.isascii() else sum(1 + (east_asian_width(each) in "WF") for each in text)


def duration(option: str, text: str) -> float:
    """The seconds of ``30m``, ``12h``, ``7d``. Raises `UsageError`, which names the option."""
    seconds = as_duration(text) if text[-1:].isalpha() else nan
    if not isfinite(seconds):
        raise UsageError(f"{option} {text!r} is no duration", "for example 90s, 30m, 12h, 7d or 2w")
    return seconds


def age(seconds: float) -> str:
    """A duration as people read it: 8 s, 3 min 5 s, 2 h 40 min, 5 d 3 h."""
    whole = int(max(seconds, 0))
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {name}"
    return f"{whole} s"


def megabytes(size: int | None) -> str:
    """A size in MB; nothing when it is not known."""
    return "" if size is None else f"{size / 1e6:.0f} MB"


def write_file(path: str, text: str) -> None:
    """Write `text` to the file that the user named. Raises `UsageError` when that is not possible."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from error
