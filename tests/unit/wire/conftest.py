"""Each kind of endpoint in turn, and the environment of a worker whose agent is at one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.wire.endpoints import KINDS, Endpoint
from unirun.wire import blocking


@pytest.fixture(params=KINDS)
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Endpoint:
    return Endpoint(request.param, tmp_path)


@pytest.fixture
def agent(tmp_path: Path) -> Endpoint:
    """The endpoint of an agent, which does not listen yet."""
    return Endpoint("unix", tmp_path)


@pytest.fixture
def environ(agent: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The environment of a worker; its link is closed after the test, as in a fork."""
    (tmp_path / "token").write_text(agent.token.hex())
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setattr(blocking, "_link", None)
    monkeypatch.setattr(blocking, "_moved", set())
    yield {
        "UNIRUN_SOCKET": str(agent.path),
        "UNIRUN_ROLE": "actor",
        "UNIRUN_RANK": "3",
        "UNIRUN_INCARNATION": "2",
    }
    blocking._close_in_fork()
