"""A master with its sockets, for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.launcher.master.court import Court


@pytest.fixture
def court(tmp_path: Path) -> Court:
    return Court(tmp_path)
