"""The log directory of a job: private, unless the directory that the user named is shared with its group.

Directories are made 0700 and files 0600, whatever the umask. Below a ``--log-dir`` with the setgid bit, which is how a
directory is shared with a group, the group may read what it may read there (2750 and 0640). Others never may.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from unirun.errors import JobError
from unirun.rendezvous.ownership import make_private

MARK = ".unirun"
"""A file in a directory below ``--log-dir``: what lies there is ours, and a later run may replace it. It holds the uid
of the job whose logs they are."""

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def make_log_dir(target: Path, uid: str) -> None:
    """Make `target` for the job `uid`; the logs that an earlier job has left there are removed.

    Raises OSError, and `JobError` when something else lies there.
    """
    if target.is_dir() and any(target.iterdir()) and not (target / MARK).exists():
        raise JobError(
            f"{target} is not empty and holds no logs of unirun", "choose another --log-dir or --rdzv-id"
        )
    shutil.rmtree(target, ignore_errors=True)
    make_private(target.parent)
    folder = os.open(target.parent, _FOLDER)
    try:
        os.close(_make(folder, target.name))
    finally:
        os.close(folder)
    with os.fdopen(open_log(target, Path(MARK)), "w") as file:
        file.write(uid)


def open_log(base: Path, name: Path) -> int:
    """A descriptor to append to the file `name` below the directory `base`; what is missing of it is made.

    No symbolic link below `base` is followed: where others may write the directory that the user has named, they could
    point one at any file of ours. Raises OSError.
    """
    folder = os.open(base, _FOLDER)
    try:
        for part in name.parent.parts:
            below = _enter(folder, part)
            os.close(folder)
            folder = below
        rights = _rights(folder) & 0o660
        return _with_rights(os.open(name.name, _APPEND, rights, dir_fd=folder), rights)
    finally:
        os.close(folder)


def _enter(folder: int, name: str) -> int:
    """A descriptor of the directory `name` in the one behind `folder`; it is made if it is missing."""
    try:
        return _make(folder, name)
    except FileExistsError:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def _make(folder: int, name: str) -> int:
    """The same for one that is new. Raises FileExistsError."""
    rights = _rights(folder)
    os.mkdir(name, rights, dir_fd=folder)
    return _with_rights(os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder), rights)


def _rights(folder: int) -> int:
    """The mode of a new directory in the one behind `folder`."""
    mode = os.fstat(folder).st_mode
    return 0o700 | (mode & 0o050 if mode & stat.S_ISGID else 0)


def _with_rights(handle: int, rights: int) -> int:
    """`handle`, after giving back what the umask has taken of `rights`."""
    try:
        mode = os.fstat(handle).st_mode
        if mode & rights != rights:
            os.fchmod(handle, stat.S_IMODE(mode) | rights)
    except BaseException:
        os.close(handle)
        raise
    return handle
