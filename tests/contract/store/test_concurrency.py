"""Many threads and processes at once: no write is lost."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.contract.store.backends import SqliteBackend, StoreBackend, read
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import StoreError
from unirun.rendezvous.store.protocol import Put, RevisionIs, Store
from unirun.rendezvous.store.sqlite import SqliteStore
from unirun.rendezvous.store.url import open_store


def count_up(store: Store, times: int) -> None:
    """Add one, `times` times, by compare-and-swap."""
    done = 0
    while done < times:
        item = store.get("counter")
        number, revision = (int(item.value), item.revision) if item else (0, 0)
        done += store.txn([RevisionIs("counter", revision)], [Put("counter", str(number + 1))]).succeeded


def count_up_in_a_process(url: str, times: int) -> None:
    store = open_store(url)
    count_up(store, times)
    store.close()


def test_increments_of_many_threads_are_not_lost(backend: StoreBackend, store: Store) -> None:
    watch = store.watch("", store.get_prefix("").revision + 1)
    clients = [store, store, store, backend.open()]
    threads = [threading.Thread(target=count_up, args=(client, 25)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_TIMEOUT)
    item = store.get("counter")
    assert item is not None
    assert item.value == "100"
    seen = read(watch, lambda changes: len(changes) == 100)
    assert [change.value for change in seen] == [str(number) for number in range(1, 101)]


@pytest.mark.parametrize("backend", ["sqlite", "etcd"], indirect=True)
def test_increments_of_many_processes_are_not_lost(backend: StoreBackend, store: Store) -> None:
    assert backend.url is not None
    watch = store.watch("", store.get_prefix("").revision + 1)
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=count_up_in_a_process, args=(backend.url, 30), daemon=True) for _ in range(3)
    ]
    for process in processes:
        process.start()
    count_up(store, 30)
    for process in processes:
        process.join(WAIT_TIMEOUT)
        assert process.exitcode == 0
    seen = read(watch, lambda changes: len(changes) == 120)
    assert [change.value for change in seen] == [str(number) for number in range(1, 121)]


def test_processes_may_open_a_new_file_at_once(tmp_path: Path) -> None:
    backend = SqliteBackend(tmp_path)
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=count_up_in_a_process, args=(backend.url, 1), daemon=True) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(WAIT_TIMEOUT)
        assert process.exitcode == 0
    store = backend.open()
    item = store.get("counter")
    store.close()
    assert item is not None
    assert item.value == "4"


def make_files(folder: str, count: int, together: Any, troubles: Any) -> None:
    for number in range(count):
        together.wait(WAIT_TIMEOUT)
        try:
            SqliteStore(Path(folder, f"{number}.db")).close()
        except StoreError as error:
            troubles.put(str(error))


def test_of_processes_that_create_a_sqlite_file_at_once_one_creates_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    together, troubles = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=make_files, args=(str(tmp_path), 100, together, troubles)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(WAIT_TIMEOUT)
    assert [process.exitcode for process in processes] == [0] * 4
    assert troubles.empty(), troubles.get()
