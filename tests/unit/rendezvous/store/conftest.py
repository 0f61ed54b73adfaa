"""An SQLite store of each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from unirun.rendezvous.store.sqlite import SqliteStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "store.db", timeout=5)
    yield store
    store.close()
