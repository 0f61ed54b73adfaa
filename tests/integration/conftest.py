"""Fixtures of the integration tests: real processes, a home of their own, nothing left behind."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.store.etcd_server import Servers

from .harness import Unirun, command_in


@pytest.fixture
def unirun(tmp_path: Path) -> Iterator[Unirun]:
    """The command; at the end of the test no process of its jobs may be left."""
    with command_in(tmp_path) as command:
        yield command


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """Writes a worker's script: ``script("print(1)")``."""

    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture(scope="session")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """An etcd of three members, for tests that leave all of them running."""
    servers = Servers(tmp_path_factory.mktemp("trio"), 3)
    yield servers
    servers.stop()
