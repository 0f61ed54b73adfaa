"""The log directory of a job: private, unless the directory that the user named is shared with its group.

Directories are created 0700 and files 0600, whatever the umask. Below a ``--log-dir`` with the setgid bit, the usual
way to share a directory with a group, they inherit its group's permission to read (2750 and 0640). Others have none.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from unirun.errors import JobError
from unirun.observe.ownership import make_private

MARK = ".unirun"
"""A file that marks a directory below ``--log-dir`` as unirun's, so that a later run may replace it. It holds the uid
of the job."""

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def make_log_dir(target: Path, uid: str) -> None:
    """Create `target` for the job `uid`; logs of an earlier job there are removed.

    Raises OSError, and `JobError` when the directory has other contents.
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
    """Open the file `name` below the directory `base` for appending, creating missing parts. Returns the descriptor.

    Symbolic links below `base` are not followed: a user who may write the directory could point one at any file of
    ours. Raises OSError.
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
    """Open the directory `name` in the one behind `folder`, creating it if missing. Returns the descriptor."""
    try:
        return _make(folder, name)
    except FileExistsError:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def _make(folder: int, name: str) -> int:
    """Create and open the directory `name` in the one behind `folder`. Raises FileExistsError."""
    rights = _rights(folder)
    os.mkdir(name, rights, dir_fd=folder)
    return _with_rights(os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder), rights)


def _rights(folder: int) -> int:
    """Mode of a new directory in the one behind `folder`."""
    mode = os.fstat(folder).st_mode
    return 0o700 | (mode & 0o050 if mode & stat.S_ISGID else 0)


def _with_rights(handle: int, rights: int) -> int:
    """Restore the `rights` of `handle` that the umask has removed. Returns `handle`."""
    try:
        mode = os.fstat(handle).st_mode
        if mode & rights != rights:
            os.fchmod(handle, stat.S_IMODE(mode) | rights)
    except BaseException:
        os.close(handle)
        raise
    return handle
