"""Test beds for pytest: where the machine cannot have one, the test is skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.testbed.hosts import Hosts
from tests.testbed.machine import Unavailable


@contextmanager
def available() -> Iterator[None]:
    """Skip the test when its test bed is not possible here."""
    try:
        yield
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Three hosts without a shared directory."""
    with available(), Hosts(3) as three:
        yield three
