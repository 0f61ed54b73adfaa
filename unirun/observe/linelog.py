"""A log with one JSON object per line, which survives a full disk."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from unirun.observe.ownership import read_file


class LineLog:
    """Appends to the file at `path`, which is created with the first line.

    On a full disk lines are lost, and no error is raised: the log is for people. A line that was written in part stays
    on a line of its own.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._cut = False

    def open(self) -> None:
        """Open the file now. Raises OSError."""
        if self._file is None:
            file = self._path.open("a+b", buffering=0)
            if file.seek(0, os.SEEK_END) > 0:
                file.seek(-1, os.SEEK_END)
                self._cut = file.read(1) != b"\n"
            self._file = file

    def append(self, value: Mapping[str, Any]) -> None:
        """Write one object."""
        line = json.dumps(value).encode() + b"\n"
        with contextlib.suppress(OSError):
            self.open()
            assert self._file is not None
            if self._cut:
                line = b"\n" + line
            written = self._file.write(line)
            # A disk that is almost full takes a part of the line.
            if written:
                self._cut = written < len(line)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in `path`, the oldest first. A line that is incomplete, or nested too deeply, is left out.

    Raises OSError.
    """
    for line in read_file(path).splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            yield json.loads(line)
