"""The handle on a job that a program has submitted, and the submission, up to the process that launches it."""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.dashboard.recorded import record, recorded_status
from tests.unit.rendezvous.fake_master import FakeJob
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import JobError, JobFailed
from unirun.launcher.planned import PlannedJob
from unirun.observe.jobdir import JobDir
from unirun.observe.status import write_status
from unirun.rendezvous.creation import create_job
from unirun.train import job as submission
from unirun.train.job import RESULT, Job, JobHandle, load
from unirun.values import WorkerId
from unirun.wire.handshake import new_token
from unirun.wire.messages import Attach


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("UNIRUN_STORE", raising=False)
    return tmp_path / "home"


@pytest.fixture
def alive() -> Iterator[JobDir]:
    """A job that lives, and whose master has not answered yet."""
    job, lock = create_job("job-1", new_token())
    write_status(job, recorded_status("job-1", 2, "running"))
    yield job
    os.close(lock)


class Calls:
    """Counts how often it is closed, as the calls of a program to a job."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


class TestAHandle:
    def test_gives_the_output_of_the_latest_incarnation_of_each_worker(self) -> None:
        job = record("job-1", ranks=3)
        for rank, incarnation, name, text in (
            (0, 0, "stdout", "zero\n\nand no end"),
            (1, 0, "stdout", "one, which has failed\n"),
            (1, 1, "stderr", "one, err\n"),
            (1, 1, "stdout", "one, out\n"),
        ):
            folder = job.worker_logs(WorkerId("actor", rank, incarnation))
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.log").write_text(text)
        handle = JobHandle(job)
        first = "[actor:0] zero\n[actor:0] \n[actor:0] and no end\n"
        second = "[actor:1] one, out\n[actor:1] one, err\n"
        assert handle.logs() == handle.logs("actor") == first + second
        assert handle.logs(rank=1) == handle.logs("actor", 1) == second
        assert handle.logs("trainer") == handle.logs("actor", 2) == ""
        for unknown in (("critic", None), ("actor", 3), ("trainer", 1), (None, 3)):
            with pytest.raises(JobError):
                handle.logs(*unknown)

    def test_does_not_wait_for_the_master_of_a_job_that_is_over(self) -> None:
        for phase in ("succeeded", "failed", "running"):
            JobHandle(record(f"job-{phase}", phase=phase)).await_start()

    def test_waits_for_a_master_to_a_deadline(self, alive: JobDir, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(submission, "MASTER_START_TIMEOUT", 0.0)
        with pytest.raises(JobError, match="the master of job job-1 does not answer"):
            JobHandle(alive).await_start()
        with pytest.raises(TimeoutError):
            JobHandle(alive).wait(timeout=0.0)

    def test_says_at_once_to_the_master_that_it_only_looks_whether_that_answers(self) -> None:
        """The master records a stream that says nothing as refused."""
        with FakeJob() as job:
            master = job.leader()
            JobHandle(job.job_dir).await_start()
            assert master.heard.get(timeout=WAIT_TIMEOUT) == Attach()

    def test_tells_how_the_job_has_ended(self) -> None:
        ended = {phase: JobHandle(record(phase, phase=phase)) for phase in ("succeeded", "failed", "running")}
        assert [handle.wait() for handle in ended.values()] == [0, 1, 1]
        assert ended["succeeded"].result is None, "the trainer has returned None"
        for phase in ("failed", "running"):
            with pytest.raises(JobFailed) as failed:
                _ = ended[phase].result
            assert failed.value.code == 1

    def test_has_the_result_of_a_trainer(self) -> None:
        job = record("job-1")
        (job.path / RESULT).write_bytes(pickle.dumps({"loss": 0.5}))
        assert JobHandle(job).result == {"loss": 0.5}

    def test_leaves_the_job_once_and_may_call_it_again(self) -> None:
        handle, calls = JobHandle(record("job-1")), Calls()
        handle._visitor = calls  # type: ignore[assignment]
        with handle:
            pass
        handle.close()
        assert (calls.closed, handle._visitor) == (1, None)


class Launched(subprocess.CompletedProcess[str]):
    """The process that launches jobs, which refuses each."""

    jobs: list[PlannedJob]

    def __init__(self) -> None:
        super().__init__([], 3, "", "unirun: no room\n")
        self.jobs = []

    def __call__(self, command: list[str], *, input: str, **_: Any) -> Launched:
        assert command[-1] == "--detach"
        self.jobs.append(PlannedJob.from_json(input))
        return self


class Followed:
    """The process that follows a job: `signals` come to the program while it waits."""

    def __init__(self, code: int, signals: int = 0, end: Callable[[], object] = lambda: None) -> None:
        self._code, self._left, self._end = code, signals, end
        self.stdin, self.sent = io.StringIO(), list[int]()
        self.options: dict[str, Any] = {}

    def __call__(self, command: list[str], **options: Any) -> Followed:
        assert command[-1] == str(os.getpid())
        self.options = options
        return self

    def wait(self) -> int:
        if self._left:
            self._left -= 1
            raise KeyboardInterrupt
        self._end()
        return self._code

    def send_signal(self, number: int) -> None:
        self.sent.append(number)

    def poll(self) -> int | None:
        return None if self._left else self._code


MAPPING = {"roles": {"worker": {"count": 1, "workload": "algo:Actor"}}, "trainer": "algo:PPOTrainer"}


class TestASubmission:
    def test_has_a_name_and_restarts_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        job, launched = Job(MAPPING, 1), Launched()
        monkeypatch.setattr(subprocess, "run", launched)
        for options in ({"job_name": "ppo", "max_restarts": 7}, {}, {"job_name": "other"}):
            with pytest.raises(JobFailed, match="no room") as refused:
                job.submit(blocking=False, **options)
            assert refused.value.code == 3
        ids = [each.spec.run_id.rpartition("-") for each in launched.jobs]
        assert [stem for stem, _, _ in ids] == ["ppo", "algo", "other"]
        assert len({number for _, _, number in ids}) == 3
        assert [each.spec.role("worker").max_restarts for each in launched.jobs] == [7, 3, 3]

    def test_passes_each_interrupt_on_and_raises_it_at_the_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        followed = Followed(130, signals=2)
        monkeypatch.setattr(subprocess, "Popen", followed)
        with pytest.raises(KeyboardInterrupt):
            Job(MAPPING, 1).submit()
        assert followed.sent == [signal.SIGINT] * 2
        assert followed.options["start_new_session"], "a terminal would interrupt it a second time"
        assert followed.stdin.closed

    def test_that_does_not_start_has_the_code_of_the_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(subprocess, "Popen", Followed(3))
        with pytest.raises(JobFailed, match="could not be started") as refused:
            Job(MAPPING, 1).submit()
        assert refused.value.code == 3


@pytest.mark.parametrize("place", [None, 0, 1])
def test_a_class_is_loaded_from_the_working_directory_and_the_path_stays(
    place: int | None, monkeypatch: pytest.MonkeyPatch, code: Path
) -> None:
    path = [each for each in sys.path if each != str(code)]
    if place is not None:
        path.insert(place, str(code))
    monkeypatch.setattr(sys, "path", [*path])
    assert load("algo", "Actor").kind == "workload"
    assert sys.path == path
