"""Unix socket addresses of any length.

The kernel takes 107 bytes at most. A longer path is reached through a descriptor of its directory, so a
job directory may lie as deep as the user likes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIMIT = 107


@contextmanager
def unix_address(path: str | Path) -> Iterator[str]:
    """A string that names `path` for ``bind`` and ``connect`` as long as the context lasts."""
    text = os.fspath(path)
    if len(os.fsencode(text)) <= _LIMIT:
        yield text
        return
    directory, name = os.path.split(text)
    handle = os.open(directory or ".", os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{name}"
    finally:
        os.close(handle)
