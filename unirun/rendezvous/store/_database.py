"""The file of an `SqliteStore`: creates and opens it, and translates SQLite's errors."""

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
from unirun.observe.ownership import exposure, listed_writer, owner, writers

_APPLICATION = 0x756E6972
"""``unir``: the application id in the header of the database."""

_VERSION = 1

_SHARED = "users who share jobs keep them in etcd"

_SCHEMA = (
    # `first`: the oldest revision whose changes are kept; `written`: total bytes of all changes ever made.
    "CREATE TABLE state (revision INTEGER, first INTEGER, written INTEGER, boot TEXT)",
    "INSERT INTO state VALUES (1, 2, 0, '')",
    "CREATE TABLE items (key TEXT PRIMARY KEY, value TEXT, revision INTEGER, lease INTEGER)",
    "CREATE INDEX items_by_lease ON items (lease) WHERE lease IS NOT NULL",
    # Ids are never reused: an expired lease must not become a new one.
    "CREATE TABLE leases (id INTEGER PRIMARY KEY AUTOINCREMENT, ttl REAL, ends REAL)",
    # `value` is NULL for a deletion; `written` is the total of the state after this change.
    "CREATE TABLE changes (revision INTEGER, place INTEGER, key TEXT, value TEXT, written INTEGER,"
    " PRIMARY KEY (revision, place))",
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {_VERSION}",
)


def now() -> float:
    """Seconds since the boot, including time suspended; the same in all processes of a host."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def open_database(path: Path, timeout: float) -> sqlite3.Connection:
    """Open the store in `path`, creating it if missing. `timeout` is in seconds. Raises `StoreError`."""
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
                    # Switching to WAL does not wait for another process that does the same.
                    if not _is_busy(error) or time.monotonic() > deadline:
                        raise
                time.sleep(0.01)
        except BaseException:
            connection.close()
            raise


def _touch(path: Path) -> None:
    """Create the file if missing, private, and refuse one that another user could change.

    SQLite would create it with the mode of the umask, and gives its journal files the mode of the file. A user who may
    create files in the directory could create the journal first, and so control what is read.
    """
    try:
        exposed = exposure(path.parent) or exposure(path.resolve().parent)
        if exposed is not None:
            raise StoreRefused(
                f"a store in {path} is not safe: {exposed.problem}", f"{exposed.remedy}; {_SHARED}"
            )
        # Not opened here: closing it would drop the POSIX locks of all connections of this process, and another process
        # would take itself for the last user and remove the write-ahead log.
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
        if who := writers(info) or listed_writer(path):
            raise StoreRefused(f"{path} may be written by {who}", f"chmod 600 {path}; {_SHARED}")
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
    """A read transaction: another process may be creating the tables now."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """A write transaction: committed at the end, rolled back on any exception."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # SQLite may have rolled back already; the first error is raised.
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Translate SQLite's errors to `StoreError`."""
    try:
        yield
    except sqlite3.Error as error:
        raise _explain(error, path) from error


def _is_busy(error: sqlite3.Error) -> bool:
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _code(error: sqlite3.Error) -> int:
    """Primary result code: the low byte of the extended code."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE) & 0xFF


def _explain(error: sqlite3.Error, path: Path) -> StoreError:
    if _is_busy(error):
        return StoreAway(
            f"{path} has been locked by another process for too long",
            "see which processes have it open (fuser), and whether one of them is stopped; a network file system"
            " without locks fails like this, too",
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
