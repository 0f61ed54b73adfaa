"""A store that fails on demand, and a job."""

from __future__ import annotations

import pytest

from tests.unit.failover.context.faulty_store import FaultyStore
from tests.unit.failover.job import Job


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def job() -> Job:
    return Job({"actor": 4}, restarts={"actor": 3}).running()
