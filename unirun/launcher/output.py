"""A worker's stdout and stderr, which are log files: a full disk loses output, and ends no worker."""

from __future__ import annotations

import errno
import io
import sys
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT)


class LogFile(io.FileIO):
    """A log file whose writes succeed when the disk is full. Lost bytes are counted, and noted when there is room."""

    lost = 0

    def write(self, data: Any) -> int:
        """Write, or lose it. Raises OSError for other reasons than a full disk."""
        try:
            if self.lost:
                super().write(f"\n[unirun: the disk was full, {self.lost} bytes are lost]\n".encode())
                self.lost = 0
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in _FULL:
                raise
            size = memoryview(data).nbytes
            self.lost += size
            return size


def outlast_full_disks() -> None:
    """Let ``sys.stdout`` and ``sys.stderr`` write to their descriptors as a `LogFile`, and be unbuffered as under
    ``python -u``."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        if not isinstance(old, io.TextIOWrapper):
            # The user's site packages have replaced it.
            continue
        old.flush()
        raw = LogFile(number, "wb", closefd=False)
        raw.name = old.name
        fresh = io.TextIOWrapper(
            raw,
            encoding=old.encoding,
            errors=old.errors,
            newline="\n",
            line_buffering=old.line_buffering,
            write_through=True,
        )
        fresh.mode = "w"  # type: ignore[misc]
        setattr(sys, name, fresh)
        setattr(sys, f"__{name}__", fresh)
