"""Processes that are killed while they use one file."""

from __future__ import annotations

import multiprocessing
import sqlite3
import time
from functools import partial
from itertools import groupby
from pathlib import Path

from tests.contract.store.backends import SqliteBackend, read
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.rendezvous.store.protocol import Change, Put, Store
from unirun.rendezvous.store.sqlite import SqliteStore

WIDTH = 8


def write_for_ever(path: Path) -> None:
    """Put the next number under several keys at once, in a loop."""
    store = SqliteStore(path)
    item = store.get("k0")
    number = int(item.value) if item else 0
    while True:
        number += 1
        lease = store.grant(60)
        store.txn([], [Put(f"k{backend}", str(number), lease) for backend in range(WIDTH)])
        store.txn([], [Put("large", "x" * 50_000)])


def numbers(store: Store) -> set[str]:
    return {item.value for item in store.get_prefix("").items if item.key != "large"}


def test_a_writer_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    backend = SqliteBackend(tmp_path)
    reader = backend.open()
    watch = reader.watch("", 1)
    spawn = multiprocessing.get_context("spawn")
    seen: list[Change] = []

    def written(revision: int) -> bool:
        return reader.get_prefix("").revision > revision

    for round_ in range(6):
        before = reader.get_prefix("").revision
        writer = spawn.Process(target=write_for_ever, args=(backend.path,), daemon=True)
        writer.start()
        eventually(partial(written, before + 5 * (1 + round_)))
        time.sleep(0.003 * round_)  # at another moment each time
        writer.kill()
        writer.join(WAIT_TIMEOUT)
        fresh = SqliteStore(backend.path)
        assert len(numbers(fresh)) == 1, "no transaction is half there"
        fresh.txn([], [Put("mark", str(round_))], ["mark/"])
        fresh.txn([], deletes=["mark"])
        fresh.close()
    last = reader.get_prefix("").revision
    seen = read(watch, lambda changes: bool(changes) and changes[-1].revision == last)
    revisions = [revision for revision, _ in groupby(seen, key=lambda change: change.revision)]
    assert revisions == list(range(2, last + 1)), "each transaction was seen once, in order"
    for _, changes in groupby(seen, key=lambda change: change.revision):
        assert sum(change.key.startswith("k") for change in changes) in (0, WIDTH)
    backend.close()
    [answer] = sqlite3.connect(backend.path).execute("PRAGMA integrity_check").fetchone()
    assert answer == "ok"


def read_until(path: Path, number: str) -> None:
    store = SqliteStore(path)
    watch = store.watch("", 1)
    deadline = time.monotonic() + WAIT_TIMEOUT
    while not any(change.value == number for change in watch.changes(1)):  # type: ignore[union-attr]
        assert time.monotonic() < deadline
    store.close()


def test_readers_in_other_processes_see_every_change(tmp_path: Path) -> None:
    backend = SqliteBackend(tmp_path)
    store = backend.open()
    spawn = multiprocessing.get_context("spawn")
    readers = [spawn.Process(target=read_until, args=(backend.path, "100"), daemon=True) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(1, 101):
        store.txn([], [Put("a", str(number))])
    for reader in readers:
        reader.join(WAIT_TIMEOUT)
        assert reader.exitcode == 0
    backend.close()
