"""Fixtures: each store runs the whole contract suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.store.backends import KINDS, EtcdBackend, SqliteBackend, StoreBackend
from tests.contract.store.etcd_server import EtcdCluster
from unirun.rendezvous.store.protocol import Store

# One member needs nobody's vote; with a short election time etcd also grants leases of one second.
_FAST = ("--heartbeat-interval", "20", "--election-timeout", "200")


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """An etcd of one member, for all tests that do not stop it."""
    servers = EtcdCluster(tmp_path_factory.mktemp("etcd"), flags=_FAST)
    yield servers
    servers.stop()


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreBackend]:
    """An empty backend for each kind of store."""
    match request.param:
        case "memory":
            backend = StoreBackend()
        case "sqlite":
            backend = SqliteBackend(tmp_path)
        case _:
            backend = EtcdBackend(request.getfixturevalue("etcd"))
    yield backend
    backend.close()


@pytest.fixture
def store(backend: StoreBackend) -> Store:
    """A client of the backend."""
    return backend.open()


@pytest.fixture
def other_store(backend: StoreBackend) -> Store:
    """A second client."""
    return backend.open()
