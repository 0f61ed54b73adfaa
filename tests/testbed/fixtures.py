"""Test beds for pytest: where the machine cannot have one, the test is skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.testbed.hosts import Hosts
from tests.testbed.machine import Unavailable
from tests.testbed.slurm import Slurm


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


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    """A Slurm of three nodes on this host."""
    with available(), Slurm() as cluster:
        yield cluster


@pytest.fixture
def slurm_of_hosts(hosts: Hosts) -> Iterator[Slurm]:
    """A Slurm whose nodes are `hosts`."""
    with available(), Slurm(hosts) as cluster:
        yield cluster
