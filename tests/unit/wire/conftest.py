"""Each kind of endpoint in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.wire.endpoints import KINDS, Endpoint


@pytest.fixture(params=KINDS)
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Endpoint:
    return Endpoint(request.param, tmp_path)
