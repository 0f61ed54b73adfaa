"""A trial of an experiment on three hosts, over ssh. Its files are in a directory that all of them share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed.fixtures import available
from tests.testbed.hosts import Hosts

from .. import test_trials as trials
from ..harness import swept
from .cluster import UnirunOnHosts


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    path = tmp_path / "shared"
    path.mkdir()
    return path


@pytest.fixture
def cluster(tmp_path: Path, shared: Path) -> Iterator[UnirunOnHosts]:
    """The command on this machine, for hosts that share a directory with it."""
    with (
        available(),
        Hosts(3, shared=[shared]) as hosts,
        swept(UnirunOnHosts(tmp_path / "command", hosts)) as command,
    ):
        yield command


@pytest.mark.timeout(300)
@pytest.mark.chaos
def test_a_trial_is_the_same_on_hosts_though_a_host_is_lost(cluster: UnirunOnHosts, shared: Path) -> None:
    cluster.root.mkdir(exist_ok=True)
    environment = {**trials.environment(cluster), "KILLED": str(shared)}
    trial = ("experiment", "start", *trials.SMALL, "--root", shared)
    here = cluster(*trial, "-f", "here", env=environment, cwd=shared, within=240)
    assert here.code == 0, here.err
    hosts = ("--mode", "ssh", "--hosts", "h1:1,h2:1,h3:1")
    running = cluster.start(*trial, "-f", "there", *hosts, env=environment, cwd=shared)
    running.lines(r"step 3: criticTrain")
    cluster.hosts[1].kill_all()
    result = running.end(240)
    assert result.code == 0, result.err
    trials.equal(shared / "killing" / "there", shared / "killing" / "here")
