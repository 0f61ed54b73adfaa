"""Files and directories that appear whole: the one writer of all that is found under a name.

A file is written under a temporary name beside its own, ``.NAME.partial``, and renamed. A process that is killed leaves
the old content or the new one. It may leave the temporary name too, which nobody reads; the next writer removes it.
Where several write at once (`contended`), it removes only those that are a minute old.

A file is for its owner alone, whatever the umask, unless it is written as not `private`, for what users pass on. A
`lasting` file is on the disk before it has its name, and its name before the writer returns: that is for what a later
job goes on from, such as checkpoints. All else describes a running job, which a loss of power ends, and is not synced.

Logs are no such files: they are opened under their names and appended to, so that they can be read while they grow.
"""

from __future__ import annotations

import glob
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"
"""The end of all temporary names. They begin with a dot."""

ABANDONED_SECONDS = 60.0
"""The age from which on a temporary name of a contended file is that of a writer that was killed."""


@contextmanager
def writing(
    path: Path, *, private: bool = True, lasting: bool = False, contended: bool = False
) -> Iterator[BinaryIO]:
    """An open file that gets the name `path` when the block ends, in the place of any other. If the block raises,
    `path` is as before. One process at a time writes a name that is not `contended`. Raises OSError."""
    with _draft(path, os.replace, private=private, lasting=lasting, contended=contended) as file:
        yield file


def replace(
    path: Path,
    content: bytes | str,
    *,
    private: bool = True,
    lasting: bool = False,
    contended: bool = False,
) -> None:
    """Write the file `path` whole, as `writing` does. Raises OSError."""
    with writing(path, private=private, lasting=lasting, contended=contended) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def create(path: Path, content: str) -> bool:
    """Write a lasting file, which any number of processes may try at once. Returns False if it was there. Raises
    OSError."""
    with suppress(FileExistsError):
        with _draft(path, _link, private=True, lasting=True, contended=True) as file:
            file.write(content.encode())
        return True
    return False


@contextmanager
def directory(path: Path, *, private: bool = True, lasting: bool = False) -> Iterator[Path]:
    """A new directory that gets the name `path` when the block ends; it is removed if the block raises. `lasting` is
    for the name: the files in it are lasting or not by themselves. Raises OSError, also if `path` has contents."""
    draft = _draft_of(path)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(0o700 if private else 0o777)
    try:
        if private:
            # The umask may have removed permissions of the owner.
            draft.chmod(0o700)
        yield draft
        draft.rename(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    if lasting:
        sync(path.parent)


@contextmanager
def _draft(
    path: Path, publish: Callable[[Path, Path], None], *, private: bool, lasting: bool, contended: bool
) -> Iterator[BinaryIO]:
    mark = f".{os.urandom(4).hex()}" if contended else ""
    draft = _draft_of(path, mark)
    draft.unlink(missing_ok=True)
    if contended:
        _remove_abandoned(path)
    try:
        with open(draft, "xb", opener=partial(os.open, mode=0o600 if private else 0o666)) as file:
            if private:
                # The umask may have removed permissions of the owner.
                os.fchmod(file.fileno(), 0o600)
            yield file
            file.flush()
            if lasting:
                # A library may have put another file in its place.
                sync(draft)
        publish(draft, path)
    except BaseException:
        # On a full disk it would take space that others need.
        with suppress(OSError):
            draft.unlink()
        raise
    if lasting:
        sync(path.parent)


def remove_draft(path: Path) -> None:
    """Remove the temporary name that a killed writer of `path` has left, if there is one. Raises OSError."""
    _draft_of(path).unlink(missing_ok=True)


def _draft_of(path: Path, mark: str = "") -> Path:
    return path.with_name(f".{path.name}{mark}{PARTIAL}")


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary names that killed writers of a contended file have left."""
    for each in path.parent.glob(f".{glob.escape(path.name)}.*{PARTIAL}"):
        with suppress(FileNotFoundError):
            if time.time() - each.lstat().st_mtime > ABANDONED_SECONDS:
                each.unlink()


def _link(draft: Path, path: Path) -> None:
    os.link(draft, path)
    draft.unlink()


def sync(path: Path) -> None:
    """Have the content of a file, or the names in a directory, on disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
