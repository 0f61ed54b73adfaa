"""The command of a job over ssh is killed or interrupted: nothing is left on any host."""

from __future__ import annotations

import signal
import time
from functools import partial

import pytest

from tests.effort import variants
from tests.waiting import eventually
from unirun.observe.jobdir import JobDir

from .cluster import LIVING, UnirunOnHosts, since, starts

GONE = 60.0
"""Seconds after which nothing of a job may be left on any host."""

STUBBORN = """
    # Does not end when it is told to, nor does its child.
    import os, signal, subprocess, sys, time
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("up", os.environ["RANK"], flush=True)
    time.sleep(600)
"""


def nothing_is_left(cluster: UnirunOnHosts) -> None:
    """No process on any host, but for sshd; and no lock of the job is held."""

    def empty(node: str) -> bool:
        return not cluster.others(node)

    def free(job: JobDir) -> bool:
        return not job.alive()

    for host in cluster.hosts:
        eventually(partial(empty, host.name), f"{host.name} has no process", GONE)
        job = JobDir(cluster.folder(host.name))
        eventually(partial(free, job), f"the lock of {host.name} is free", GONE)


@pytest.mark.breaks(r"^temporary name .*/\.state\.json\.partial$")
def test_a_command_that_is_killed_takes_everything_on_all_hosts_with_it(cluster: UnirunOnHosts) -> None:
    job = cluster.over_ssh(LIVING, actor="count: 6")
    starts(job, 6)
    job.signal(signal.SIGKILL)
    killed = time.monotonic()
    nothing_is_left(cluster)
    print(f"{since(killed):.1f} s")


@pytest.mark.parametrize("times", variants(2, 1))
def test_interrupted_once_or_twice_a_job_ends_on_all_hosts(cluster: UnirunOnHosts, times: int) -> None:
    script = LIVING if times == 1 else STUBBORN
    job = cluster.over_ssh(script, actor="count: 3, per_node: 1")
    job.lines(r"\] up", 3)
    job.signal(signal.SIGINT)
    job.lines("SIGINT: stopping")
    if times == 2:
        job.signal(signal.SIGINT)
        job.lines("SIGINT: killing the workers now")
    end = job.end()
    assert end.code == 130, end.err
    nothing_is_left(cluster)
