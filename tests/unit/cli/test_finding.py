"""The job that a command means when it names none, or names a worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.unit.cli.in_process import run_cli
from unirun.observe.status import JobStatus, RoleStatus, WorkerStatus, write_status
from unirun.rendezvous.creation import create_job
from unirun.values import WorkerId
from unirun.wire.handshake import new_token

Text = pytest.CaptureFixture[str]


@contextmanager
def a_job(run_id: str, phase: str, number: int, role: str = "actor") -> Iterator[None]:
    """The `number`-th job of this user, whose processes live as long as the context."""
    job, lock = create_job(run_id, new_token())
    os.utime(job.token, ns=(number, number))
    worker = WorkerStatus(0, "running", "n0", 0, 1, "")
    roles = (RoleStatus(role, "running", 0, 0, 1, (worker,)),)
    write_status(job, JobStatus(run_id, "t", phase, "", 1.0, None, None, roles))
    logs = job.worker_logs(WorkerId(role, 0, 0))
    logs.mkdir(parents=True)
    (logs / "stdout.log").write_text(f"{run_id} {role}\n")
    try:
        yield
    finally:
        os.close(lock)


@pytest.fixture
def jobs() -> Iterator[ExitStack]:
    """``jobs.enter_context(a_job(…))``: one that runs to the end of the test."""
    with ExitStack() as stack:
        yield stack


class TestWithoutAName:
    @pytest.fixture(autouse=True)
    def one_that_is_over(self) -> None:
        """It is newer than the others."""
        with a_job("over", "succeeded", 9):
            pass

    def test_status_and_logs_take_the_newest_that_runs(
        self, jobs: ExitStack, capfd: pytest.CaptureFixture[str]
    ) -> None:
        for number, run_id in enumerate(("a", "b")):
            jobs.enter_context(a_job(run_id, "running", number))
        assert run_cli("status") == 0
        assert capfd.readouterr().out.startswith("job b: running")
        assert run_cli("logs") == 0
        assert capfd.readouterr().out == "[actor:0] b actor\n"

    def test_a_job_that_lingers_after_its_end_does_not_count_as_running(
        self, jobs: ExitStack, capsys: Text
    ) -> None:
        jobs.enter_context(a_job("a", "running", 0))
        jobs.enter_context(a_job("b", "failed", 1))
        assert run_cli("status") == 0
        assert capsys.readouterr().out.startswith("job a: running")

    def test_a_job_without_a_state_counts_as_running(self, jobs: ExitStack, capsys: Text) -> None:
        _, lock = create_job("begun", new_token())
        assert run_cli("status") == 2
        assert "begun/state.json cannot be read" in capsys.readouterr().err
        os.close(lock)

    def test_without_a_name_the_newest_job_is_taken_when_none_runs(self, capsys: Text) -> None:
        assert run_cli("status") == 0
        assert capsys.readouterr().out.startswith("job over: succeeded")
        assert run_cli("stop") == 0
        assert capsys.readouterr().out == "no job runs; the newest, job over has ended already: succeeded\n"

    def test_stop_does_not_guess_which_of_several(self, jobs: ExitStack, capsys: Text) -> None:
        for number, run_id in enumerate(("a", "b")):
            jobs.enter_context(a_job(run_id, "running", number))
        assert run_cli("stop") == 2
        assert capsys.readouterr().err == "unirun: 2 jobs run: a, b; name one: unirun stop JOB\n"


class TestLogs:
    @pytest.mark.parametrize("who", ["trainer:0", "trainer"])
    def test_logs_of_a_worker_without_a_job_are_those_of_the_newest_job(
        self, jobs: ExitStack, capfd: pytest.CaptureFixture[str], who: str
    ) -> None:
        jobs.enter_context(a_job("a", "running", 0, "trainer"))
        assert run_cli("logs", who) == 0
        assert capfd.readouterr().out == "[trainer:0] a trainer\n"

    def test_logs_of_a_job_are_preferred_to_those_of_a_role_of_that_name(
        self, jobs: ExitStack, capfd: pytest.CaptureFixture[str]
    ) -> None:
        jobs.enter_context(a_job("trainer-1", "running", 0))
        jobs.enter_context(a_job("b", "running", 1, "trainer"))
        assert run_cli("logs", "trainer") == 0
        assert capfd.readouterr().out == "[actor:0] trainer-1 actor\n"

    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            (["critic:0"], "job a has no role 'critic'; it has actor"),
            (["critic"], "no job is called 'critic'; unirun ls shows the jobs there are"),
            (["actor:0", "a"], "actor:0 is a worker, and stands behind the job; write unirun logs a actor:0"),
            (["a", "critic"], "job a has no role 'critic'; it has actor"),
        ],
    )
    def test_logs_of_an_unknown_name_are_refused(
        self, jobs: ExitStack, capsys: Text, argv: list[str], says: str
    ) -> None:
        jobs.enter_context(a_job("a", "running", 0))
        assert run_cli("logs", *argv) == 2
        assert says in capsys.readouterr().err


def test_a_worker_is_no_job_to_stop(jobs: ExitStack, capsys: Text) -> None:
    jobs.enter_context(a_job("a", "running", 0))
    assert run_cli("stop", "actor:0") == 2
    assert "'actor:0' is a worker and no job; name its job" in capsys.readouterr().err
