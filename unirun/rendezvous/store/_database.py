"""The file of an `SqliteStore`: how it is made and opened, and what SQLite's errors mean for who uses it."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unirun.errors import StoreAway, StoreBroken, StoreError, StoreRefused
from unirun.rendezvous.ownership import exposure, owner, writers

_APPLICATION = 0x756E6972
"""``unir``: which application a database belongs to stands in its header."""

_VERSION = 1

_SHARED = "users who share jobs keep them in etcd"

_SCHEMA = (
    # `first`: the oldest revision whose changes are still known; `written`: bytes of all changes ever made.
    "CREATE TABLE state (revision INTEGER, first INTEGER, written INTEGER, boot TEXT)",
    "INSERT INTO state VALUES (1, 2, 0, '')",
    "CREATE TABLE items (key TEXT PRIMARY KEY, value TEXT, revision INTEGER, lease INTEGER)",
    "CREATE INDEX items_by_lease ON items (lease) WHERE lease IS NOT NULL",
    # Ids are not used again: a lease that is over must not become somebody else's.
    "CREATE TABLE leases (id INTEGER PRIMARY KEY AUTOINCREMENT, ttl REAL, ends REAL)",
    # `value` is NULL for a deletion; `written` is that of the state after this change.
    "CREATE TABLE changes (revision INTEGER, place INTEGER, key TEXT, value TEXT, written INTEGER,"
    " PRIMARY KEY (revision, place))",
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {_VERSION}",
)


def now() -> float:
    """Seconds since the boot, those of a suspended machine too; the same clock in all processes of a host."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def open_database(path: Path, timeout: float) -> sqlite3.Connection:
    """A connection to the store in `path`, which is made if there is none. Raises `StoreError`."""
    deadline = time.monotonic() + timeout
    with explained(path):
        _touch(path)
        connection = sqlite3.connect(path, timeout=timeout, isolation_level=None, check_same_thread=False)
        try:
            while True:
                try:
                    _prepare(connection, path)
                    return connection
                except sqlite3.OperationalError as error:
                    # Changing to WAL does not wait for a process that is doing the same.
                    if not _is_busy(error) or time.monotonic() > deadline:
                        raise
                time.sleep(0.01)
        except BaseException:
            connection.close()
            raise


def _touch(path: Path) -> None:
    """Make the file if it is missing, private, and refuse one that another user could change.

    SQLite would make it with the mode of the umask; what it puts beside it gets the mode of the file. Whoever may make
    files beside it could make those first, and so choose what is read from them.
    """
    try:
        exposed = exposure(path.parent) or exposure(path.resolve().parent)
        if exposed is not None:
            raise StoreRefused(
                f"a store in {path} is not safe: {exposed.problem}", f"{exposed.remedy}; {_SHARED}"
            )
        # It is not opened here: to close it would drop the locks of all connections that this process has to it, and
        # another process would take itself for the last and remove the log that they read.
        with suppress(FileExistsError):
            os.mknod(path.resolve(), 0o600)
        info = os.stat(path)
        if stat.S_ISDIR(info.st_mode):
            raise StoreRefused(f"{path} is a directory", "name a file in it")
        if not os.access(path, os.R_OK | os.W_OK, effective_ids=True):
            code = errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(code, os.strerror(code), path)
        if info.st_uid not in (0, os.geteuid()):
            raise StoreRefused(f"{path} belongs to {owner(info)}", f"name a file of your own; {_SHARED}")
        if writers(info):
            raise StoreRefused(f"{path} may be written by {writers(info)}", f"chmod 600 {path}; {_SHARED}")
    except FileNotFoundError as error:
        raise StoreRefused(f"there is no directory {path.parent}", "make it, or name another file") from error
    except PermissionError as error:
        raise StoreRefused(
            f"{path} may not be opened for writing", "see who owns it and its directory, or name another file"
        ) from error
    except OSError as error:
        raise StoreBroken(f"{path} cannot be opened: {error.strerror}", "name another file") from error


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("PRAGMA synchronous = FULL")
    with _snapshot(connection):
        fresh = _is_fresh(connection, path)
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise StoreRefused(
            f"the file system of {path} cannot share memory between processes",
            "put the file on a local disk; several hosts need etcd",
        )
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if fresh or connection.execute("SELECT boot FROM state").fetchone() != (boot,):
        with transaction(connection):
            if _is_fresh(connection, path):
                for statement in _SCHEMA:
                    connection.execute(statement)
            connection.execute("UPDATE leases SET ends = 0 WHERE (SELECT boot FROM state) != ?", (boot,))
            connection.execute("UPDATE state SET boot = ?", (boot,))


def _is_fresh(connection: sqlite3.Connection, path: Path) -> bool:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application == _APPLICATION and version != _VERSION:
        raise StoreRefused(
            f"{path} was written by another version of unirun (format {version}, here {_VERSION})",
            "use that version, or name a new file",
        )
    if application != _APPLICATION and (application or version or tables):
        raise StoreRefused(f"{path} is a database of another program", "name a new file")
    return not tables


@contextmanager
def _snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """All reads see one state of the file: another process may be making it now."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """One write transaction: all or nothing, and never left open."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(
            sqlite3.Error
        ):  # SQLite may have rolled back by itself; the first error is the one to tell
            connection.execute("ROLLBACK")
        raise


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """SQLite's errors become those of unirun."""
    try:
        yield
    except sqlite3.Error as error:
        raise _explain(error, path) from error


def _is_busy(error: sqlite3.Error) -> bool:
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _code(error: sqlite3.Error) -> int:
    """The primary code: what lies above it is detail."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE) & 0xFF


def _explain(error: sqlite3.Error, path: Path) -> StoreError:
    if _is_busy(error):
        return StoreAway(
            f"{path} is locked by another process for too long",
            "see which processes have it open (fuser), and whether one of them is stopped",
        )
    match _code(error):
        case sqlite3.SQLITE_FULL:
            return StoreBroken(
                f"the disk of {path} is full; nothing was changed", "free some space, and try again"
            )
        case sqlite3.SQLITE_NOTADB:
            return StoreRefused(f"{path} is no SQLite database", "name a new file")
        case sqlite3.SQLITE_CORRUPT:
            return StoreBroken(f"{path} is damaged ({error})", "restore it from a copy, or name a new file")
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            return StoreRefused(
                f"{path}, or what SQLite needs beside it, may not be written",
                "see who owns the file and its directory, and whether the file system is read-only",
            )
        case _:
            return StoreBroken(
                f"{path} cannot be used: {error}", "see the kernel's log for errors of the disk"
            )
