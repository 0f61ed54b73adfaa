"""No test leaves a descriptor open."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def closed(no_descriptors_are_left: None) -> None:
    """After each test."""
