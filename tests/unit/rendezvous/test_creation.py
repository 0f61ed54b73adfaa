"""The directory of a job: made, made again under the same id, kept over a requeue, and taken back."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

import pytest

from unirun.errors import ConnectionLost, JobError
from unirun.observe.jobdir import JobDir, job_at
from unirun.rendezvous import masters
from unirun.rendezvous.creation import create_job, discard_job
from unirun.wire.address import TcpAddress
from unirun.wire.credentials import Credentials
from unirun.wire.handshake import new_token

HEAD = TcpAddress("10.0.0.1", 29400, "n0")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of all jobs."""
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


KEPT = ("agent.n0.log", "events.jsonl", "master.log", "metrics.jsonl", "state.json")
"""Files of each run of a job that Slurm has requeued, besides its logs."""


def run(*, uid: str, log_dir: str | None = None, **options: object) -> JobDir:
    """A job that is made, leaves files, and ends."""
    job, lock = create_job("run-1", new_token(), log_dir, uid=uid, **options)  # type: ignore[arg-type]
    for name in (*KEPT, "store.db", "store.db-wal", "rest"):
        (job.path / name).write_text(uid)
    job.batch.mkdir(exist_ok=True)
    (job.logs / "out").write_text(uid)
    os.close(lock)
    return job


def names(job: JobDir) -> set[str]:
    """The names in a job's directory that a new one does not have."""
    made = {"token", "uid", "store", "alive.lock", "logs", job.events.name}
    return {path.name for path in job.path.iterdir()} - made


def test_a_finished_job_of_the_same_id_leaves_nothing() -> None:
    run(uid="first")
    job, lock = create_job("run-1", new_token(), uid="second")
    os.close(lock)
    assert names(job) == set()
    assert job.uid == "second"
    assert [*job.logs.iterdir()] == []


def test_a_batch_job_keeps_its_files_and_the_mark_that_it_is_pending() -> None:
    run(uid="first")
    job, lock = create_job("run-1", new_token(), uid="second", batch=True)
    os.close(lock)
    assert names(job) == {"slurm", "state.json"}


def test_a_requeued_job_keeps_the_store_and_the_files_of_all_runs_before() -> None:
    run(uid="first")
    job = run(uid="second", batch=True, restarts=1)
    assert job.attempts == (0,)
    assert job.uid_before == "first"
    job, lock = create_job("run-1", new_token(), uid="third", batch=True, restarts=2)
    os.close(lock)
    assert names(job) == {"slurm", "uid.before", "store.db", "store.db-wal", "attempt_0", "attempt_1"}
    assert (job.path / "store.db").read_text() == "second"
    for number, uid in enumerate(("first", "second")):
        kept = job.attempt(number)
        assert kept.uid == (kept.logs / "out").read_text() == uid
        assert {name: (kept.path / name).read_text() for name in KEPT} == dict.fromkeys(KEPT, uid)
        assert not (kept.path / "rest").exists()


def test_a_second_command_in_the_same_start_of_a_batch_job_keeps_the_run_before_it_as_it_is() -> None:
    run(uid="first")
    run(uid="second", batch=True, restarts=1)
    job = run(uid="third", batch=True, restarts=1)
    assert job.attempts == (0,)
    assert job.attempt(0).uid == "first"


def test_the_directory_of_a_node_of_a_requeued_job_keeps_the_runs_but_has_no_store() -> None:
    run(uid="first", node="n1", head=HEAD)
    job, lock = create_job("run-1", new_token(), uid="second", restarts=1, node="n1", head=HEAD)
    os.close(lock)
    assert job.path == job_at("run-1", "n1").path != job_at("run-1").path
    assert job.head == HEAD
    assert {path.name for path in job.path.iterdir()} >= {"attempt_0"}
    assert not {"store", "store.db", "uid.before", "slurm", "rest"} & {
        path.name for path in job.path.iterdir()
    }


def test_a_job_that_does_not_start_is_taken_back_with_its_lock() -> None:
    job, lock = create_job("run-1", new_token())
    discard_job(job, lock)
    assert not job.path.exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(lock)


def test_a_requeued_job_that_does_not_start_leaves_the_runs_before_and_the_store() -> None:
    run(uid="first")
    job, lock = create_job("run-1", new_token(), uid="second", batch=True, restarts=1)
    discard_job(job, lock)
    assert {path.name for path in job.path.iterdir()} == {
        "slurm",
        "uid.before",
        "store.db",
        "store.db-wal",
        "attempt_0",
    }


def test_logs_that_cannot_be_made_leave_no_job_and_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(JobError, match="logs cannot be written"):
        create_job("run-1", new_token(), str(tmp_path / "file"))
    assert not job_at("run-1").path.exists()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_job_that_does_not_start_takes_back_its_logs_elsewhere_too(tmp_path: Path, restarts: int) -> None:
    if restarts:
        run(uid="first", log_dir=str(tmp_path / "logs"))
    job, lock = create_job("run-1", new_token(), str(tmp_path / "logs"), restarts=restarts)
    assert (logs := job.own_logs())
    discard_job(job, lock)
    assert not logs.exists()
    assert (tmp_path / "logs" / "run-1" / "out").exists() == bool(restarts)


def test_a_directory_that_cannot_be_made_is_named_with_the_remedy(home: Path) -> None:
    job = job_at("run-1")
    job.path.parent.mkdir(parents=True)
    job.path.touch()
    with pytest.raises(JobError) as caught:
        create_job("run-1", new_token())
    assert str(caught.value) == (
        f"the job's directory {job.path} cannot be made: not a directory; "
        "set UNIRUN_HOME to a directory that you may write"
    )


def test_a_running_job_is_not_replaced() -> None:
    _, lock = create_job("run-1", new_token(), uid="first")
    with pytest.raises(JobError, match=r"job run-1 is running; stop it with: unirun stop run-1"):
        create_job("run-1", new_token())
    assert job_at("run-1").uid == "first"
    os.close(lock)


def test_a_file_system_without_locks_is_named_with_the_remedy(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(JobError, match=r"has no locks.*set UNIRUN_HOME to a directory on a local disk"):
        create_job("run-1", new_token())


def test_a_head_whose_master_is_being_replaced_is_tried_again_for_some_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, tried = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def closed(leader: object, credentials: object) -> None:
        tried.append((leader, credentials))
        raise ConnectionLost("the peer closed the stream")

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(masters, "_led", closed)
    credentials = Credentials(new_token())
    with pytest.raises(ConnectionLost):
        masters._led_from(HEAD, credentials)
    assert masters.BUSY_TIMEOUT < now < masters.BUSY_TIMEOUT + 1.0
    assert len(tried) > 10
    assert {(leader.address, given) for leader, given in tried} == {(HEAD, credentials)}  # type: ignore[attr-defined]
