"""The output of subcommands, printed and written: tables, durations, sizes, files.

Tables are coloured on a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import isfinite, nan
from pathlib import Path

from unirun.errors import UsageError
from unirun.launcher.foreground.terminal import is_screen, printable, say
from unirun.spec.read import as_duration


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print `rows` under `headers`; a word that names a state is coloured on a terminal."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if not is_screen(sys.stdout):
        widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(len(headers))]
        for row in (headers, *rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            say("  ".join(cells).rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from unirun.collocation.graph.svg import coloured

    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*(Text.from_ansi(coloured(cell, cell.partition(" ")[0])) for cell in row))
    Console().print(table)


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
