"""Jobs as the page watches them: files are read again only if they may be others."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.unit.dashboard.recorded import record, recorded_status
from unirun.dashboard import watching
from unirun.dashboard.watching import Jobs, KeptDocument, WatchedJob
from unirun.errors import JobError
from unirun.observe.jobdir import JobDir
from unirun.observe.status import JobStatus, read_status, write_status


@contextmanager
def living(job: JobDir) -> Iterator[None]:
    """A process of the job lives in this context."""
    handle = os.open(job.lock, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(handle)


class Reads:
    """Reads the status of a job, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, job: JobDir) -> JobStatus:
        self.count += 1
        return read_status(job)


def test_a_document_is_read_again_when_its_file_is_another_and_when_the_processes_are_gone() -> None:
    job, reads = record("job-1", phase="running"), Reads()
    kept = KeptDocument(job, job.state, reads)
    with living(job):
        first = kept.get()
        assert (kept.get() is first, first.phase, reads.count) == (True, "running", 1)
        stamp = kept.stamp()
        write_status(job, recorded_status("job-1", 5, "running"))
        assert kept.stamp() != stamp
        assert (len(kept.get().roles[0].workers), reads.count) == (5, 2)
        stamp = kept.stamp()
    # Nothing was written.
    assert kept.stamp() != stamp
    assert (kept.get().phase, kept.get().phase, reads.count) == ("lost", "lost", 3)
    write_status(job, recorded_status("job-1", 5, "succeeded"))
    assert (kept.get().phase, kept.get().phase, reads.count) == ("succeeded", "succeeded", 4)


def test_every_viewer_sees_the_loss_of_a_job_whoever_reads_it_first() -> None:
    job = record("job-1", phase="running")
    watched = WatchedJob(job)
    with living(job):
        assert watched.view()["phase"] == "running"
        seen = watched.stamp()
    assert watched.view()["phase"] == "lost"
    assert watched.stamp() != seen
    assert watched.stamp() == watched.stamp()


def test_a_job_that_waits_for_slurm_is_asked_for_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    job = record("job-1", phase="pending")
    count, now = 0, 100.0

    def read(_: JobDir) -> JobStatus:
        nonlocal count
        count += 1
        return recorded_status("job-1", 4, "pending")

    monkeypatch.setattr(time, "monotonic", lambda: now)
    kept = KeptDocument(job, job.state, read)
    for _ in range(100):
        kept.get()
        now += 0.2
    assert count == pytest.approx(20 / watching.LOST_SECONDS, abs=2)


def test_a_link_to_a_job_is_none() -> None:
    job = record("job-1")
    job.path.with_name("job-2").symlink_to(job.path)
    with pytest.raises(JobError):
        Jobs().find("job-2")
    assert [each["run_id"] for each in Jobs().summaries()] == ["job-1"]


def test_the_list_reads_what_is_new_and_forgets_jobs_that_were_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = record("job-1")
    record("job-2")
    jobs = Jobs()
    assert [each["run_id"] for each in jobs.summaries()] == ["job-2", "job-1"]
    monkeypatch.setattr(JobDir, "read_json", lambda *_: pytest.fail("it was read before"))
    assert [each["phase"] for each in jobs.summaries()] == ["succeeded", "succeeded"]
    watched = jobs.find("job-1")
    job.path.rename(job.path.with_name(".removed"))
    assert [each["run_id"] for each in jobs.summaries()] == ["job-2"]
    job.path.with_name(".removed").rename(job.path)
    assert jobs.find("job-1") is not watched
