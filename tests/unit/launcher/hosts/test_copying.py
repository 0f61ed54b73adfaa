"""The hosts that a copy is made of, and the part of their files that it has already."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.conftest import descriptors
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.launcher.hostlist import Host
from unirun.launcher.hosts import copying
from unirun.launcher.hosts.connection import RemoteNode
from unirun.launcher.hosts.copying import Mirror, offsets_here, record_hosts, recorded_hosts
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


def test_what_the_agents_of_all_hosts_have_written_to_one_log_is_copied_anew(home: Path) -> None:
    job = copy(HEAD)
    for name in ("filtered_stdout.log", "filtered_stderr.log"):
        (job.logs / name).write_text("[actor:0] from h1\n[actor:1] from h2\n")
    assert {*offsets_here(job, "h1")} == {"logs/actor/0/0/stdout.log", "agent.h1.log", "events.jsonl"}
    asyncio.run(Mirror(job, {}, print).run())
    assert not [*job.logs.glob("filtered*")]
    assert (job.path / "events.jsonl").read_text() == "12345"


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


def test_a_process_that_looks_whether_the_job_lives_keeps_no_copy_from_beginning(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = copy(HEAD)
    looks, takes = (os.open(job.lock, os.O_RDONLY) for _ in range(2))
    fcntl.flock(looks, fcntl.LOCK_SH)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            fcntl.flock(looks, fcntl.LOCK_UN)

    monkeypatch.setattr(time, "sleep", sleep)
    assert copying._takes(job, takes)
    assert waits == [copying.LOCK_RETRY_INTERVAL] * 3
    assert not copying._takes(job, looks), "it is held now"
    assert len(waits) == 3
    os.close(takes)
    fcntl.flock(looks, fcntl.LOCK_SH)
    os.close(looks)


class FakePopen:
    """The process that copies, which has the descriptors of the latest call of `subprocess.Popen`."""

    kept: tuple[int, ...] = ()
    started = 0

    def __init__(self, command: list[str], *, pass_fds: list[int], **_: object) -> None:
        type(self).started += 1
        type(self).kept = tuple(map(os.dup, pass_fds))
        assert command[4:] == ["mine", *map(str, pass_fds)]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> type[FakePopen]:
    class Fresh(FakePopen):
        pass

    def no_wait(*_: object) -> None:
        raise AssertionError("a wait has run into its time-out")

    monkeypatch.setattr(copying, "subprocess", SimpleNamespace(Popen=Fresh, DEVNULL=-3))
    monkeypatch.setattr(copying, "CATCH_UP_TIMEOUT", WAIT_TIMEOUT)
    monkeypatch.setattr(copying, "gave_up", no_wait)
    return Fresh


def test_a_copy_is_current_when_the_process_that_copies_says_so_or_ends(
    home: Path, process: type[FakePopen]
) -> None:
    job = copy(HEAD)
    copying.make_current(job)
    assert process.started == 0, "no host has files that are missing"
    record_hosts(job, [Host("h1", "h1")])
    lock = os.open(job.lock, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    copying.make_current(job)
    assert process.started == 0, "another process copies"
    os.close(lock)

    def says_so() -> None:
        eventually(lambda: bool(process.kept), "it has started")
        for handle in process.kept:
            os.close(handle)

    thread = threading.Thread(target=says_so)
    thread.start()
    copying.make_current(job)
    thread.join()
    assert process.started == 1


def test_a_process_that_goes_on_copying_has_the_lock(home: Path, process: type[FakePopen]) -> None:
    job = copy(HEAD)
    lock = os.open(job.lock, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    copying.copy_on(job, lock)
    os.close(lock)
    assert job.alive()
    for handle in process.kept:
        os.close(handle)
    assert not job.alive()


@pytest.mark.parametrize("detached", [False, True])
def test_a_copy_that_cannot_be_made_current_is_read_as_it_is(
    home: Path, detached: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk is full, for example. A job that was detached runs already, and goes on."""
    job = copy(HEAD)
    record_hosts(job, [Host("h1", "h1")])
    (job.path / "copy.log").mkdir()
    before = descriptors()
    if detached:
        copying.copy_on(job, 2)
    else:
        copying.make_current(job)
    assert "the copy of what its hosts have written is not current: Is a directory" in capsys.readouterr().err
    assert descriptors() == before


def test_a_host_whose_copy_was_ended_by_an_error_stays_recorded(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = copy(HEAD)
    record_hosts(job, [Host("h1", "h1")])

    async def reach(_: Host) -> RemoteNode:
        raise ValueError("none that is expected")

    monkeypatch.setattr(copying, "reach", reach)
    with pytest.raises(ValueError, match="none that is expected"):
        asyncio.run(Mirror(job, {}, print).run())
    assert recorded_hosts(job) == (Host("h1", "h1"),)
