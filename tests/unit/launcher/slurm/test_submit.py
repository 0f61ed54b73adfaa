"""The environment in which a job is submitted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from unirun.errors import JobError
from unirun.launcher.slurm import submit as submitting
from unirun.launcher.slurm.options import parse_slurm
from unirun.launcher.slurm.submit import OUTPUT, SCRIPT, Batch, batch_of, batch_script, environment_of, submit
from unirun.observe.status import PENDING
from unirun.rendezvous.creation import create_job
from unirun.spec.job import Entry, JobSpec, RoleSpec
from unirun.wire.handshake import new_token

OWN = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "UNIRUN_HOME": "/home"}


def script(texts: Sequence[str], extra: Sequence[str] = ()) -> str:
    return batch_script(parse_slurm(texts, extra=extra), Batch("job", ("a.py",), output="job.log"))


def test_nothing_of_the_submitting_step_is_passed_on() -> None:
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_MEM_PER_NODE": "500",
        "SLURM_CPUS_PER_TASK": "4",
        "SLURM_STEP_TASKS_PER_NODE": "4",
        "SLURMD_NODENAME": "n1",
        "SBATCH_CPU_BIND": "none",
        "PMI_RANK": "0",
        "PMI2_JOBID": "7",
        "PMIX_NAMESPACE": "x",
    }
    assert environment_of(script(["nodes=1"]), OWN | step) == OWN


def test_outside_of_an_allocation_the_users_own_defaults_are_passed_on() -> None:
    own = OWN | {"SBATCH_ACCOUNT": "ml", "SBATCH_PARTITION": "gpu", "SLURM_CPU_BIND": "none"}
    assert environment_of(script(["nodes=1"]), own) == own


def test_a_default_that_would_replace_what_the_script_says_is_left_out() -> None:
    """sbatch prefers its variables to the lines of a script."""
    defaults = {
        "SBATCH_PARTITION": "gpu",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_MEM_PER_CPU": "100",
        "SBATCH_SIGNAL": "INT@1",
        "SBATCH_OPEN_MODE": "truncate",
        "SBATCH_NO_REQUEUE": "1",
    }
    kept = {"SBATCH_QOS": "high"}
    assert environment_of(script(["partition=cpu,time=5,mem=1G"]), OWN | defaults | kept) == OWN | kept


def test_a_default_that_would_replace_an_option_that_is_passed_on_is_left_out() -> None:
    defaults = {
        "SBATCH_PARTITION": "gpu",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_GRES": "gpu:1",
        "SBATCH_ACCOUNT": "ml",
    }
    kept = {"SBATCH_QOS": "high"}
    extra = ["--partition=cpu", "-t 5", "--gres gpu:2", "-A ml2"]
    assert environment_of(script(["nodes=1"], extra=extra), OWN | defaults | kept) == OWN | kept


def test_a_default_counts_where_the_script_has_no_line() -> None:
    defaults = {"SBATCH_OUTPUT": "mine.log", "SBATCH_NO_REQUEUE": "1", "SBATCH_JOB_NAME": "mine"}
    found = environment_of(script(["nodes=1,without=output+requeue+job_name"]), OWN | defaults)
    assert found == OWN | defaults


def test_a_job_that_runs_is_not_submitted_again_and_one_that_has_ended_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    asked: list[tuple[str, ...]] = []

    def ask(*words: str, environ: dict[str, str], tell: object) -> str:
        asked.append(words)
        assert environ == environment_of(batch_script(options, batch), os.environ)
        assert tell is print
        return "12;cluster\n"

    monkeypatch.setattr(submitting, "ask_slurm", ask)
    role = RoleSpec("actor", 2, Entry("script", "a.py"), max_restarts=3)
    spec = JobSpec("job", "run-1", (role,), ("actor",))
    options = parse_slurm(["nodes=1"])
    batch = batch_of(spec, options, ("a.py",), ("unirun",))
    job, lock = create_job("run-1", new_token())
    with pytest.raises(JobError, match="job run-1 is running"):
        submit(spec, options, batch, print)
    assert (asked, (job.path / "token").exists()) == ([], True)
    os.close(lock)
    made, number = submit(spec, options, batch, print)
    assert (made.path, number) == (job.path, "12")
    assert asked == [("sbatch", "--parsable", str(job.batch / SCRIPT))]
    assert not (job.path / "token").exists()
    assert (job.batch / SCRIPT).read_text() == batch_script(options, batch)
    assert batch.output == str(job.batch / OUTPUT)
    status = submitting._pending(spec)
    assert (status.run_id, status.phase, status.reason) == ("run-1", PENDING, "it waits for Slurm")
    (waits,) = status.roles
    assert (waits.name, waits.phase, waits.generation, waits.restarts, waits.max_restarts) == (
        *("actor", PENDING),
        *(0, 0, 3),
    )
    assert [(worker.rank, worker.phase, worker.incarnation) for worker in waits.workers] == [
        (0, PENDING, 0),
        (1, PENDING, 0),
    ]


def test_a_batch_job_of_which_nothing_can_be_written_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has become full. Nobody would know the job."""
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    spec = JobSpec("job", "run-1", (RoleSpec("actor", 1, Entry("script", "a.py")),), ("actor",))
    options = parse_slurm(["nodes=1"])
    asked: list[tuple[str, ...]] = []

    def ask(*words: str, **_: object) -> str:
        asked.append(words)
        if words[0] == "sbatch":
            shutil.rmtree(Path(words[-1]).parent)
        return "12\n"

    monkeypatch.setattr(submitting, "ask_slurm", ask)
    with pytest.raises(OSError, match="No such file"):
        submit(spec, options, batch_of(spec, options, ("a.py",), ("unirun",)), lambda _: None)
    assert asked[1:] == [("scancel", "12")]
