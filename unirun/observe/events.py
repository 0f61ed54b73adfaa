"""The event log: one JSON object a line, each with its time, its kind and its cause in words."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from unirun.errors import JobError
from unirun.observe.linelog import LineLog, read_lines


class EventLog:
    """Appends events to a file. Raises `JobError` when it cannot be opened."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._lines = LineLog(path)
        try:
            self._lines.open()
        except OSError as error:
            raise JobError(f"the event log {path} cannot be written: {error.strerror}") from error
        self._clock = clock

    def write(self, kind: str, text: str, **fields: Any) -> None:
        """Append one event."""
        self._lines.append({"time": round(self._clock(), 6), "kind": kind, "text": text, **fields})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events in `path`, the oldest first. A line that is not whole (yet, or for want of space) is left out."""
    try:
        yield from read_lines(path)
    except OSError as error:
        raise JobError(f"no events can be read from {path}: {error.strerror}") from error
