"""Files that a command writes because a person named them."""

from __future__ import annotations

from pathlib import Path

from unirun.errors import UsageError


def write_file(path: str, text: str) -> None:
    """Write `text` to `path`, in place of what is there. Raises `UsageError` when that cannot be done."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from error
