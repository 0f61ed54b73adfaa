"""The source of a function that is in no file, as in a cell of a notebook: so that tracebacks of workers show it."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unirun.values import Value


class Cell(Value):
    """The lines of what Python compiled under the name `file`."""

    file: str
    lines: tuple[str, ...]

    def show(self) -> None:
        """Have tracebacks of this process show these lines."""
        size = sum(map(len, self.lines))
        linecache.cache[self.file] = (size, None, [*self.lines], self.file)


def cell_of(function: Callable[..., Any]) -> Cell | None:
    """The cell in which a function is defined; None for one in a file, and when its lines are not known."""
    code = getattr(function, "__code__", None)
    if code is None or Path(code.co_filename).exists():
        return None
    lines = linecache.getlines(code.co_filename)
    return Cell(code.co_filename, tuple(lines)) if lines else None
