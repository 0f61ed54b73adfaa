"""Test beds for pytest: where the machine cannot have one, the test is skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.testbed.hosts import Hosts
from tests.testbed.machine import Unavailable
from tests.testbed.slurm import Slurm
from tests.testbed.warm import WarmHosts
from unirun.observe.jobdir import temporary


@contextmanager
def available() -> Iterator[None]:
    """Skip the test when its test bed is not possible here."""
    try:
        yield
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def warm_hosts(tmp_path_factory: pytest.TempPathFactory) -> WarmHosts:
    """Warm processes of hosts, so that not every agent imports torch."""
    return WarmHosts(tmp_path_factory.mktemp("warm-hosts"))


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Three hosts without a shared directory. Each has a warm process where jobs look for one, but for tests that are
    marked ``cold``."""
    with available(), Hosts(3) as three:
        if request.node.get_closest_marker("cold") is None:
            request.getfixturevalue("warm_hosts").warm(three, temporary("warm processes"))
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
