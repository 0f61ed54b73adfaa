"""The directory of a trainer: ``run_001``, ``run_002``, … with what each run keeps. It may be a URL."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import fsspec

from unirun.errors import UsageError


def check_writable(url: str) -> None:
    """Raise `UsageError` when nothing can be written below `url`. What is elsewhere is known when it is written."""
    if "://" in url:
        try:
            fsspec.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UsageError(
                f"logdir {url} cannot be used: {error}", "see fsspec for what it needs"
            ) from error
        return
    try:
        Path(url).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=url):
            pass
    except OSError as error:
        raise UsageError(f"logdir {url} cannot be written: {error.strerror}", "give another one") from error


def next_run(logdir: str) -> tuple[str, str]:
    """Where the next run keeps what it writes, and where its callbacks do: in the same place, or in a directory of this
    host if that is elsewhere. On a file system no two trainers get the same. Raises OSError."""
    files, root = fsspec.url_to_fs(logdir)
    found = files.ls(root, detail=False, refresh=True) if files.exists(root) else []
    names = (str(path).rstrip("/").rpartition("/")[2] for path in found)
    number = max((int(name[4:]) for name in names if re.fullmatch(r"run_\d{3,}", name)), default=0) + 1
    while True:
        url = f"{logdir.rstrip('/')}/run_{number:03}"
        if "://" in logdir:
            return url, tempfile.mkdtemp(prefix="unirun-run-")
        try:
            Path(url).mkdir()
            return url, url
        except FileExistsError:
            number += 1
