"""Jobs that are submitted to a Slurm of three nodes on this host."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from ..testbed.fixtures import available
from ..testbed.slurm import Slurm
from .harness import EXEC, START, Running, Script, Unirun, eventually

WAIT = "import time; print('here', flush=True); time.sleep(600)"

SAVES = """
    import os, time
    from unirun import BaseTrainer, BaseWorkload

    class Actor(BaseWorkload):
        pass

    class Trainer(BaseTrainer):
        def init(self):
            pass

        def fit(self):
            print("found", self.load_state(), "requeued", os.environ.get("SLURM_RESTART_COUNT", "0"), flush=True)
            if self.load_state() is None:
                self.save_state(b"half")
                print("saved", flush=True)
                time.sleep(600)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    """One for all tests: each leaves it idle."""
    with available(), Slurm() as slurm:
        yield slurm


@pytest.fixture
def command(unirun: Unirun, cluster: Slurm, monkeypatch: pytest.MonkeyPatch) -> Unirun:
    """The command on a login node."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    return unirun


def slurm_id(running: Running) -> str:
    (found,) = running.lines(r"is Slurm job (\d+)")
    return found


def test_a_submitted_job_is_followed_and_has_its_exit_code(command: Unirun, script: Script) -> None:
    train = script("import os, sys; print('rank', os.environ['RANK'], sys.argv[1:]); sys.exit(7)")
    result = command("--slurm", "nodes=1,partition=debug", *EXEC, "--roles", "a=2", train, "a b", "$x")
    assert result.code == 7
    for rank in (0, 1):
        assert f"[a:{rank}] rank {rank} ['a b', '$x']\n" in result.out
    assert "RUNNING on n" in result.err
    assert "FAILED on n" in result.err
    assert (command.status()["phase"], command.status()["code"]) == ("failed", 7)


def test_ctrl_c_cancels_a_submitted_job(command: Unirun, script: Script, cluster: Slurm) -> None:
    job = command.start("--slurm", "nodes=1", *EXEC, script(WAIT))
    job.lines("here")
    job.signal(signal.SIGINT)
    result = job.end()
    assert result.code == 128 + signal.SIGINT, result.err
    assert cluster.job(slurm_id(job))["JobState"] == "CANCELLED"
    assert (command.status()["phase"], command.status()["code"]) == ("stopped", 143)


def test_status_logs_and_stop_work_on_a_submitted_job(command: Unirun, script: Script) -> None:
    name = command("--slurm", "nodes=1", "--detach", *EXEC, script(WAIT)).out.strip()
    eventually(lambda: command.status()["phase"] == "running", "the job runs", START)
    assert "RUNNING on n" in command("status", name).out
    assert eventually(lambda: command("logs", name).out, "the worker has written") == "[default:0] here\n"
    assert "running" in command("ls").out
    stopped = command("stop", name)
    assert (stopped.code, "CANCELLED, exit code 143" in stopped.out) == (0, True), stopped
    assert (command.status()["phase"], command.status()["code"]) == ("stopped", 143)


def test_a_pending_job_tells_why_and_can_be_stopped(command: Unirun, script: Script) -> None:
    job = command.start("--slurm", "nodes=1,begin=now+1hour", *EXEC, script(WAIT))
    job.lines(r"PENDING \(BeginTime\)")
    assert command.status()["phase"] == "pending"
    assert "pending" in command("ls").out
    again = command("--slurm", "nodes=1", "--rdzv-id", command.status()["run_id"], script(WAIT))
    assert (again.code, "is running; stop it with" in again.err) == (2, True)
    assert command("gc", "--older-than", "0s").code == 0
    assert command("stop").code == 0
    assert job.end().code == 143


def test_what_sbatch_refuses_leaves_nothing(command: Unirun, script: Script) -> None:
    result = command("--slurm", "nodes=1,partition=missing", script(WAIT))
    assert result.code == 2
    assert "sbatch: " in result.err
    assert "partition" in result.err
    assert [*(command.home / "jobs").iterdir()] == []


def test_a_requeued_job_finds_what_its_workers_had_saved(
    command: Unirun, script: Script, cluster: Slurm
) -> None:
    script(SAVES, "saves.py")
    job = command.start("--slurm", "nodes=1", "--roles", "a=1@saves:Actor", "--trainer", "saves:Trainer")
    job.lines("saved")
    number = slurm_id(job)
    cluster.run("scontrol", "requeue", number)
    eventually(lambda: cluster.job(number)["JobState"] == "PENDING", "the job is requeued")
    cluster.start_now(number)
    result = job.end()
    assert result.code == 0, result.err
    assert "found None requeued 0" in result.out
    assert "found b'half' requeued 1" in result.out
