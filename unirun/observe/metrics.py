"""What workers have measured: one JSON object a line, with its time, its worker and its values."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from unirun.errors import JobError


class MetricsLog:
    """Appends to a file, which is made with the first values."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def write(self, role: str, rank: int, time: float, values: Mapping[str, float]) -> None:
        """Append the values of one worker. A full disk loses them, not the job."""
        line = json.dumps({"time": time, "role": role, "rank": rank, "values": dict(values)})
        with contextlib.suppress(OSError):
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """What was measured, the oldest first; nothing when no worker has measured anything.

    A line that is not whole (yet, or for want of space) is left out. Raises `JobError`.
    """
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return
    except OSError as error:
        raise JobError(f"no metrics can be read from {path}: {error.strerror}") from error
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue
