"""A store that fails on demand, and a job."""

from __future__ import annotations

import pytest

from tests.unit.failover.job import Job
from tests.unit.failover.persistence.faulty_store import FaultyStore


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def job() -> Job:
    return Job({"actor": 4}, restarts={"actor": 3}).running()
