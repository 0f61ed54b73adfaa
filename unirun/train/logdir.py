"""The directory of a trainer: ``run_001``, ``run_002``, … with what each run keeps. It may be a URL."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from pathlib import Path

import fsspec

from unirun.errors import UsageError
from unirun.observe.ownership import exposure, make_private


def absolute(url: str) -> str:
    """A path as users write it, also with ``file://``, as an absolute one. Any other URL stays as it is."""
    scheme, separator, path = url.partition("://")
    if separator and scheme != "file":
        return url
    return os.path.abspath(os.path.expanduser(path if separator else url))


def check_writable(url: str) -> None:
    """Raise `UsageError` when nothing can be written below `url`, and when another user could replace its
    files: runs read their checkpoints again, which are pickles. Errors of other file systems are only known
    when something is written there."""
    if "://" in url:
        try:
            fsspec.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UsageError(
                f"logdir {url} cannot be used: {error}", "see fsspec for what it needs"
            ) from error
        return
    try:
        make_private(Path(url))
        exposed = exposure(Path(url))
        if exposed is not None:
            raise UsageError(f"logdir {url} is not safe: {exposed.problem}", exposed.remedy)
        with tempfile.TemporaryFile(dir=url):
            pass
    except OSError as error:
        raise UsageError(f"logdir {url} cannot be written: {error.strerror}", "give another one") from error


def next_run(logdir: str) -> tuple[str, str]:
    """The folder of the next run, and that of its callbacks: in the same place, or in a directory of this
    host if that is elsewhere. No two trainers get the same. Raises OSError."""
    files, root = fsspec.url_to_fs(logdir)
    found = files.ls(root, detail=False, refresh=True) if files.exists(root) else []
    names = (str(path).rstrip("/").rpartition("/")[2] for path in found)
    runs = (re.fullmatch(r"run_(\d{3,})(-[0-9a-f]{8})?", name) for name in names)
    number = max((int(run[1]) for run in runs if run is not None), default=0) + 1
    while True:
        url = f"{logdir.rstrip('/')}/run_{number:03}"
        if "://" in logdir:
            # Most stores cannot make a directory only if there is none.
            return f"{url}-{secrets.token_hex(4)}", tempfile.mkdtemp(prefix="unirun-run-")
        try:
            Path(url).mkdir(0o700)
            # The umask may have removed permissions of the owner.
            Path(url).chmod(0o700)
            return url, url
        except FileExistsError:
            number += 1
