"""Fixtures of the tests with vLLM: they are run by ``make engines`` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.engine_job import saved, started
from tests.engines.server import Server
from tests.integration.conftest import script as script
from tests.integration.harness import Unirun, command_in

LIMIT = 1800.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test makes the environment, and servers start slowly on a busy machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(2 * LIMIT))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of a Llama by its seed."""
    return saved(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def serve(
    models: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """Starts engines with the Llama of seed 0, which end with the module."""
    with started(models(0), tmp_path_factory.mktemp("engines")) as start:
        yield start


@pytest.fixture
def unirun(tmp_path: Path) -> Iterator[Unirun]:
    """The command, whose jobs must leave no process."""
    with command_in(tmp_path) as command:
        yield command
