"""A log of JSON objects, one a line, that a full disk cannot break."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO


class LineLog:
    """Appends to the file at `path`, which is made with the first line.

    A full disk loses lines, not the job: the log is for people. Of a line that was cut off, here or by the end of
    another process, the beginning stays on a line of its own.
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
    """The objects in `path`, the oldest first. A line that is not whole (yet, or for want of space) is left out.

    Raises OSError.
    """
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)
