"""A master with its sockets, for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.launcher.master.harness import MasterHarness


@pytest.fixture
def harness(tmp_path: Path) -> MasterHarness:
    return MasterHarness(tmp_path)
