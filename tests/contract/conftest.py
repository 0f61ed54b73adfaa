"""Each transport plays the whole contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.stage import KINDS, Cast, Stage


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of what only a process can do, like being stopped by a signal, are not for threads."""
    for item in list(items):
        threads = "inproc" in item.name.partition("[")[2]
        if threads and item.get_closest_marker("processes") is not None:
            items.remove(item)
            config.hook.pytest_deselected(items=[item])


@pytest.fixture(scope="session", params=KINDS)
def theatre(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A transport with a caller in this process."""
    folder: Path = tmp_path_factory.mktemp("stage")
    stage = Stage(request.param, folder / "calls")
    yield stage
    stage.close()


@pytest.fixture(scope="session")
def troupe(theatre: Stage) -> Cast:
    """Three workers for tests that leave them as they were."""
    return theatre.role(3)


@pytest.fixture
def stage(theatre: Stage) -> Iterator[Stage]:
    """The same, whose workers end with the test."""
    there = theatre.players
    yield theatre
    theatre.end_players(there)
