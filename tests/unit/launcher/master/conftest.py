"""A master with its sockets, for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.launcher.master.harness import MasterHarness
from tests.waiting import WAIT_TIMEOUT
from unirun.launcher.master import shell


@pytest.fixture
def harness(tmp_path: Path) -> MasterHarness:
    return MasterHarness(tmp_path)


@pytest.fixture(autouse=True)
def no_wait_runs_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A master whose peers have closed their streams leaves at once, and one that waits in vain does not pass for it."""
    waits: list[str] = []
    monkeypatch.setattr(shell, "STREAM_CLOSE_TIMEOUT", 10 * WAIT_TIMEOUT)
    monkeypatch.setattr(shell, "gave_up", lambda wait, seconds: waits.append(wait))
    yield
    assert waits == []
