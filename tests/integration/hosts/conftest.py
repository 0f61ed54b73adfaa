"""The command for jobs on three hosts; at the end of a test no process of its jobs may be left on any of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed.hosts import Hosts

from ..harness import swept
from .cluster import UnirunOnHosts


@pytest.fixture
def cluster(hosts: Hosts, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[UnirunOnHosts]:
    """The command on this machine, which has the hosts in its ssh configuration. Agents start warm, but for tests that
    are marked ``cold``."""
    cold = request.node.get_closest_marker("cold") is not None
    over_ssh = UnirunOnHosts(tmp_path, hosts, None if cold else request.getfixturevalue("warm_hosts"))
    if (marker := request.node.get_closest_marker("breaks")) is not None:
        over_ssh.breaks = marker.args[0]
    with swept(over_ssh) as command:
        yield command
        for host in hosts:
            # What agents and masters have said, to be read after a failure: the files of a host go with it.
            for log in host.path(command.home).rglob("*.log"):
                if "logs" not in log.parts:
                    shutil.copy(log, tmp_path / f"{host.name}-{log.name}")
