"""The store in a file, for the processes of one host.

Every transaction is on the disk (WAL, ``synchronous=FULL``) before its call returns, so a process may be killed at any
moment. There is no server: each process that uses or watches the file ends expired leases. Leases are timed by the
boot clock, which counts while the machine is suspended and is independent of the wall clock; a reboot ends all leases.
"""

from __future__ import annotations

import errno
import math
import os
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from unirun.errors import LeaseExpired, StoreAway, StoreError, StoreRefused
from unirun.observe.ownership import exposure, listed_writer, owner, writers
from unirun.rendezvous.store.protocol import (
    Change,
    Compare,
    KeyValue,
    Lease,
    Listing,
    Outcome,
    Put,
    ValueIs,
    check_key,
    check_prefix,
    check_ttl,
    check_txn,
    clock,
)

# The file of an `SqliteStore`: creates and opens it, and translates SQLite's errors.

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
        raise StoreError(f"{path} cannot be opened: {error.strerror}", "name another file") from error


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
            return StoreError(
                f"the disk of {path} is full; nothing was changed", "free some space, and try again"
            )
        case sqlite3.SQLITE_NOTADB:
            return StoreRefused(f"{path} is no SQLite database", "name a new file")
        case sqlite3.SQLITE_CORRUPT:
            return StoreError(f"{path} is damaged ({error})", "restore it from a copy, or name a new file")
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            return StoreRefused(
                f"{path}, or what SQLite needs beside it, may not be written",
                "see who owns the file and its directory, and whether the file system is read-only",
            )
        case _:
            return StoreError(
                f"{path} cannot be used: {error}", "see the kernel's log for errors of the disk"
            )


HISTORY_REVISIONS = 10_000
HISTORY_BYTES = 16 * 1024 * 1024
"""Limits of the history kept for watches; a watch that is further behind gets a `Listing`."""

SQLITE_POLL_INTERVAL = 0.02
"""Seconds between two reads of the file's version by a watch; a read takes microseconds, from shared memory."""

_UNDER = "key >= ? AND key < ?"


def _bounds(prefix: str) -> tuple[str, str | bytes]:
    """Range of the keys of a prefix: ``0`` follows ``/``, and SQLite orders any blob after all texts."""
    return (prefix, prefix[:-1] + "0") if prefix else ("", b"")


class SqliteStore:
    """A `Store` in the file `path`, for threads and processes of one host. A forked child must open its own.

    A call waits for other processes for at most `timeout` seconds. Raises `StoreError`.
    """

    def __init__(self, path: str | Path, timeout: float = 10.0) -> None:
        self.path = Path(path).absolute()
        self.url = f"sqlite:{self.path}"
        self.timeout = timeout
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._watches: weakref.WeakSet[SqliteWatch] = weakref.WeakSet()
        self._connection: sqlite3.Connection | None = open_database(self.path, timeout)
        self._inode = self.path.stat().st_ino

    def get(self, key: str) -> KeyValue | None:
        """Return the item of `key`, or None."""
        check_key(key)
        with self._reading() as connection:
            row = connection.execute(
                "SELECT key, value, revision FROM items WHERE key = ?", (key,)
            ).fetchone()
            return KeyValue(*row) if row else None

    def get_prefix(self, prefix: str) -> Listing:
        """Return all items under `prefix`."""
        check_prefix(prefix)
        with self._reading() as connection:
            return _listing(connection, prefix)

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> Outcome:
        """Make all changes atomically if every comparison is true, else none."""
        check_txn(compares, puts, deletes)
        with self._writing() as connection:
            succeeded = all(_holds(connection, compare) for compare in compares)
            if succeeded:
                _check_leases(connection, puts)
                gone = [key for target in deletes for key in _keys(connection, target)]
                _commit(connection, puts, gone)
            return Outcome(succeeded, _revision(connection))

    def grant(self, ttl: float) -> Lease:
        """Create a lease of `ttl` seconds."""
        check_ttl(ttl)
        with self._writing() as connection:
            insert = "INSERT INTO leases (ttl, ends) VALUES (?, ?) RETURNING id"
            (number,) = connection.execute(insert, (ttl, clock() + ttl)).fetchone()
            return Lease(number, ttl)

    def keep_alive(self, lease: Lease) -> None:
        """Renew the lease."""
        with self._writing() as connection:
            update = "UPDATE leases SET ends = ? WHERE id = ?"
            if not connection.execute(update, (clock() + lease.ttl, lease.id)).rowcount:
                raise LeaseExpired(f"the lease {lease.id} is over")

    def revoke(self, lease: Lease) -> None:
        """End a lease now, with its keys."""
        with self._writing() as connection:
            _end(connection, lease.id)

    def watch(self, prefix: str, from_revision: int) -> SqliteWatch:
        """Changes under `prefix` from the transaction `from_revision` on."""
        check_prefix(prefix)
        self._check_open()
        watch = SqliteWatch(self, prefix, from_revision)
        self._watches.add(watch)
        return watch

    def close(self) -> None:
        """Close the file; watches end."""
        if self._pid != os.getpid():
            return  # a forked child must not use its parent's connection
        for watch in list(self._watches):
            watch.close()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def compact(self, revision: int) -> None:
        """Delete the history before `revision`; watches that have not read it get a `Listing`."""
        with self._writing() as connection:
            _forget(connection, min(revision, _revision(connection) + 1))

    def expire(self) -> None:
        """End the expired leases."""
        with self._writing():
            pass

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._entered() as connection, transaction(connection):
            _expire(connection)
            yield connection

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._entered() as connection:
            if _next_end(connection) <= clock():
                with transaction(connection):
                    _expire(connection)
            yield connection

    @contextmanager
    def _entered(self) -> Iterator[sqlite3.Connection]:
        deadline = time.monotonic() + self.timeout
        self._check_open()
        if not self._lock.acquire(timeout=self.timeout):
            raise StoreAway(f"another thread has used {self.path} for {self.timeout:g} s", "see what it does")
        try:
            if self._connection is None:
                raise _closed()
            self._check_file()
            with explained(self.path):
                left = max(0, int(1000 * (deadline - time.monotonic())))
                self._connection.execute(f"PRAGMA busy_timeout = {left}")
                yield self._connection
        finally:
            self._lock.release()

    def _check_open(self) -> None:
        if self._connection is None:
            raise _closed()
        if self._pid != os.getpid():
            raise StoreRefused(
                f"{self.path} was opened before a fork; in a child it would be damaged",
                "open the store again in the child",
            )

    def _check_file(self) -> None:
        """Raise when the file was deleted or replaced: SQLite itself would keep using the old inode."""
        try:
            same = self.path.stat().st_ino == self._inode
        except OSError:
            same = False
        if not same:
            raise StoreError(f"{self.path} was deleted or replaced", "start the job anew")


def _closed() -> StoreAway:
    return StoreAway("the store was closed", "open another one")


class SqliteWatch:
    """The changes under a prefix of an `SqliteStore`, seen within `SQLITE_POLL_INTERVAL` seconds."""

    def __init__(self, store: SqliteStore, prefix: str, from_revision: int) -> None:
        self._store, self._prefix = store, prefix
        self._next = max(2, from_revision)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        # Its own connection: `data_version` only counts commits of other connections.
        self._connection: sqlite3.Connection | None = None
        self._version: int | None = None
        self._next_end = math.inf

    def changes(self, timeout: float) -> tuple[Change, ...] | Listing:
        """The next changes, or a `Listing` of what is there when some were compacted away."""
        deadline = time.monotonic() + timeout
        while not self._closed.is_set():
            if self._next_end <= clock():
                self._store.expire()
            with self._lock:
                news = () if self._closed.is_set() else self._look()
            left = deadline - time.monotonic()
            if news or left <= 0:
                return news
            self._closed.wait(min(left, SQLITE_POLL_INTERVAL))
        return ()

    def close(self) -> None:
        """Stop; a thread that waits in `changes` gets an empty result."""
        if self._store._pid != os.getpid():
            return
        self._closed.set()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _look(self) -> tuple[Change, ...] | Listing:
        self._store._check_open()
        self._store._check_file()
        with explained(self._store.path):
            if self._connection is None:
                self._connection = open_database(self._store.path, self._store.timeout)
            (version,) = self._connection.execute("PRAGMA data_version").fetchone()
            if version == self._version:
                return ()
            self._connection.execute("BEGIN")
            try:
                news = self._read(self._connection)
            finally:
                self._connection.execute("COMMIT")
            self._version = version
            return news

    def _read(self, connection: sqlite3.Connection) -> tuple[Change, ...] | Listing:
        self._next_end = _next_end(connection)
        revision, first = connection.execute("SELECT revision, first FROM state").fetchone()
        if self._next < first:
            news: tuple[Change, ...] | Listing = _listing(connection, self._prefix)
        else:
            rows = connection.execute(
                f"SELECT key, value, revision FROM changes WHERE revision >= ? AND {_UNDER}"
                " ORDER BY revision, place",
                (self._next, *_bounds(self._prefix)),
            )
            news = tuple(
                Change("delete" if value is None else "put", key, value or "", number)
                for key, value, number in rows
            )
        # Not before: what could not be read is read the next time.
        self._next = max(self._next, revision + 1)
        return news


def _revision(connection: sqlite3.Connection) -> int:
    (revision,) = connection.execute("SELECT revision FROM state").fetchone()
    return int(revision)


def _next_end(connection: sqlite3.Connection) -> float:
    (end,) = connection.execute("SELECT min(ends) FROM leases").fetchone()
    return math.inf if end is None else float(end)


def _listing(connection: sqlite3.Connection, prefix: str) -> Listing:
    # One statement, so that items and revision are consistent; it returns a row also for an empty prefix.
    rows = connection.execute(
        "SELECT state.revision, key, value, items.revision"
        f" FROM state LEFT JOIN items ON {_UNDER} ORDER BY key",
        _bounds(prefix),
    ).fetchall()
    return Listing(tuple(KeyValue(*row[1:]) for row in rows if row[1] is not None), rows[0][0])


def _keys(connection: sqlite3.Connection, target: str) -> list[str]:
    """Existing keys of `target`, a key or a prefix."""
    if target and not target.endswith("/"):
        rows = connection.execute("SELECT key FROM items WHERE key = ?", (target,))
    else:
        rows = connection.execute(f"SELECT key FROM items WHERE {_UNDER} ORDER BY key", _bounds(target))
    return [key for (key,) in rows]


def _holds(connection: sqlite3.Connection, compare: Compare) -> bool:
    row = connection.execute("SELECT value, revision FROM items WHERE key = ?", (compare.key,)).fetchone()
    if isinstance(compare, ValueIs):
        return row is not None and row[0] == compare.value
    return (row[1] if row else 0) == compare.revision


def _check_leases(connection: sqlite3.Connection, puts: Sequence[Put]) -> None:
    for put in puts:
        if (
            put.lease
            and not connection.execute("SELECT 1 FROM leases WHERE id = ?", (put.lease.id,)).fetchone()
        ):
            raise LeaseExpired(f"the lease of {put.key} is over")


def _expire(connection: sqlite3.Connection) -> None:
    over = connection.execute("SELECT id FROM leases WHERE ends <= ? ORDER BY ends, id", (clock(),))
    for (lease,) in over.fetchall():
        _end(connection, lease)


def _end(connection: sqlite3.Connection, lease: int) -> None:
    rows = connection.execute("SELECT key FROM items WHERE lease = ? ORDER BY key", (lease,))
    _commit(connection, (), [key for (key,) in rows])
    connection.execute("DELETE FROM leases WHERE id = ?", (lease,))


def _commit(connection: sqlite3.Connection, puts: Sequence[Put], gone: Sequence[str]) -> None:
    if not puts and not gone:
        return
    revision, written = connection.execute("SELECT revision + 1, written FROM state").fetchone()
    changes: list[tuple[str, str | None]] = [(put.key, put.value) for put in puts]
    changes += [(key, None) for key in gone]
    connection.executemany(
        "INSERT OR REPLACE INTO items VALUES (?, ?, ?, ?)",
        [(put.key, put.value, revision, put.lease.id if put.lease else None) for put in puts],
    )
    connection.executemany("DELETE FROM items WHERE key = ?", [(key,) for key in gone])
    for place, (key, value) in enumerate(changes):
        written += len(key) + len(value or "")
        connection.execute(
            "INSERT INTO changes VALUES (?, ?, ?, ?, ?)", (revision, place, key, value, written)
        )
    connection.execute("UPDATE state SET revision = ?, written = ?", (revision, written))
    _trim(connection, revision, written)


def _trim(connection: sqlite3.Connection, revision: int, written: int) -> None:
    oldest = "SELECT revision, written FROM changes ORDER BY revision, place LIMIT 1"
    while True:
        first, until = connection.execute(oldest).fetchone()
        if first > revision - HISTORY_REVISIONS and until > written - HISTORY_BYTES:
            return
        _forget(connection, first + 1)


def _forget(connection: sqlite3.Connection, before: int) -> None:
    connection.execute("DELETE FROM changes WHERE revision < ?", (before,))
    connection.execute("UPDATE state SET first = max(first, ?)", (before,))
