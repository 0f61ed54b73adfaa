"""The hosts that a copy is made of, and the part of their files that it has already."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.unit.conftest import descriptors
from unirun.launcher.hostlist import Host
from unirun.launcher.hosts import copying
from unirun.launcher.hosts.copying import offsets_here, record_hosts, recorded_hosts
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.creation import create_job
from unirun.wire.address import TcpAddress
from unirun.wire.handshake import new_token

HEAD = TcpAddress("10.0.0.1", 29400, "h1")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    return tmp_path


def copy(head: TcpAddress | None) -> JobDir:
    """The copy of a job, with the files of two nodes."""
    job, lock = create_job("mine", new_token(), head=head)
    os.close(lock)
    (job.path / "events.jsonl").write_text("12345")
    (job.path / "agent.h1.log").write_text("123")
    log = job.logs / "actor" / "0" / "0" / "stdout.log"
    log.parent.mkdir(parents=True)
    log.write_text("1234567")
    # No copy makes a link.
    (log.parent / "latest.log").symlink_to(log)
    return job


def test_hosts_are_recorded_once_and_those_that_join_are_added(home: Path) -> None:
    job = copy(HEAD)
    assert recorded_hosts(job) == ()
    record_hosts(job, [Host("h1", "me@h1"), Host("h2", "h2", 4)])
    record_hosts(job, [Host("h3", "h3"), Host("h1", "me@h1")])
    assert recorded_hosts(job) == (Host("h1", "me@h1"), Host("h2", "h2", 4), Host("h3", "h3"))


def test_a_copy_goes_on_where_it_ends(home: Path) -> None:
    job = copy(HEAD)
    logs = {"logs/actor/0/0/stdout.log": 7, "agent.h1.log": 3}
    assert offsets_here(job, "h2") == logs
    assert offsets_here(job, "h1") == logs | {"events.jsonl": 5}


def test_what_masters_of_several_hosts_may_have_written_is_copied_anew(home: Path) -> None:
    assert "events.jsonl" not in offsets_here(copy(None), "h1")


def test_of_several_processes_that_would_copy_one_does(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, copies = copy(HEAD), 0

    async def copy_all(*_: object) -> None:
        nonlocal copies
        copies += 1
        # Another one starts meanwhile.
        if copies < 3:
            assert await asyncio.to_thread(copying.main, job.run_id, -1) == 0

    monkeypatch.setattr(copying, "_copy_all", copy_all)
    monkeypatch.setattr(copying, "ignore_signals", lambda: None)
    assert copying.main(job.run_id, -1) == 0
    assert copies == 1
    # Each of these processes would have ended.
    for number, path in descriptors().items():
        if path == str(job.lock):
            os.close(int(number))
