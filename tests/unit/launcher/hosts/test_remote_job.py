"""The command gives up a job on other hosts by the news that it gets from the hosts."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

import pytest

from unirun.launcher.hosts import ssh
from unirun.launcher.hosts.ssh import RemoteProcesses
from unirun.observe.jobdir import JobDir


@pytest.fixture
def processes(tmp_path: Path) -> RemoteProcesses:
    """The processes of a job on three hosts, with a store elsewhere, whose master leads."""
    found = RemoteProcesses(JobDir(tmp_path), ["h1", "h2", "h3"])
    found.master = 4242
    return found


def test_a_job_without_a_master_is_given_up_when_the_only_hosts_that_answer_have_ended(
    processes: RemoteProcesses,
) -> None:
    assert not processes.given_up(led=True)
    processes.complete("h3")
    processes.silent("h1", True)
    assert not processes.given_up(led=True)
    processes.silent("h2", True)
    assert processes.given_up(led=True)
    # Nor is the rest of their files waited for.
    assert processes.end() is None


def test_a_master_that_may_be_busy_is_waited_for_and_one_that_cannot_be_started_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "NO_MASTER_STORE_TIMEOUT", 0.0)
    found = ssh.RemoteProcesses(JobDir(tmp_path), ["h1"])
    assert not found.given_up(led=True, busy=True)
    assert found.given_up(led=True, busy=False)


def test_hosts_that_answer_again_may_have_a_master(processes: RemoteProcesses) -> None:
    assert not processes.given_up(led=True)
    processes.complete("h3")
    for node in ("h1", "h2"):
        processes.silent(node, True)
    processes.silent("h2", False)
    assert not processes.given_up(led=True)


def test_a_host_that_has_left_under_a_master_says_nothing_of_its_end(processes: RemoteProcesses) -> None:
    processes.complete("h3")
    assert not processes.given_up(led=True)
    for node in ("h1", "h2"):
        processes.silent(node, True)
    assert not processes.given_up(led=True)


def test_a_job_is_given_up_when_all_have_ended(processes: RemoteProcesses) -> None:
    for node in ("h1", "h2", "h3"):
        processes.complete(node)
    assert processes.given_up(led=True)


@pytest.mark.parametrize("says", ["complete", "silent"])
def test_the_end_waits_for_a_host_until_it_is_complete_or_silent(
    processes: RemoteProcesses, says: str
) -> None:
    processes.complete("h1")
    processes.complete("h2")
    last = partial(processes.silent, "h3", True) if says == "silent" else partial(processes.complete, "h3")
    timer, began = threading.Timer(0.05, last), time.monotonic()
    timer.start()
    assert processes.end() is None
    assert time.monotonic() - began < ssh.OUTPUT_DRAIN_TIMEOUT
    timer.join()
