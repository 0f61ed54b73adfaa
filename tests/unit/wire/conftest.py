"""Each kind of place for streams in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.wire.places import KINDS, Place


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path)
