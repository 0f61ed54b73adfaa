"""Each transport runs the whole contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.cluster import TRANSPORTS, Cluster, Role


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of what only a process can do, like being stopped by a signal, are not for threads."""
    for item in list(items):
        threads = "inproc" in item.name.partition("[")[2]
        if threads and item.get_closest_marker("processes") is not None:
            items.remove(item)
            config.hook.pytest_deselected(items=[item])


@pytest.fixture(scope="session", params=TRANSPORTS)
def session_cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A transport with a caller in this process."""
    folder: Path = tmp_path_factory.mktemp("cluster")
    cluster = Cluster(request.param, folder / "calls")
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def shared_role(session_cluster: Cluster) -> Role:
    """Three workers for tests that leave them as they were."""
    return session_cluster.role(3)


@pytest.fixture
def cluster(session_cluster: Cluster) -> Iterator[Cluster]:
    """The same, whose workers end with the test."""
    before = session_cluster.workers
    yield session_cluster
    session_cluster.end_workers(before)
