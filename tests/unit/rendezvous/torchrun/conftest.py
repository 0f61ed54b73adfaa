"""Fixtures of all tests here."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> None:
    """Stores of torch live as long as its threads."""
