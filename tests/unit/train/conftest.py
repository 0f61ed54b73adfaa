"""Each test has a directory of its own, outside of any job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.spec.sample_builders import code

__all__ = ["code"]


@pytest.fixture(autouse=True)
def place(code: Path) -> Path:
    """The working directory."""
    return code
