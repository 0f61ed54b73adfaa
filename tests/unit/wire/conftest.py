"""Each kind of endpoint in turn; no test leaves a descriptor open."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.wire.endpoints import KINDS, Endpoint


@pytest.fixture(params=KINDS)
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Endpoint:
    return Endpoint(request.param, tmp_path)


@pytest.fixture(autouse=True)
def closed(no_descriptors_are_left: None) -> None:
    """After each test."""
