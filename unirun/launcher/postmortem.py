"""What can be said of a worker that has ended, besides how."""

from __future__ import annotations

import os

TAIL_LINES = 12
TAIL_BYTES = 1 << 14
"""How much of a failed worker's stderr goes into the report."""


def tail_of(path: str) -> str:
    """What tells most at the end of the stderr in `path`; empty when it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return _last_words(file.read().decode(errors="replace"))
    except OSError:
        return ""


def _last_words(text: str) -> str:
    """The stack that faulthandler left, else the last lines."""
    lines = text.splitlines()
    for at in reversed(range(len(lines))):
        if lines[at].startswith("Fatal Python error"):
            here = [n for n in range(at, len(lines)) if lines[n].startswith("Current thread")]
            # Its innermost frame stands first; those of other threads stand before it.
            return "\n".join([lines[at], *lines[here[0] if here else at + 1 :]][:TAIL_LINES])
    return "\n".join(lines[-TAIL_LINES:])
