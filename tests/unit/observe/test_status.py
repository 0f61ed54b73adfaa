"""The status that is read is the one that was written, unless its writer is gone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import JobError
from unirun.observe import JobStatus, RoleStatus, WorkerStatus, read_status
from unirun.rendezvous import JobDir, create_job
from unirun.wire import new_token

STATUS = JobStatus(
    run_id="run-1",
    name="job",
    phase="running",
    reason="",
    started=1.0,
    ended=None,
    code=None,
    roles=(RoleStatus("actor", "running", 1, 1, 3, (WorkerStatus(0, "running", "n0", 1, 7, "", 5, 0.5),)),),
)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[JobDir, int]:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    return create_job("run-1", new_token())


def write(job: JobDir, phase: str = "running") -> None:
    job.write_json("state.json", {**STATUS.to_json(), "phase": phase})


@given(st.from_type(JobStatus).filter(lambda status: "NaN" not in json.dumps(status.to_json())))
def test_a_status_survives_json(status: JobStatus) -> None:
    assert JobStatus.from_json(json.loads(json.dumps(status.to_json()))) == status


def test_a_running_job_is_as_it_was_written(job: tuple[JobDir, int]) -> None:
    write(job[0])
    assert read_status(job[0]) == STATUS
    os.close(job[1])


def test_a_job_without_processes_is_lost(job: tuple[JobDir, int]) -> None:
    write(job[0])
    os.close(job[1])
    status = read_status(job[0])
    assert (status.phase, status.reason) == ("lost", "its processes are gone and left no end")
    assert status.roles == STATUS.roles


@pytest.mark.parametrize("phase", ["succeeded", "failed", "stopped"])
def test_a_job_that_has_ended_needs_no_process(job: tuple[JobDir, int], phase: str) -> None:
    write(job[0], phase)
    os.close(job[1])
    assert read_status(job[0]).phase == phase


def test_a_job_that_has_written_nothing_yet_is_told(job: tuple[JobDir, int]) -> None:
    with pytest.raises(JobError, match=r"state.json cannot be read"):
        read_status(job[0])
    os.close(job[1])
