"""Opening the file of an `SqliteStore`, and the translation of SQLite's errors."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from unirun.errors import StoreAway, StoreError, StoreRefused
from unirun.rendezvous.store import sqlite
from unirun.rendezvous.store.sqlite import SqliteStore, explained, open_database


def failure(code: int | None) -> sqlite3.OperationalError:
    """An SQLite error with that code; errors of Python's module have none."""
    error = sqlite3.OperationalError("as SQLite says")
    if code is not None:
        error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("code", "becomes", "says"),
    [
        (sqlite3.SQLITE_BUSY, StoreAway, "has been locked by another process"),
        (sqlite3.SQLITE_LOCKED, StoreAway, "has been locked by another process"),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, StoreAway, "has been locked by another process"),
        (sqlite3.SQLITE_FULL, StoreError, "is full; nothing was changed"),
        (sqlite3.SQLITE_NOTADB, StoreRefused, "is no SQLite database"),
        (sqlite3.SQLITE_CORRUPT, StoreError, r"is damaged \(as SQLite says\)"),
        (sqlite3.SQLITE_READONLY, StoreRefused, "may not be written"),
        (sqlite3.SQLITE_READONLY_DIRECTORY, StoreRefused, "may not be written"),
        (sqlite3.SQLITE_CANTOPEN, StoreRefused, "may not be written"),
        (sqlite3.SQLITE_PERM, StoreRefused, "may not be written"),
        (sqlite3.SQLITE_IOERR, StoreError, "cannot be used: as SQLite says"),
        (None, StoreError, "cannot be used: as SQLite says"),
    ],
)
def test_each_sqlite_error_has_a_remedy(code: int | None, becomes: type[StoreError], says: str) -> None:
    with pytest.raises(StoreError, match=rf"store\.db.* {says}.*; ") as told, explained(Path("store.db")):
        raise failure(code)
    assert type(told.value) is becomes
    assert isinstance(told.value.__cause__, sqlite3.OperationalError)


class TestConcurrentlyPreparedFile:
    """SQLite does not wait for another process that switches to WAL."""

    @pytest.fixture
    def pauses(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """Those of this thread: threads of other tests may sleep meanwhile."""
        pauses: list[float] = []
        thread, sleep = threading.get_ident(), time.sleep

        def pause(seconds: float) -> None:
            (pauses.append if threading.get_ident() == thread else sleep)(seconds)

        monkeypatch.setattr(time, "sleep", pause)
        return pauses

    def fail(self, monkeypatch: pytest.MonkeyPatch, times: int, code: int) -> None:
        prepare, errors = sqlite._prepare, [failure(code)] * times

        def prepare_at_last(connection: sqlite3.Connection, path: Path) -> None:
            if errors:
                raise errors.pop()
            prepare(connection, path)

        monkeypatch.setattr(sqlite, "_prepare", prepare_at_last)

    def test_a_busy_new_sqlite_file_is_retried(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
    ) -> None:
        self.fail(monkeypatch, 3, sqlite3.SQLITE_BUSY)
        open_database(tmp_path / "store.db", 60).close()
        assert len(pauses) == 3
        assert max(pauses) < 0.1

    def test_a_busy_new_sqlite_file_is_given_up_at_the_deadline(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
    ) -> None:
        self.fail(monkeypatch, 10**6, sqlite3.SQLITE_BUSY)
        monkeypatch.setattr(time, "monotonic", lambda: sum(pauses))
        with pytest.raises(StoreAway, match="store.db has been locked by another process"):
            open_database(tmp_path / "store.db", 0.02)
        assert 2 <= len(pauses) <= 3

    def test_a_new_sqlite_file_with_another_error_is_given_up_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
    ) -> None:
        self.fail(monkeypatch, 1, sqlite3.SQLITE_IOERR)
        with pytest.raises(StoreError, match="store.db cannot be used"):
            open_database(tmp_path / "store.db", 60)
        assert pauses == []


def test_a_sqlite_connection_has_the_timeout_and_autocommit(
    tmp_path: Path,
) -> None:
    connection = open_database(tmp_path / "store.db", 0.25)
    assert connection.execute("PRAGMA busy_timeout").fetchone() == (250,)
    connection.execute("UPDATE state SET written = 1")
    assert not connection.in_transaction
    connection.close()


@pytest.mark.parametrize("pragma", ["application_id = 5", "user_version = 7"])
def test_a_sqlite_file_with_another_application_id_is_refused(tmp_path: Path, pragma: str) -> None:
    path = tmp_path / "other.db"
    other = sqlite3.connect(path)
    other.execute(f"PRAGMA {pragma}")
    other.close()
    before = path.read_bytes()
    with pytest.raises(StoreRefused, match=rf"{path} is a database of another program"):
        SqliteStore(path)
    assert path.read_bytes() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has what it can pretend is another's")
def test_a_sqlite_file_of_root_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SqliteStore(tmp_path / "store.db").close()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    SqliteStore(tmp_path / "store.db").close()
