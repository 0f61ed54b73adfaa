"""The directory of everything that unirun keeps for a user, and paths that begin with ``~``.

It is ``$UNIRUN_HOME``, else ``$XDG_STATE_HOME/unirun``, else ``~/.local/state/unirun``. In a container the home
directory may be unknown (a uid without an entry in ``/etc/passwd``), ``/``, read-only, or open to all users. torchrun
needs none, so a missing ``~/.local/state/unirun`` that cannot be made, or would not be private, is replaced by
``unirun-UID`` in the temporary directory.
"""

from __future__ import annotations

import os
from pathlib import Path

from unirun.errors import JobError, UsageError
from unirun.observe.ownership import exposure


def unirun_home() -> Path:
    """Return the directory of everything that unirun keeps for this user, which need not exist.

    Raises `JobError` when there is no place for it, and `UsageError` when ``UNIRUN_HOME`` begins with a ``~`` that
    stands for nothing.
    """
    if given := os.environ.get("UNIRUN_HOME"):
        return expanded(given).absolute()
    if state := os.environ.get("XDG_STATE_HOME"):
        return Path(state, "unirun")
    usual = _below_home()
    return temporary("unirun's files, nor is the home directory one") if usual is None else usual


def expanded(path: str) -> Path:
    """Return `path` with its ``~`` replaced. Raises `UsageError` where no home directory is known for it."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{path}: no home directory is known for it", "write the whole path") from error


def temporary(purpose: str) -> Path:
    """Return this user's own directory in the temporary directory, which need not exist. Raises `JobError`, with the
    `purpose`, where no temporary directory can be written."""
    return temporary_directory(purpose) / f"unirun-{os.geteuid()}"


def temporary_directory(purpose: str) -> Path:
    """Return ``$TMPDIR``, ``/tmp`` or ``/var/tmp``, of which one can be written. Raises `JobError`."""
    # Not `tempfile.gettempdir`, which gives another one when the disk is full: other commands would not find it.
    for place in filter(None, (os.environ.get("TMPDIR"), "/tmp", "/var/tmp")):
        if may_write(place):
            return Path(place).absolute()
    raise JobError(
        f"$TMPDIR, /tmp and /var/tmp are no place for {purpose}: they cannot be written",
        "set TMPDIR to a directory that you may write",
    )


def may_write(folder: str | Path) -> bool:
    """Return True if this user can make entries in the directory `folder`."""
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK, effective_ids=True)


def _below_home() -> Path | None:
    """``~/.local/state/unirun`` if it is there or can be made."""
    try:
        usual = Path.home() / ".local" / "state" / "unirun"
    except RuntimeError:
        return None
    return usual if os.path.lexists(usual) or _may_be_made(usual) else None


def _may_be_made(folder: Path) -> bool:
    """Return True if this user can make `folder` and its missing parents, so that no other user controls them."""
    there = next(each for each in folder.absolute().parents if os.path.lexists(each))
    try:
        return may_write(there) and exposure(there) is None
    except OSError:
        return False
