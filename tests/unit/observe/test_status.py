"""The status that is read is the one that was written, unless its writer is gone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.effort import examples
from tests.unit.observe.ending_job import ending
from unirun.errors import JobError
from unirun.observe.jobdir import JobDir
from unirun.observe.status import (
    JobStatus,
    RoleStatus,
    Summary,
    WorkerStatus,
    read_status,
    read_summary,
    runs,
    write_failure,
    write_status,
)
from unirun.rendezvous.creation import create_job
from unirun.wire.handshake import new_token

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
    write_status(job, structs.replace(STATUS, phase=phase))


# Hypothesis does not know msgspec's default factories.
st.register_type_strategy(WorkerStatus, st.builds(WorkerStatus, metrics=st.from_type(dict[str, float])))


@settings(examples(30), suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
@given(st.from_type(JobStatus).filter(lambda status: "NaN" not in json.dumps(status.to_json())))
def test_a_status_survives_json(status: JobStatus) -> None:
    assert JobStatus.from_json(json.loads(json.dumps(status.to_json()))) == status


def test_a_running_job_is_as_it_was_written(job: tuple[JobDir, int]) -> None:
    write(job[0])
    assert read_status(job[0]) == STATUS
    os.close(job[1])


def test_a_metric_that_is_not_finite_is_null(job: tuple[JobDir, int]) -> None:
    worker = structs.replace(STATUS.roles[0].workers[0], metrics={"loss": None, "speed": 1.0})
    role = structs.replace(STATUS.roles[0], workers=(worker,))
    write_status(job[0], structs.replace(STATUS, roles=(role,)))
    assert read_status(job[0]).roles[0].workers[0].metrics == {"loss": None, "speed": 1.0}
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


class TestASummary:
    def test_a_summary_is_one_line_of_the_status(self, job: tuple[JobDir, int]) -> None:
        here, lock = job
        write(here)
        assert read_summary(here) == Summary("run-1", "", "job", "running", 1.0, None, None, {"actor": 1})
        os.close(lock)
        assert read_summary(here).phase == "lost"
        write(here, "failed")
        assert read_summary(here).phase == "failed"

    def test_a_summary_does_not_grow_with_the_ranks_of_a_job(self, job: tuple[JobDir, int]) -> None:
        here, lock = job
        (role,) = STATUS.roles
        write_status(
            here, structs.replace(STATUS, roles=(structs.replace(role, workers=role.workers * 9999),))
        )
        assert here.state.stat().st_size > 1_000_000
        assert here.summary.stat().st_size < 300
        assert read_summary(here).roles == {"actor": 9999}
        os.close(lock)

    @pytest.mark.parametrize("text", ["", "[]", "{}"])
    def test_a_summary_that_is_none_is_told(self, job: tuple[JobDir, int], text: str) -> None:
        here, lock = job
        here.summary.write_text(text)
        with pytest.raises(JobError, match="summary.json"):
            read_summary(here)
        os.close(lock)


@pytest.mark.parametrize("moment", range(6))
@pytest.mark.parametrize("read", [read_status, read_summary])
def test_a_job_that_ends_at_any_moment_is_never_lost(
    job: tuple[JobDir, int], moment: int, read: Callable[[JobDir], JobStatus | Summary]
) -> None:
    """It writes its end before its processes end."""
    found, lock = job
    write(found)

    def end() -> None:
        write(found, "succeeded")
        os.close(lock)

    phases = [read(ending(found, moment, end)).phase, read(found).phase]
    assert phases in (["running", "running"], ["running", "succeeded"], ["succeeded", "succeeded"])
    if phases[1] == "running":
        end()


def test_a_job_that_no_master_could_lead_has_failed_and_ended_now(job: tuple[JobDir, int]) -> None:
    found, lock = job
    write(found)
    began = time.time()
    write_failure(found, "each master has died", 1)
    os.close(lock)
    status, summary = read_status(found), read_summary(found)
    assert (status.phase, status.reason, status.code) == ("failed", "each master has died", 1)
    assert (summary.phase, summary.code, summary.ended) == ("failed", 1, status.ended)
    assert status.ended is not None
    assert began <= status.ended <= time.time()


@pytest.mark.parametrize(
    ("phase", "lives", "does_run"),
    [
        (None, True, True),
        ("running", True, True),
        ("succeeded", True, False),
        (None, False, False),
        ("running", False, False),
        ("succeeded", False, False),
    ],
)
def test_a_job_runs_from_its_first_moment_until_it_has_written_its_end(
    job: tuple[JobDir, int], phase: str | None, lives: bool, does_run: bool
) -> None:
    found, lock = job
    if phase is not None:
        write(found, phase)
    if not lives:
        os.close(lock)
    assert runs(found) is does_run
    if lives:
        os.close(lock)
