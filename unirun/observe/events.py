"""The event log: one JSON object a line, each with its time, its kind and its cause in words."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from unirun.errors import JobError


class EventLog:
    """Appends events to a file."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise JobError(f"the event log {path} cannot be written: {error.strerror}") from error
        self._clock = clock

    def write(self, kind: str, text: str, **fields: Any) -> None:
        """Append one event. A full disk loses the event, not the job: the log is for people."""
        line = json.dumps({"time": round(self._clock(), 6), "kind": kind, "text": text, **fields})
        with contextlib.suppress(OSError):
            self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events in `path`, the oldest first. A line that is not whole (yet, or for want of space) is left out."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise JobError(f"no events can be read from {path}: {error.strerror}") from error
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue
