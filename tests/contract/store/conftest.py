"""Fixtures: each store runs the whole contract suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.store.etcd_server import Servers
from tests.contract.store.places import KINDS, EtcdPlace, Place, SqlitePlace
from unirun.rendezvous.store.protocol import Store

# One member needs nobody's vote; with a short election time etcd also grants leases of one second.
_FAST = ("--heartbeat-interval", "20", "--election-timeout", "200")


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """An etcd of one member, for all tests that do not stop it."""
    servers = Servers(tmp_path_factory.mktemp("etcd"), flags=_FAST)
    yield servers
    servers.stop()


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """An empty place for each kind of store."""
    match request.param:
        case "memory":
            place = Place()
        case "sqlite":
            place = SqlitePlace(tmp_path)
        case _:
            place = EtcdPlace(request.getfixturevalue("etcd"))
    yield place
    place.close()


@pytest.fixture
def store(place: Place) -> Store:
    """A client of the place."""
    return place.open()


@pytest.fixture
def other(place: Place) -> Store:
    """A second client."""
    return place.open()
