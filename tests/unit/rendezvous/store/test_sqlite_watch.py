"""A watch of an SQLite store sees changes of other processes, soon and at little cost."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import StoreError
from unirun.rendezvous.store import sqlite
from unirun.rendezvous.store.protocol import Change, Listing, Put, clock
from unirun.rendezvous.store.sqlite import SqliteStore


def test_a_sqlite_watch_sees_changes_of_other_processes_soon_at_little_cost(store: SqliteStore) -> None:
    other = SqliteStore(store.path)
    watch = other.watch("", store.get_prefix("").revision + 1)
    watch.changes(0.05)
    cpu = time.thread_time()
    watch.changes(0.5)
    assert time.thread_time() - cpu < 0.05, "a tenth of a processor would be too much"
    delays = []
    for number in range(10):
        seen: list[float] = []
        waiting = threading.Thread(
            target=lambda seen=seen: (watch.changes(WAIT_TIMEOUT), seen.append(time.monotonic()))
        )
        waiting.start()
        store.txn([], [Put("a", str(number))])
        written = time.monotonic()
        waiting.join(WAIT_TIMEOUT)
        delays.append(seen[0] - written)
    assert min(delays) < 0.04
    other.close()


@pytest.mark.starts_processes
def test_a_sqlite_watch_survives_other_processes_that_open_and_close_the_file(store: SqliteStore) -> None:
    """The last connection to a file removes its log; a process with several connections must keep its locks."""
    code = """
        import sys
        from unirun.rendezvous.store.protocol import Put
        from unirun.rendezvous.store.sqlite import SqliteStore
        store = SqliteStore(sys.argv[1])
        store.txn([], [Put(f"a/{sys.argv[2]}", "x")])
        store.close()
    """
    watch = store.watch("a/", 1)
    watch.changes(0.0)
    for number in range(3):
        command = [sys.executable, "-c", textwrap.dedent(code), str(store.path), str(number)]
        subprocess.run(command, check=True, timeout=WAIT_TIMEOUT)
        news = watch.changes(5.0)
        assert isinstance(news, tuple)
        assert [change.key for change in news if isinstance(change, Change)] == [f"a/{number}"]
        assert store.get(f"a/{number}") is not None


class TestSqliteWatch:
    def test_a_sqlite_watch_reads_nothing_without_a_change(
        self, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        watch = store.watch("", 1)
        assert watch.changes(0) == ()

        def read(connection: sqlite3.Connection) -> tuple[Change, ...]:
            raise AssertionError("the file is the same")

        with monkeypatch.context() as patch:
            patch.setattr(watch, "_read", read)
            assert watch.changes(0) == ()
        store.txn([], [Put("a", "1")])
        assert len(watch.changes(0)) == 1  # type: ignore[arg-type]

    def test_a_sqlite_watch_that_is_closed_while_it_looks_opens_no_file(
        self, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.grant(60)
        watch = store.watch("", 1)
        watch.changes(0)
        end = clock() + 100
        monkeypatch.setattr(sqlite, "clock", lambda: end)
        monkeypatch.setattr(store, "expire", watch.close)
        assert watch.changes(60) == ()
        assert watch._connection is None

    def test_a_sqlite_watch_of_an_unreadable_file_names_it(
        self, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        watch = store.watch("", 1)

        def read(connection: sqlite3.Connection) -> tuple[Change, ...]:
            raise sqlite3.OperationalError("disk I/O error")

        monkeypatch.setattr(watch, "_read", read)
        with pytest.raises(StoreError, match=rf"{store.path} cannot be used: disk I/O error"):
            watch.changes(0)
        monkeypatch.undo()
        assert watch.changes(0) == (), "it goes on when the file can be read again"

    @pytest.mark.parametrize("table", ["state", "changes", "items"])
    def test_a_sqlite_watch_reads_later_what_it_could_not_read(self, store: SqliteStore, table: str) -> None:
        watch = store.watch("", 1)
        watch.changes(0)
        start = store.txn([], [Put("a", "1")]).revision
        if table == "items":
            # They are read when the changes are there no more.
            store.compact(start + 1)
        readable = False

        def authorize(action: int, name: str | None, *_: object) -> int:
            return sqlite3.SQLITE_OK if readable or name != table else sqlite3.SQLITE_DENY

        assert watch._connection is not None
        watch._connection.set_authorizer(authorize)
        for _ in range(2):
            with pytest.raises(StoreError, match="cannot be used"):
                watch.changes(0)
        readable = True
        news = watch.changes(0)
        assert [each.key for each in (news.items if isinstance(news, Listing) else news)] == ["a"]
        assert watch.changes(0) == ()
