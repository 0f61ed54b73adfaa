"""The metrics of workers: one JSON object per line, with its time, its worker and its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unirun.errors import JobError
from unirun.observe.linelog import LineLog, read_lines


class MetricsLog:
    """Appends to a file, which is created with the first values."""

    def __init__(self, path: Path) -> None:
        self._lines = LineLog(path)

    def write(self, role: str, rank: int, time: float, values: Mapping[str, float]) -> None:
        """Append metrics of one worker."""
        self._lines.append({"time": time, "role": role, "rank": rank, "values": dict(values)})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The metrics, the oldest first; none when no worker has reported any.

    An incomplete line is left out. Raises `JobError`.
    """
    try:
        yield from read_lines(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise JobError(f"no metrics can be read from {path}: {error.strerror}") from error
