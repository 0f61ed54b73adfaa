"""The first host, on which the master runs, is lost. With a store elsewhere the job goes on under another master."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.effort import CHAOS, variants
from tests.waiting import WAIT_TIMEOUT

from .cluster import LIVING, UnirunOnHosts, places, since, starts


@pytest.mark.parametrize("power", variants("on", "off"))
def test_without_a_store_elsewhere_the_job_ends_with_what_would_have_saved_it(
    cluster: UnirunOnHosts, power: str
) -> None:
    job = cluster.over_ssh(LIVING, spares=1)
    starts(job, 4)
    if power == "off":
        cluster.hosts[0].cable(up=False)
    cluster.hosts[0].kill_all(sshd=power == "off")
    killed = time.monotonic()
    end = job.end()
    print(f"{since(killed):.1f} s")
    assert end.code == 4, end.err
    assert "its state was on node h1 alone; with --store etcd://… the job would go on" in end.err
    cluster.assert_nothing_left()


@pytest.mark.breaks("gave up waiting for the end of etcd")
@pytest.mark.parametrize("power", variants("on", "off"))
@pytest.mark.parametrize("etcd", variants("of the job", "of somebody else"))
def test_with_etcd_the_job_goes_on_under_a_master_elsewhere(
    cluster: UnirunOnHosts, power: str, etcd: str
) -> None:
    store = "etcd" if etcd == "of the job" else cluster.hosts.etcd().url(timeout=5)
    job = cluster.over_ssh(LIVING, "--store", store, spares=1)
    before = starts(job, 4)
    cluster.warmed_up()
    if power == "off":
        cluster.hosts[0].cable(up=False)
    cluster.hosts[0].kill_all(sshd=power == "off")
    killed = time.monotonic()
    after = starts(job, 4, 1)
    print(f"{after[0].began - killed:.1f} s")
    # On a busy machine an agent may not read the store in time and end its workers, which start elsewhere then.
    expected = (["h2", "h2", "h3", "h3"],) if CHAOS else (["h2", "h2", "h3", "h3"], ["h2"] * 4, ["h3"] * 4)
    assert sorted(places(after)) in expected, job.text
    for one, other in zip(before, after, strict=True):
        assert cluster.last_moment(one) < other.began
    job.lines("the job's master has died; another leads", within=WAIT_TIMEOUT)
    cluster.enough()
    end = job.end()
    assert end.code == 0, end.err


@pytest.mark.chaos
def test_the_command_ends_when_the_rest_has_ended_after_most_hosts_are_lost(cluster: UnirunOnHosts) -> None:
    job = cluster.over_ssh(LIVING, "--store", "etcd", actor="count: 3, per_node: 1")
    starts(job, 3)
    for host in (cluster.hosts[0], cluster.hosts[1]):
        host.cable(up=False)
        host.kill_all(sshd=True)
    killed = time.monotonic()
    end = job.end()
    print(f"{since(killed):.1f} s")
    assert end.code == 4, end.err
    assert "nobody can lead it" in end.err
    assert since(killed) < WAIT_TIMEOUT


@pytest.mark.chaos
@pytest.mark.breaks("gave up waiting for the rest of the nodes' files")
def test_the_command_ends_when_the_head_can_start_no_master(cluster: UnirunOnHosts) -> None:
    """Its agent lives, and goes on trying. A master that is only stopped is replaced (`test_silent_hosts`)."""
    job = cluster.over_ssh(LIVING)
    starts(job, 4)
    log = cluster.folder("h1") / "master.log"
    log.unlink()
    log.symlink_to("/nowhere/master.log")
    os.kill(cluster.pid_on("h1", "unirun-master"), signal.SIGKILL)
    killed = time.monotonic()
    end = job.end()
    print(f"{since(killed):.1f} s")
    assert end.code == 4, end.err
    assert "the job has no master now" in end.err
    assert since(killed) < WAIT_TIMEOUT
    log.unlink()
    cluster.enough()
    cluster.assert_nothing_left()
