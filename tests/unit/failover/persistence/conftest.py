"""A store that fails on demand, and a job."""

from __future__ import annotations

import pytest

from tests.unit.failover.job import Job
from tests.unit.failover.persistence.unsteady import UnsteadyStore


@pytest.fixture
def store() -> UnsteadyStore:
    return UnsteadyStore()


@pytest.fixture
def job() -> Job:
    return Job({"actor": 4}, restarts={"actor": 3}).running()
