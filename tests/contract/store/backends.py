"""The backends of stores: all clients that a backend opens see the same keys."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path

from tests.contract.store.etcd_server import EtcdCluster
from tests.waiting import WAIT_TIMEOUT
from unirun.rendezvous.store.memory import MemoryStore
from unirun.rendezvous.store.protocol import Change, Listing, Store, Watch
from unirun.rendezvous.store.sqlite import SqliteStore
from unirun.rendezvous.store.url import open_store

KINDS = ("memory", "sqlite", "etcd")


class StoreBackend:
    """A store in memory, which has one client only; the base of the others."""

    ttl = 0.6
    """The shortest useful lease."""

    url: str | None = None
    """URL that another process can open."""

    def __init__(self) -> None:
        self.stores: list[Store] = []
        self._memory = MemoryStore()

    def open(self) -> Store:
        """Open one more client."""
        store = self._open()
        self.stores.append(store)
        return store

    def _open(self) -> Store:
        return self._memory

    def compact(self, revision: int) -> None:
        """Delete the store's history before `revision`."""
        self._memory.compact(revision)

    def close(self) -> None:
        for store in self.stores:
            store.close()


class SqliteBackend(StoreBackend):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "store.db"
        self.url = f"sqlite:{self.path}"

    def _open(self) -> Store:
        return SqliteStore(self.path)

    def compact(self, revision: int) -> None:
        store = SqliteStore(self.path)
        store.compact(revision)
        store.close()


class EtcdBackend(StoreBackend):
    ttl = 1.0

    def __init__(self, servers: EtcdCluster) -> None:
        super().__init__()
        self._servers = servers
        self.url = servers.url(prefix=f"/{uuid.uuid4().hex}/")

    def _open(self) -> Store:
        return open_store(self.url or "")

    def compact(self, revision: int) -> None:
        self._servers.ctl("compact", str(revision))

    def close(self) -> None:
        super().close()
        # A lease that ended during the next test would count as one of its revisions.
        for line in self._servers.ctl("lease", "list").splitlines()[1:]:
            try:
                self._servers.ctl("lease", "revoke", line)
            except AssertionError as error:
                # One may expire between the list and here.
                if "lease not found" not in str(error):
                    raise


def read(watch: Watch, done: Callable[[list[Change]], bool]) -> list[Change]:
    """Read changes until `done`; a `Listing` is a failure."""
    seen: list[Change] = []
    deadline = time.monotonic() + WAIT_TIMEOUT
    while not done(seen):
        assert time.monotonic() < deadline, f"nothing came after {seen[-3:]}"
        news = watch.changes(0.5)
        assert not isinstance(news, Listing), "nothing was compacted, and a listing came"
        seen += news
    return seen


def read_batch(watch: Watch) -> tuple[Change, ...] | Listing:
    """The next result of a watch."""
    deadline = time.monotonic() + WAIT_TIMEOUT
    while True:
        news = watch.changes(0.5)
        if news:
            return news
        assert time.monotonic() < deadline, "nothing came"
