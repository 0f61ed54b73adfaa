"""``unirun experiment start``: what it refuses before it changes a trial, and that a trial runs once at a time."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.unit.cli.in_process import run_cli
from tests.unit.experiments.models.test_stage import CONFIG
from tests.unit.experiments.sample_configs import ppo
from tests.unit.experiments.test_checks_of_arguments import of
from unirun.errors import PlacementError
from unirun.experiments.config import ExperimentScheduling, ModelAbstraction, Scheduling, TasksGroup
from unirun.experiments.experiment import Experiment, ExperimentConfig, register_experiment
from unirun.experiments.starting import job_of
from unirun.observe.status import JobStatus, write_status
from unirun.rendezvous.creation import create_job
from unirun.wire.handshake import new_token


class Small(Experiment):
    """One with two workers."""

    def scheduling_setup(self) -> ExperimentScheduling:
        """Two workers without devices."""
        return ExperimentScheduling(TasksGroup(2, Scheduling()))

    def initial_setup(self) -> ExperimentConfig:
        """PPO."""
        return ppo(separate=False)


class Fused(Small):
    """One with a network that no tensor-parallel ranks can have."""

    def initial_setup(self) -> ExperimentConfig:
        """PPO, all with GPT-2."""
        config = ppo(separate=False)
        for worker in config.model_worker:
            for shard in worker.shards:
                shard.model = ModelAbstraction("causal_lm", {"config": {"model_type": "gpt2"}})
        return config


class Elsewhere(Small):
    """One whose networks are on other hosts."""

    def initial_setup(self) -> ExperimentConfig:
        """PPO, all with the network of a path."""
        config = ppo(separate=False)
        for worker in config.model_worker:
            for shard in worker.shards:
                shard.model = ModelAbstraction("causal_lm", {"path": "/nowhere/at/all"})
        return config


class Long(Experiment):
    """One whose data may be longer than its network has positions."""

    def scheduling_setup(self) -> ExperimentScheduling:
        """A worker without a device."""
        return ExperimentScheduling(TasksGroup(1, Scheduling()))

    def initial_setup(self) -> ExperimentConfig:
        """A call that trains."""
        rows = {"rows": [{"prompt": "a"}] * 8, "max_length": 65}
        return of(model={"config": {**CONFIG, "max_position_embeddings": 64}}, dataset=rows)


register_experiment("tests-small", Small)
register_experiment("tests-long", Long)
register_experiment("tests-elsewhere", Elsewhere)
register_experiment("tests-fused", Fused)

START = ("experiment", "start", "-e", "tests-small", "-f", "first")
AGAIN = ("--recover-mode", "fault", "--recover-after", "0")

Captured = pytest.CaptureFixture[str]


class Jobs:
    """In place of jobs: what is done when one is started, by its number, and the job files."""

    def __init__(self) -> None:
        self.files: list[dict[str, object]] = []
        self.words: list[str] = []
        self.does: list[Callable[[str], int]] = []

    def __call__(self, words: Sequence[str]) -> int:
        self.words = [*words]
        file = json.loads(Path(words[0].removeprefix("--config=")).read_text())
        self.files.append(file)
        return self.does.pop(0)(file["run_id"]) if self.does else 0


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    found = Jobs()
    monkeypatch.setattr("unirun.cli.run.main", found)
    yield found
    while locks:
        os.close(locks.pop())


@pytest.fixture
def trial(home: Path) -> Path:
    return home / "experiments" / "tests-small" / "first"


def placed(run_id: str) -> int:
    """There is no place for the job."""
    raise PlacementError("2 slots are needed, 1 is there", role="model_worker", needed=2, available=1)


def failed(run_id: str) -> int:
    """The job has failed."""
    return 1


locks: list[int] = []
"""Those of jobs that run."""


def orphaned(run_id: str) -> int:
    """The job runs, and its command has ended."""
    job, lock = create_job(run_id, new_token())
    locks.append(lock)
    write_status(job, JobStatus(run_id, "small", "running", "", 1.0, None, None, ()))
    return 1


def test_a_network_that_cannot_run_is_refused_before_anything_starts(
    home: Path, jobs: Jobs, capsys: Captured
) -> None:
    pytest.importorskip("transformers")
    assert run_cli("experiment", "start", "-e", "tests-fused", "-f", "first") == 2
    assert "the family gpt2 cannot run: GPT2LMHeadModel is not built as Llama is" in capsys.readouterr().err
    assert not jobs.files
    assert not (home / "experiments").exists()


def test_a_network_that_is_not_on_this_host_is_refused_only_where_the_trial_runs_here(
    home: Path, jobs: Jobs, capsys: Captured
) -> None:
    pytest.importorskip("transformers")
    start = ("experiment", "start", "-e", "tests-elsewhere", "-f", "first")
    assert run_cli(*start) == 2
    assert not jobs.files
    capsys.readouterr()
    assert run_cli(*start, "--mode", "ssh", "--hosts", "h1:4,h2") == 0
    assert "on this host: models.actor@0: transformers does not read its" in capsys.readouterr().err
    assert len(jobs.files) == 1


def test_a_network_without_transformers_is_refused_with_what_to_install(
    home: Path, jobs: Jobs, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    start = ("experiment", "start", "-e", "tests-long", "-f", "first")
    assert run_cli(*start) == 2
    assert "which cannot be imported: " in (told := capsys.readouterr().err)
    assert told.endswith("pip install transformers\n")
    assert not jobs.files
    assert run_cli(*start, "--mode", "ssh", "--hosts", "h1:4,h2") == 0


def test_data_that_may_be_too_long_is_told_and_not_refused(home: Path, jobs: Jobs, capsys: Captured) -> None:
    pytest.importorskip("transformers")
    assert run_cli("experiment", "start", "-e", "tests-long", "-f", "first") == 0
    told = "unirun: model_rpcs.train: sequences may have 65 tokens (max_length), and actor@0 has 64 positions"
    assert told in capsys.readouterr().err
    assert len(jobs.files) == 1


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                ("--hosts", "h1"),
                "--hosts is for --mode ssh, and the mode is local; add --mode ssh, or leave out --hosts",
            ),
            (("--mode", "slurm", "--hosts", "h1"), "--hosts is for --mode ssh, and the mode is slurm"),
            (
                ("--partition", "gpu"),
                "--partition is for --mode slurm, and the mode is local; add --mode slurm",
            ),
            (("--nodes", "1"), "--nodes is for --mode slurm, and the mode is local; add --mode slurm"),
            (("--slurm-setup", "true"), "--slurm-setup is for --mode slurm, and the mode is local"),
            (("--mode", "slurm", "--slurm-extra=a"), "--slurm-extra: expected an option of sbatch"),
            (("--mode", "ssh"), "--mode ssh needs hosts; give --hosts h1:4,h2:4"),
            (("--mode", "ssh", "--hosts", "h1:none"), "--hosts: "),
            (("--mode", "slurm", "--partition", "a'b"), "partition"),
            (("--mode", "slurm", "--nodes", "0"), "--nodes: '0' is no whole number from 1"),
            (("--mode", "slurm", "--nodes", "two"), "--nodes: 'two' is no whole number from 1"),
            (("--recover-after", "-1"), "--recover-after: '-1' is no number of seconds, 0 or more"),
            (("--recover-after", "inf"), "--recover-after: 'inf' is no number of seconds, 0 or more"),
            (("--recover-retries", "-1"), "--recover-retries: '-1' is no whole number from 0"),
        ],
    )
    def test_those_that_cannot_be_are_refused_before_the_trial_is_changed(
        self, options: tuple[str, ...], message: str, trial: Path, jobs: Jobs, capsys: Captured
    ) -> None:
        assert run_cli(*START) == 0
        before = {path: path.read_bytes() for path in trial.iterdir()}
        assert run_cli(*START, *options) == 2
        assert message in capsys.readouterr().err
        assert {path: path.read_bytes() for path in trial.iterdir()} == before
        assert len(jobs.files) == 1

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ((), []),
            (("--mode", "ssh", "--hosts", "h1:4,h2"), ["--hosts=h1:4,h2"]),
            (
                ("--mode", "slurm", "--partition", "gpu", "--nodes", "2"),
                ["--slurm=nodes=2,partition=gpu,cpus_per_task=2"],
            ),
            (("--mode", "slurm"), ["--slurm=nodes=1,cpus_per_task=3"]),
        ],
    )
    def test_the_others_say_where_the_job_runs(
        self, options: tuple[str, ...], expected: list[str], jobs: Jobs
    ) -> None:
        assert run_cli(*START, *options) == 0
        assert jobs.words[1:] == expected

    def test_hosts_that_the_scheduling_excludes_are_not_used(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, capsys: Captured
    ) -> None:
        scheduling = ExperimentScheduling(TasksGroup(2, Scheduling(cpu=2, exclude="h2")))
        monkeypatch.setattr(Small, "scheduling_setup", lambda _: scheduling)
        assert run_cli(*START, "--mode", "ssh", "--hosts", "h1:4,h2") == 0
        assert jobs.words[1:] == ["--hosts=h1:4,h2", "--exclude=h2"]
        scheduling.model_worker.scheduling.time_limit = "2:00:00"
        assert run_cli(*START) == 2
        told = "Scheduling.time_limit of model_worker is '2:00:00', which needs --mode slurm"
        assert told in capsys.readouterr().err


class TestAStart:
    def test_its_first_line_says_which_trial_it_is_and_where(
        self, trial: Path, jobs: Jobs, capsys: Captured
    ) -> None:
        assert run_cli(*START) == 0
        assert capsys.readouterr().err == f"unirun: trial tests-small/first, files in {trial}\n"

    def test_one_that_finds_no_place_leaves_the_trial_as_it_was(self, trial: Path, jobs: Jobs) -> None:
        jobs.does = [placed]
        assert run_cli(*START) == 3
        assert job_of(trial) == ""
        assert run_cli(*START) == 0
        before = job_of(trial)
        jobs.does = [placed]
        assert run_cli(*START) == 3
        assert job_of(trial) == before

    def test_a_second_one_at_the_same_moment_is_refused_and_changes_nothing(
        self, trial: Path, jobs: Jobs, capsys: Captured
    ) -> None:
        def meanwhile(run_id: str) -> int:
            assert run_cli(*START) == 2
            return 0

        jobs.does = [meanwhile]
        assert run_cli(*START) == 0
        assert "trial 'first' of 'tests-small' runs already" in capsys.readouterr().err
        assert len(jobs.files) == 1
        # It has ended.
        assert run_cli(*START) == 0

    def test_after_a_failure_it_is_started_again_and_goes_on(self, jobs: Jobs, capsys: Captured) -> None:
        jobs.does = [failed, failed, failed]
        assert run_cli(*START, *AGAIN, "--recover-retries", "2") == 1
        resumes = [each["config"]["resume"] for each in jobs.files]  # type: ignore[index]
        assert resumes == [False, True, True]
        assert len({str(each["run_id"]) for each in jobs.files}) == 3
        error = capsys.readouterr().err
        assert error.count("unirun: tests-small/first has failed with 1; it is started again in 0 s\n") == 2
        assert "unirun: unirun" not in error

    @pytest.mark.parametrize("code", [0, 2, 130, 143])
    def test_it_is_not_started_again_after_a_success_a_mistake_and_a_user_who_stops_it(
        self, jobs: Jobs, code: int
    ) -> None:
        jobs.does = [lambda _: code]
        assert run_cli(*START, *AGAIN, "--recover-retries", "2") == code
        assert len(jobs.files) == 1

    def test_it_is_not_started_again_beside_a_job_that_runs_without_its_command(
        self, jobs: Jobs, capsys: Captured
    ) -> None:
        jobs.does = [orphaned]
        assert run_cli(*START, *AGAIN) == 2
        assert f"runs already, as job {jobs.files[0]['run_id']}" in capsys.readouterr().err
        assert len(jobs.files) == 1

    @pytest.mark.parametrize(("mode", "only"), [("resume", True), ("auto", False), ("disabled", False)])
    def test_only_resume_needs_a_checkpoint_that_can_be_read(
        self, mode: str, only: bool, trial: Path, jobs: Jobs
    ) -> None:
        saved = trial / "recover" / "000001" / "recover.json"
        saved.parent.mkdir(parents=True)
        saved.write_text("{}")
        assert run_cli(*START, "--recover-mode", mode) == 0
        assert jobs.files[0]["config"]["resume_only"] is only  # type: ignore[index]

    @pytest.mark.parametrize("mode", ["auto", "resume"])
    def test_one_whose_checkpoints_cannot_be_read_does_not_begin_anew_unasked(
        self, mode: str, trial: Path, jobs: Jobs, capsys: Captured
    ) -> None:
        saved = trial / "recover" / "000001" / "recover.json"
        saved.parent.mkdir(parents=True)
        saved.write_text('{"step": "of another version"}')
        assert run_cli(*START, "--recover-mode", mode) != 0
        told = capsys.readouterr().err
        assert f"{saved} cannot be read" in told
        assert "none of them can be read; " in told
        assert "--recover-mode disabled" in told
        assert not jobs.files
        assert run_cli(*START, "--recover-mode", "disabled") == 0


@pytest.fixture
def failing(scripts: Path) -> Path:
    path = scripts / "tests_failing.py"
    path.write_text("def deep():\n    raise ValueError('this is wrong')\n\ndeep()\n")
    return path


def test_a_file_that_fails_is_told_with_its_traceback_and_no_other_frames(
    failing: Path, capsys: Captured
) -> None:
    assert run_cli("experiment", "find-config", "--module", "./tests_failing.py") == 2
    first, *others, last = capsys.readouterr().err.splitlines()
    assert first == "unirun: Traceback (most recent call last):"
    assert f'unirun:   File "{failing}", line 4, in <module>' in others[0]
    assert not any("importlib" in line or "unirun/experiments" in line for line in others)
    assert last == f"unirun: {failing} cannot be imported: ValueError: this is wrong; correct it"
