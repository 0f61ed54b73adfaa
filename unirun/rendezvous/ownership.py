"""Whether another user of this host can put something in the place of a file or a directory of ours.

Root is trusted: it can do anything anyway. Another user can replace what lies in a directory that he owns or may
write, unless the directory has the sticky bit (as ``/tmp``) and the entry is not his.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
from pathlib import Path

from unirun.values import Value

MAX_LINKS = 40
"""Symbolic links on the way to one path, as in the kernel."""


class Exposure(Value):
    """A place on the way to a path that another user controls: `problem` says which and why."""

    problem: str
    remedy: str


def make_private(folder: Path) -> None:
    """Make `folder` and what is missing above it, each 0700 whatever the umask. What is there stays as it is.

    Raises OSError, also for what is no directory.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):
            each.mkdir(0o700)
            # A umask can only take rights away: those of the owner too.
            each.chmod(0o700)


def exposure(folder: Path) -> Exposure | None:
    """The first place on the way to `folder` where another user can interpose; None when there is none.

    In `folder` itself others may not even make new entries. What is not there yet is not looked at: check again after
    it was made. The walk goes down from ``/``, so nobody can change what was checked before. Raises OSError, also for
    what is no directory.
    """
    at, links, trusted = "/", 0, _trusted()
    todo = [*reversed(folder.absolute().parts[1:])]
    while True:
        found = _directory(at, trusted, last=not todo)
        if found is not None or not todo:
            return found
        name = todo.pop()
        if name == "..":
            # `at` has no links any more, so this is what the kernel takes for the directory above.
            at = os.path.dirname(at)
            continue
        entry = os.path.join(at, name)
        try:
            info = os.lstat(entry)
        except FileNotFoundError:
            return None
        if not stat.S_ISLNK(info.st_mode):
            at = entry
            continue
        links += 1
        if links > MAX_LINKS or info.st_uid not in trusted:
            return Exposure(f"{entry} is a link of {_user(info.st_uid)}", "name another directory")
        # The first part of an absolute target is "/", and `join` above begins anew with it.
        todo += reversed(Path(os.readlink(entry)).parts)


def _directory(path: str, trusted: frozenset[int], *, last: bool) -> Exposure | None:
    info = os.stat(path)
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if info.st_uid not in trusted:
        return Exposure(f"{path} belongs to {_user(info.st_uid)}", "name a directory of your own")
    if writers(info) and (last or not info.st_mode & stat.S_ISVTX):
        return Exposure(
            f"{path} may be written by {writers(info)}", f"chmod go-w {path}, or name another directory"
        )
    return None


def writers(info: os.stat_result) -> str:
    """Which other users may write what `info` describes, in words; empty: none."""
    if info.st_mode & stat.S_IWOTH:
        return "all users"
    if info.st_mode & stat.S_IWGRP and not _is_trusted_group(info.st_gid):
        return f"group {_group(info.st_gid)}"
    return ""


def is_ours(info: os.stat_result) -> bool:
    """Whether a file belongs to this user."""
    return info.st_uid == os.geteuid()


def owner(info: os.stat_result) -> str:
    """Whom a file belongs to, in words."""
    return _user(info.st_uid)


def _trusted() -> frozenset[int]:
    """The users who may own what lies on the way to our files."""
    found = {0, os.geteuid()}
    with contextlib.suppress(OSError, ValueError):
        if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
            # In a user namespace (a rootless container) the host's root appears as this user. So does every other
            # user who is not mapped: they cannot be told apart from inside.
            found.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return frozenset(found)


def _is_trusted_group(gid: int) -> bool:
    """Root's group, or one that this user is alone in, as where each user has a group of the same name (umask 002)."""
    if gid == 0:
        return True
    try:
        me, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == me and set(group.gr_mem) <= {me}


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
