"""The command gives up a job on other hosts by the news that it gets from the hosts."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from unirun.collocation import Inventory, parse_fake
from unirun.launcher.hostlist import Host
from unirun.launcher.hosts import ssh
from unirun.launcher.hosts.ssh import RemoteJob
from unirun.observe.jobdir import JobDir
from unirun.observe.status import JobStatus, write_status
from unirun.rendezvous.creation import new_uid
from unirun.spec.job import Entry, JobSpec, RoleSpec
from unirun.wire.address import TcpAddress
from unirun.wire.handshake import new_token
from unirun.wire.messages import AgentTask, Invite

SPEC = JobSpec("job", "run-1", (RoleSpec("actor", 1, Entry("script", "a.py")),), ("actor",))


@pytest.fixture
def job(tmp_path: Path) -> RemoteJob:
    """A job on three hosts, with a store elsewhere, whose master leads."""
    found = RemoteJob(JobDir(tmp_path), SPEC, ["h1", "h2", "h3"])
    found.led_by(4242)
    return found


def test_a_job_without_a_master_is_given_up_when_the_only_hosts_that_answer_have_ended(
    job: RemoteJob,
) -> None:
    assert not job.given_up(led=True)
    job.complete("h3")
    job.silent("h1", True)
    assert not job.given_up(led=True)
    job.silent("h2", True)
    assert job.given_up(led=True)
    # Nor is the rest of their files waited for.
    assert job.end() is None


def test_a_master_that_may_be_busy_is_waited_for_and_one_that_cannot_be_started_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "NO_MASTER_STORE_TIMEOUT", 0.0)
    found = RemoteJob(JobDir(tmp_path), SPEC, ["h1"])
    assert not found.given_up(led=True, busy=True)
    assert found.given_up(led=True, busy=False)


def test_hosts_that_answer_again_may_have_a_master(job: RemoteJob) -> None:
    assert not job.given_up(led=True)
    job.complete("h3")
    for node in ("h1", "h2"):
        job.silent(node, True)
    job.silent("h2", False)
    assert not job.given_up(led=True)


def test_a_host_that_has_left_under_a_master_says_nothing_of_its_end(job: RemoteJob) -> None:
    job.complete("h3")
    assert not job.given_up(led=True)
    for node in ("h1", "h2"):
        job.silent(node, True)
    assert not job.given_up(led=True)


def test_a_job_is_given_up_when_all_have_ended(job: RemoteJob) -> None:
    for node in ("h1", "h2", "h3"):
        job.complete(node)
    assert job.given_up(led=True)


@pytest.mark.parametrize("says", ["complete", "silent"])
def test_the_end_waits_for_a_host_until_it_is_complete_or_silent(job: RemoteJob, says: str) -> None:
    job.complete("h1")
    job.complete("h2")
    last = partial(job.silent, "h3", True) if says == "silent" else partial(job.complete, "h3")
    timer, began = threading.Timer(0.05, last), time.monotonic()
    timer.start()
    assert job.end() is None
    assert time.monotonic() - began < ssh.OUTPUT_DRAIN_TIMEOUT
    timer.join()


def test_the_end_waits_for_no_host_that_the_job_has_lost(job: RemoteJob) -> None:
    job.complete("h1")
    job.silent("h2", True)
    write_status(job.job, JobStatus("run-1", "job", "succeeded", "", 1.0, 2.0, 0, (), lost=("h3",)))
    began = time.monotonic()
    assert job.end() is None
    assert time.monotonic() - began < ssh.OUTPUT_DRAIN_TIMEOUT


@pytest.mark.parametrize("store", ["", "etcd://10.0.0.1:2379"])
def test_masters_are_looked_for_in_a_store_of_several_hosts_and_else_on_the_head(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store knows where the next master is, when the host of the first one is lost."""
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    head = TcpAddress("10.0.0.1", 29400, "h1")
    task = AgentTask(SPEC, "h1", ("h1",), uid=new_uid(), head=head, store=store)
    invite = Invite(new_token().hex(), "command", insecure=True)
    with ssh._own_directory(invite, task, None) as (made, _):
        assert made.head == (None if store else head)
        assert made.alive()
    assert not made.alive()


def test_the_user_cuts_the_devices_of_hosts_that_have_some_and_the_processors_of_the_others() -> None:
    gpus, cpus = (
        replace(parse_fake(f"fake:nodes=1,devices={count},cpus=8").nodes[0], name=name)
        for count, name in ((4, "h1"), (0, "h2"))
    )
    inventory = Inventory((gpus, cpus))
    hosts = [Host("h1", "h1", 2), Host("h2", "me@h2", 3)]
    cut = ssh.allowed(hosts, inventory)
    assert cut.nodes == (replace(gpus, devices=gpus.devices[:2]), replace(cpus, cpus=cpus.cpus[:3]))
    assert ssh.allowed([replace(host, slots=None) for host in hosts], inventory) == inventory
    assert ssh.allowed([replace(host, slots=99) for host in hosts], inventory) == inventory
