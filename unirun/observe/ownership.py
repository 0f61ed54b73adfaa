"""Check whether another user of this host can replace a file or a directory of ours.

Root is trusted. Another user can replace the entries of a directory that he owns or may write, unless the directory
has the sticky bit (as ``/tmp``) and the entry is not his.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
import struct
from pathlib import Path

from unirun.errors import Fault

MAX_LINKS = 40
"""Maximum number of symbolic links in one path, as in the kernel."""


_ACCESS, _DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
_NAMED_USER, _NAMED_GROUP, _MASK = 0x02, 0x08, 0x10


def make_private(folder: Path) -> None:
    """Create `folder` and its missing parents, each 0700 whatever the umask. Existing directories are not changed.

    Raises OSError, also when a component is not a directory.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):
            each.mkdir(0o700)
            # The umask may have removed permissions of the owner.
            each.chmod(0o700)


def exposure(folder: Path) -> Fault | None:
    """Return the first component of the path `folder` that another user controls, as a fault that states which and
    why; None when there is none.

    In `folder` itself others may not even create entries. Missing components are not checked: check again after
    creating them. The walk starts at ``/``, so nobody can change the components that were checked. Raises OSError,
    also when a component is not a directory.
    """
    at, links, trusted = "/", 0, _trusted()
    todo = [*reversed(folder.absolute().parts[1:])]
    while True:
        found = _directory(at, trusted, last=not todo)
        if found is not None or not todo:
            return found
        name = todo.pop()
        if name == "..":
            # `at` has no links any more, so this is the parent that the kernel would take.
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
            return Fault(entry, f"{entry} is a link of {_user(info.st_uid)}", "name another directory")
        # The first part of an absolute target is "/", from which `join` above starts again.
        todo += reversed(Path(os.readlink(entry)).parts)


def _directory(path: str, trusted: frozenset[int], *, last: bool) -> Fault | None:
    info = os.stat(path)
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if info.st_uid not in trusted:
        return Fault(path, f"{path} belongs to {_user(info.st_uid)}", "name a directory of your own")
    if writers(info) and (last or not info.st_mode & stat.S_ISVTX):
        return Fault(
            path, f"{path} may be written by {writers(info)}", f"chmod go-w {path}, or name another directory"
        )
    if (who := listed_writer(path)) and (last or not info.st_mode & stat.S_ISVTX):
        return Fault(
            path,
            f"{path} may be written by {who}, by its access control list",
            f"setfacl -b {path}, or name another directory",
        )
    if last and (who := listed_writer(path, _DEFAULT)):
        return Fault(
            path,
            f"new files in {path} may be written by {who}, by its access control list",
            f"setfacl -k {path}, or name another directory",
        )
    return None


def listed_writer(path: str | Path, kind: str = _ACCESS) -> str:
    """Describe a user or group that may write a file by its access control list alone (POSIX.1e, as `getfacl` shows);
    empty when there is none. Raises OSError."""
    try:
        listed = os.getxattr(path, kind)
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return ""
        raise
    # acl(5): a version, then for each entry its kind, its rights and an id.
    entries = [*struct.iter_unpack("<HHI", listed[4 : len(listed) - (len(listed) - 4) % 8])]
    mask = next((rights for tag, rights, _ in entries if tag == _MASK), 7)
    for tag, rights, number in entries:
        if not rights & mask & 2:
            continue
        if tag == _NAMED_USER and number not in _trusted():
            return _user(number)
        if tag == _NAMED_GROUP and not _is_trusted_group(number):
            return f"group {_group(number)}"
    return ""


def writers(info: os.stat_result) -> str:
    """Describe the other users who may write a file; empty when there are none."""
    if info.st_mode & stat.S_IWOTH:
        return "all users"
    if info.st_mode & stat.S_IWGRP and not _is_trusted_group(info.st_gid):
        return f"group {_group(info.st_gid)}"
    return ""


def is_ours(info: os.stat_result) -> bool:
    """Return True if this user owns a file."""
    return info.st_uid == os.geteuid()


def owner(info: os.stat_result) -> str:
    """Describe the owner of a file."""
    return _user(info.st_uid)


def _trusted() -> frozenset[int]:
    """Ids of the users who may own components of our paths."""
    found = {0, os.geteuid()}
    with contextlib.suppress(OSError, ValueError):
        if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
            # In a user namespace (a rootless container) the host's root appears as this user. So does every other
            # user who is not mapped: they cannot be told apart from inside.
            found.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return frozenset(found)


def _is_trusted_group(gid: int) -> bool:
    """Return True if `gid` is root's group or a group of this user alone, named as the user (common with umask 002)."""
    if gid == 0:
        return True
    try:
        me, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == me and set(group.gr_mem) <= {me} and not _others_begin_in(gid)


def _others_begin_in(gid: int) -> bool:
    """Return True if `gid` is the primary group of another user; such a user is none of its listed members."""
    return any(each.pw_gid == gid and each.pw_uid not in (0, os.geteuid()) for each in pwd.getpwall())


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


def read_file(path: Path) -> str:
    """The text of a regular file. Raises OSError, also for any other kind: opening a FIFO may block for ever."""
    with open(path, opener=_open_ordinary, encoding="utf-8", errors="replace") as file:
        return file.read()


def _open_ordinary(path: str, flags: int) -> int:
    handle = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return handle
