"""The latest report on the screen: a table on a terminal and in a notebook, a line elsewhere."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from unirun.errors import UsageError
from unirun.train.callbacks.base import TrainingCallback, flat, number, numbers, text

if TYPE_CHECKING:
    from rich.console import Console, OverflowMethod
    from rich.table import Table

_ITERATION, _SECONDS, _TIMESTAMP = "_training_iteration", "_time_this_iter_s", "_timestamp"
_OURS = frozenset({_ITERATION, _SECONDS, _TIMESTAMP, "_data_wait"})

_ROWS = 8
_DRAW_INTERVAL = 0.1
"""Seconds between two drawings of the table."""

_WIDEST = 24
"""Characters of a metric that is a text."""


class ProgressCallback(TrainingCallback):
    """Shows the latest report: a row per rank (the first 8) with its metrics, the iteration and its seconds.

    `metrics` are the names to show, ``outer/inner`` for those in nested dicts; by default all that are numbers, as many
    as fit. On a terminal and in a notebook the table is redrawn in place, ten times a second at most; the last report
    is always shown. When stdout is no terminal, each report is one line with the metrics of rank 0.

    `console` is where it is shown, by default stdout; `clock` returns seconds, as `time.monotonic` does.
    """

    def __init__(
        self,
        metrics: Sequence[str] | None = None,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if isinstance(metrics, str):
            raise UsageError(f"metrics={metrics!r} is a text, no list", f"write metrics=[{metrics!r}]")
        self._metrics = None if metrics is None else [*metrics]
        self._given, self._clock = console, clock
        self._view: _Lines | _Table | None = None

    def start_training(self, logdir: str, config: Mapping[str, Any]) -> None:
        """Look at where the reports are to be shown."""
        from rich.console import Console

        console = self._given or Console()
        if console.is_jupyter:
            self._view = _Table(console, _Cell(), self._metrics, self._clock)
        elif _is_screen(console):
            self._view = _Table(console, _Screen(console), self._metrics, self._clock)
        else:
            self._view = _Lines(console, self._metrics)

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        """Show the report."""
        assert self._view is not None
        self._view.show(results)

    def finish_training(self, error: BaseException | None) -> None:
        """Show the last report, and leave the table where it is."""
        assert self._view is not None
        self._view.close()


def _is_screen(console: Console) -> bool:
    """Return True if a table can be redrawn in place."""
    isatty = False
    with contextlib.suppress(AttributeError, ValueError):  # no file, or a closed one
        # FORCE_COLOR makes rich say that the log file of a CI is a terminal.
        isatty = console.file.isatty()
    return isatty and console.is_terminal and not console.is_dumb_terminal


class _Lines:
    """A line per report."""

    def __init__(self, console: Console, metrics: list[str] | None) -> None:
        self._console, self._metrics = console, metrics

    def show(self, results: list[dict[str, Any]]) -> None:
        values = flat(results[0])
        names = _numeric(results[0]) if self._metrics is None else self._metrics
        metrics = ", ".join(f"{name} {_shown(values[name])}" for name in names if name in values)
        ranks = f", rank 0 of {len(results)}" if len(results) > 1 else ""
        begin = f"iteration {_shown(values.get(_ITERATION))}{': ' if metrics else ''}{metrics}"
        line = f"{begin} ({_shown(values.get(_SECONDS))} s{ranks})"
        # `out` does not break lines.
        self._console.out(_writable(line, self._console), highlight=False)

    def close(self) -> None:
        pass


class _Table:
    """A table of the latest report, drawn again and again."""

    def __init__(
        self,
        console: Console,
        on: _Cell | _Screen,
        metrics: list[str] | None,
        clock: Callable[[], float],
    ) -> None:
        self._console, self._on, self._clock = console, on, clock
        self._all = metrics is None
        self._names = dict.fromkeys(metrics or ())
        self._drawn_at = -math.inf
        self._waiting: list[dict[str, Any]] | None = None

    def show(self, results: list[dict[str, Any]]) -> None:
        now = self._clock()
        if now - self._drawn_at < _DRAW_INTERVAL:
            self._waiting = results
            return
        self._drawn_at, self._waiting = now, None
        self._on.draw(self._table(results))

    def close(self) -> None:
        try:
            if self._waiting is not None:
                self._on.draw(self._table(self._waiting))
        finally:
            self._on.close()

    def _table(self, results: list[dict[str, Any]]) -> Table:
        shown = results[:_ROWS]
        if self._all:
            # A metric that is not in each report keeps its column.
            for result in shown:
                self._names |= dict.fromkeys(_numeric(result))
        values = [flat(result) for result in shown]
        ranks = _Column("rank", [str(rank) for rank in range(len(shown))])
        iterations = self._column("iteration", _ITERATION, values)
        seconds = self._column("seconds", _SECONDS, values)
        metrics = [self._column(name, name, values) for name in self._names]
        fit = _fitting(metrics, self._console.width - sum(map(_width, (ranks, iterations, seconds))))
        left_out = [_more(len(results) - len(shown), "rank"), _more(len(metrics) - fit, "metric")]
        caption = [_writable(line, self._console) for line in left_out if line]
        return _drawn([ranks, iterations, *metrics[:fit], seconds], "\n".join(caption), self._console)

    def _column(self, header: str, name: str, values: list[dict[str, Any]]) -> _Column:
        cells = [_writable(_shown(value.get(name)), self._console) for value in values]
        return _Column(_writable(header, self._console), cells)


class _Screen:
    """A terminal. What is printed meanwhile goes above the table."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._live = Live(console=console, auto_refresh=False)

    def draw(self, table: Table) -> None:
        self._live.start()
        self._live.update(table, refresh=True)

    def close(self) -> None:
        self._live.stop()


class _Cell:
    """The output of a notebook's cell. rich's own live display would need ipywidgets."""

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, table: Table) -> None:
        if self._handle is None:
            display = importlib.import_module("IPython.display").display
            self._handle = display(table, display_id=True)
        else:
            self._handle.update(table)

    def close(self) -> None:
        pass


class _Column(NamedTuple):
    header: str
    cells: list[str]


def _width(column: _Column) -> int:
    """Characters on the screen, with the space to the next column."""
    from rich.cells import cell_len

    return max(map(cell_len, (column.header, *column.cells))) + 2


def _fitting(columns: list[_Column], width: int) -> int:
    """The number of `columns` that fit into `width` characters, but one at least."""
    widths = itertools.accumulate(map(_width, columns))
    return max(sum(each <= width for each in widths), 1)


def _more(number: int, name: str) -> str:
    return f"… and {number} more {name}{'s' if number > 1 else ''}" if number > 0 else ""


def _drawn(columns: list[_Column], caption: str, console: Console) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", caption_style="dim", caption_justify="left")
    # An ellipsis cannot be written on every terminal.
    overflow: OverflowMethod = "crop" if console.options.ascii_only else "ellipsis"
    # Texts, as square brackets in a plain string are markup.
    for column in columns:
        table.add_column(Text(column.header), justify="right", overflow=overflow, no_wrap=True)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, row))
    table.caption = Text(caption) if caption else None
    return table


def _numeric(result: Mapping[str, Any]) -> list[str]:
    """The names of the metrics that are numbers, without unirun's own."""
    return [name for name in numbers(result) if name not in _OURS]


def _shown(value: object) -> str:
    """`value` in a cell: a number with 4 significant digits, a count as it is, a text in part."""
    found = number(value)
    if isinstance(found, int) and abs(found) < 10**9:
        return str(found)
    if found is not None:
        return f"{found:.4g}"
    words = "" if value is None else text(value)
    return words if len(words) <= _WIDEST else f"{words[: _WIDEST - 1]}…"


def _writable(shown: str, console: Console) -> str:
    """`shown` with all escaped that breaks the line, moves the cursor, or is not in the encoding of the terminal."""
    printable = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in shown)
    return printable.encode(console.encoding, "backslashreplace").decode(console.encoding)
