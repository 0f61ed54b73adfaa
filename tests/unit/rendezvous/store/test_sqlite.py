"""Errors of the SQLite file, and their messages."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import LeaseExpired, StoreAway, StoreError, StoreRefused
from unirun.rendezvous.store import sqlite
from unirun.rendezvous.store.protocol import Change, Listing, Put
from unirun.rendezvous.store.sqlite import SqliteStore


def test_sqlite3_connect_gets_only_the_path_by_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.13 warns of other positional arguments; with warnings as errors no store could be opened."""
    connect = sqlite3.connect

    def by_name(path: Path, **options: Any) -> Any:
        return connect(path, **options)

    monkeypatch.setattr(sqlite3, "connect", by_name)
    SqliteStore(tmp_path / "store.db").close()


def test_a_sqlite_file_and_its_journal_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = SqliteStore(tmp_path / "store.db")
        store.txn([], [Put("a", "1")])
    finally:
        os.umask(before)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["store.db", "store.db-shm", "store.db-wal"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    store.close()
    assert sorted(tmp_path.iterdir()) == files[:1]


class TestSqliteFileOfOthers:
    """A user who can write the store controls what a job's next master does."""

    @pytest.mark.parametrize(("mode", "who"), [(0o666, "all users"), (0o602, "all users")])
    def test_a_sqlite_file_that_others_may_write_is_refused(
        self, tmp_path: Path, mode: int, who: str
    ) -> None:
        path = tmp_path / "store.db"
        SqliteStore(path).close()
        path.chmod(mode)
        says = f"store.db may be written by {who}; chmod 600 .*; users who share jobs keep them in etcd"
        with pytest.raises(StoreRefused, match=says):
            SqliteStore(path)
        path.chmod(0o644)
        SqliteStore(path).close()

    @pytest.mark.parametrize("mode", [0o777, 0o1777], ids=oct)
    def test_a_sqlite_file_in_a_directory_that_others_may_write_is_refused(
        self, tmp_path: Path, mode: int
    ) -> None:
        (tmp_path / "link").symlink_to("shared/store.db")
        (tmp_path / "shared").mkdir()
        (tmp_path / "shared").chmod(mode)
        for name in ("shared/store.db", "link"):
            with pytest.raises(StoreRefused, match="is not safe: .*/shared may be written by all users"):
                SqliteStore(tmp_path / name)
        assert [*(tmp_path / "shared").iterdir()] == []

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
    def test_a_sqlite_file_of_another_user_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        SqliteStore(path).close()
        os.chown(path, 65534, 0)
        with pytest.raises(StoreRefused, match="store.db belongs to user .*; name a file of your own"):
            SqliteStore(path)
        os.chown(path, 0, 65534)
        path.chmod(0o660)
        with pytest.raises(StoreRefused, match="store.db may be written by group"):
            SqliteStore(path)


def test_a_reopened_sqlite_file_has_all_writes(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    lease = store.grant(60)
    outcome = store.txn([], [Put("a", "1", lease)])
    store.close()
    again = SqliteStore(tmp_path / "store.db")
    assert again.get_prefix("").revision == outcome.revision
    assert again.watch("", 1).changes(1) == (Change("put", "a", "1", outcome.revision),)
    again.keep_alive(lease)
    again.close()


def test_a_reboot_ends_all_sqlite_leases(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    lease = store.grant(10_000)
    store.txn([], [Put("leased", "1", lease), Put("stays", "1")])
    store.close()
    with sqlite3.connect(tmp_path / "store.db") as file:
        file.execute("UPDATE state SET boot = 'an earlier one'")
    file.close()
    again = SqliteStore(tmp_path / "store.db")
    assert [item.key for item in again.get_prefix("").items] == ["stays"]
    with pytest.raises(LeaseExpired):
        again.keep_alive(lease)
    again.close()


def test_a_missing_directory_of_a_sqlite_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match=rf"no directory {tmp_path}/nowhere; make it"):
        SqliteStore(tmp_path / "nowhere" / "store.db")
    with pytest.raises(StoreRefused, match="is a directory"):
        SqliteStore(tmp_path)


def test_a_file_that_is_no_sqlite_database_is_refused_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("remember the milk\n" * 300)
    with pytest.raises(StoreRefused, match=r"is no SQLite database; name a new file"):
        SqliteStore(path)
    assert path.read_text().startswith("remember the milk")


def test_a_sqlite_database_of_another_program_is_refused_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE items (key)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(StoreRefused, match="database of another program"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_a_sqlite_file_of_another_format_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    SqliteStore(path).close()
    file = sqlite3.connect(path)
    file.execute("PRAGMA user_version = 99")
    file.close()
    with pytest.raises(StoreRefused, match=r"another version of unirun \(format 99, here 1\)"):
        SqliteStore(path)


def test_a_damaged_sqlite_file_is_distinguished_from_a_missing_one(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SqliteStore(path)
    for number in range(50):
        store.txn([], [Put(f"key{number}", "x" * 1000)])
    store.close()
    content = bytearray(path.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"damaged.*restore it from a copy"):
        SqliteStore(path).get_prefix("")


def test_a_call_waits_for_threads_and_processes_together_as_long_as_its_timeout(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held:
        """A lock that another thread gives up after three seconds."""

        now = 0.0

        def acquire(self, timeout: float) -> bool:
            self.now += 3.0
            return timeout >= 3.0

        def release(self) -> None:
            """It was got."""

    held: Any = Held()
    monkeypatch.setattr(store, "_lock", held)
    monkeypatch.setattr(sqlite, "time", SimpleNamespace(monotonic=lambda: held.now))
    with store._entered() as connection:
        assert connection.execute("PRAGMA busy_timeout").fetchone() == (2000,), "of five seconds"
    monkeypatch.undo()


@pytest.mark.parametrize("there", [True, False])
def test_a_deleted_or_replaced_sqlite_file_is_noticed(store: SqliteStore, *, there: bool) -> None:
    watch = store.watch("", 1)
    store.txn([], [Put("a", "1")])
    assert watch.changes(1)
    store.path.unlink()
    if there:
        SqliteStore(store.path).close()
    for call in (lambda: store.get("a"), lambda: store.txn([], [Put("a", "2")]), lambda: watch.changes(1)):
        with pytest.raises(StoreError, match="deleted or replaced"):
            call()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "none", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.starts_processes
def test_a_full_disk_rolls_back_one_sqlite_transaction(small_disk: Path) -> None:
    store = SqliteStore(small_disk / "store.db")
    store.txn([], [Put("a", "1")])
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space"):
        ballast.write_bytes(bytes(4 * 1024 * 1024))
    with pytest.raises(StoreError, match="disk of .* is full; nothing was changed; free some space"):
        store.txn([], [Put("a", "x" * 500_000)])
    item = store.get("a")
    assert item is not None
    assert item.value == "1"
    ballast.unlink()
    assert store.txn([], [Put("a", "2")]).revision == item.revision + 1
    store.close()


@pytest.mark.starts_processes
def test_a_read_only_file_system_of_a_sqlite_file_is_named(small_disk: Path) -> None:
    SqliteStore(small_disk / "store.db").close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError, match="Read-only file system"):
        SqliteStore(small_disk / "store.db")


@pytest.mark.starts_processes
def test_a_sqlite_file_without_write_permission_is_refused(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("only root may become somebody else")
    path = tmp_path / "store.db"
    SqliteStore(path).close()
    script = f"""
        import os
        from unirun.errors import StoreRefused
        from unirun.rendezvous.store.sqlite import SqliteStore
        os.chdir({str(tmp_path)!r})
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        try:
            SqliteStore({str(path)!r})
        except StoreRefused as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert "may not be opened for writing; see who owns it" in done.stdout


def test_a_sqlite_lock_of_another_process_times_out(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SqliteStore(path, timeout=0.3)
    store.txn([], [Put("a", "1")])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    started = time.monotonic()
    with pytest.raises(StoreAway, match="locked by another process"):
        store.txn([], [Put("a", "2")])
    assert 0.2 < time.monotonic() - started < WAIT_TIMEOUT
    item = store.get("a")
    assert item is not None, "readers do not wait for writers"
    other.execute("ROLLBACK")
    assert store.txn([], [Put("a", "2")]).succeeded
    other.close()
    store.close()


@pytest.mark.starts_processes
def test_a_forked_child_must_open_its_own_sqlite_store(store: SqliteStore) -> None:
    def child() -> None:
        watch = store.watch  # bound before the fork
        for call in (lambda: store.get("a"), lambda: watch("", 1)):
            try:
                call()
            except StoreRefused:
                continue
            os._exit(1)
        store.close()
        SqliteStore(store.path).txn([], [Put("from the child", "1")])
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(WAIT_TIMEOUT)
    assert process.exitcode == 0
    assert store.get("from the child") is not None


def test_sqlite_history_is_bounded_in_revisions(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "HISTORY_REVISIONS", 5)
    start = store.txn([], [Put("a", "0")]).revision
    for number in range(1, 10):
        store.txn([], [Put("a", str(number))])
    assert isinstance(store.watch("", start + 4).changes(1), Listing)
    news = store.watch("", start + 5).changes(1)
    assert [change.value for change in news] == list("56789")  # type: ignore[union-attr]


def test_sqlite_history_is_bounded_in_bytes(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "HISTORY_BYTES", 10_000)
    for number in range(10):
        store.txn([], [Put("a", str(number) * 3000)])
    last = store.get_prefix("").revision
    assert isinstance(store.watch("", last - 4).changes(1), Listing)
    news = store.watch("", last - 2).changes(1)
    assert [change.value[0] for change in news] == list("789")  # type: ignore[union-attr]
    store.txn([], [Put("a", "x" * 50_000)])
    assert len(store.watch("", last + 1).changes(1)) == 1, "the latest transaction is always known"  # type: ignore[arg-type]


def test_the_empty_sqlite_prefix_has_every_key(store: SqliteStore) -> None:
    keys = ["\x00", "!", "0", "A", "a", "é", "\U0010ffff"]
    store.txn([], [Put(key, "1") for key in keys])
    assert [item.key for item in store.get_prefix("").items] == keys
    store.txn([], deletes=[""])
    assert store.get_prefix("").items == ()


def test_sqlite_compact_beyond_the_latest_revision_is_limited(store: SqliteStore) -> None:
    revision = store.txn([], [Put("a", "1")]).revision
    store.compact(revision + 100)
    watch = store.watch("", revision + 1)
    store.txn([], [Put("a", "2")])
    assert watch.changes(1) == (Change("put", "a", "2", revision + 1),)
