"""The actions of the other nodes of a batch job when its script is gone; Slurm's commands are programs that write down calls."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from unirun.errors import RendezvousError
from unirun.launcher.slurm import firstnode
from unirun.launcher.slurm.allocation import SlurmAllocation
from unirun.launcher.slurm.firstnode import find, outliving_the_script, published, script_is_gone
from unirun.observe.batchjob import SLURM_OUTAGE_TIMEOUT, SLURM_RETRY_INTERVAL, BatchState
from unirun.observe.jobdir import JobDir
from unirun.observe.status import JobStatus, read_summary, write_status
from unirun.rendezvous.creation import create_job
from unirun.wire.address import TcpAddress
from unirun.wire.handshake import new_token

RUNNING = JobStatus("run-1", "run", "running", "", 1.0, None, None, ())
BATCH = {"UNIRUN_BATCH": "run-1", "SLURM_JOB_ID": "12"}
AT_ONCE = 0.001


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobDir:
    """A batch job that runs, and whose script has written."""
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path / "home"))
    made, lock = create_job("run-1", new_token())
    os.close(lock)
    made.batch.mkdir()
    (made.batch / "beat").write_text("7\n")
    write_status(made, RUNNING)
    return made


Calls = Callable[[], list[str]]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Calls]:
    """Slurm's commands for a job in a given state. What is called gives the calls that change something."""

    def make(state: str = "RUNNING", requeue: int = 1) -> Calls:
        for name in ("scontrol", "scancel"):
            told = f"JobId=12 JobState={state} Requeue={requeue} Restarts=0"
            program = tmp_path / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(
                f'#!/bin/sh\ncase "$1" in show) echo "{told}";; *) echo {name} "$@" >>{tmp_path}/calls;; esac\n'
            )
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        calls = tmp_path / "calls"
        return lambda: calls.read_text().splitlines() if calls.exists() else []

    return make


class TestTheScript:
    def test_one_that_has_written_nothing_for_long_is_gone(self, job: JobDir) -> None:
        assert script_is_gone(job, AT_ONCE)

    def test_one_that_writes_lives(self, job: JobDir) -> None:
        writer = threading.Timer(0.05, (job.batch / "beat").write_text, ["8\n"])
        writer.start()
        assert not script_is_gone(job, 0.01)
        writer.join()

    def test_one_that_was_killed_while_it_wrote_is_gone(self, job: JobDir) -> None:
        (job.batch / "beat").write_text("")
        assert script_is_gone(job, AT_ONCE)

    def test_one_that_never_writes_is_not_missed(self, job: JobDir) -> None:
        (job.batch / "beat").unlink()
        assert not script_is_gone(job, 3600.0)


@pytest.mark.starts_processes
class TestWithoutTheScript:
    def test_the_batch_job_is_requeued(self, job: JobDir, slurm: Callable[..., Calls]) -> None:
        calls = slurm()
        with outliving_the_script("run-1", BATCH, AT_ONCE):
            pass
        assert calls() == ["scontrol requeue 12"]
        assert (job.read_json("summary.json")["phase"], read_summary(job).code) == ("pending", None)

    def test_also_when_the_part_of_this_node_ends_with_an_error(
        self, job: JobDir, slurm: Callable[..., Calls]
    ) -> None:
        calls = slurm()
        with pytest.raises(OSError, match="x"), outliving_the_script("run-1", BATCH, AT_ONCE):
            raise OSError("x")
        assert calls() == ["scontrol requeue 12"]

    def test_all_components_of_a_heterogeneous_job_are_requeued(
        self, job: JobDir, slurm: Callable[..., Calls]
    ) -> None:
        calls = slurm()
        with outliving_the_script("run-1", BATCH | {"SLURM_HET_JOB_ID": "11"}, AT_ONCE):
            pass
        assert calls() == ["scontrol requeue 11"]

    def test_a_batch_job_that_must_not_be_requeued_ends_with_4(
        self, job: JobDir, slurm: Callable[..., Calls]
    ) -> None:
        calls = slurm(requeue=0)
        with outliving_the_script("run-1", BATCH, AT_ONCE):
            pass
        assert calls() == ["scancel 12"]
        found = read_summary(job)
        assert (found.phase, found.code) == ("failed", 4)

    def test_the_batch_job_of_a_job_that_has_ended_ends_too(
        self, job: JobDir, slurm: Callable[..., Calls]
    ) -> None:
        """Its first node was shut down: the job was stopped, and then the script was killed."""
        calls = slurm()
        write_status(job, replace(RUNNING, phase="stopped", ended=2.0, code=143))
        with outliving_the_script("run-1", BATCH, AT_ONCE):
            pass
        assert calls() == ["scancel 12"]
        found = read_summary(job)
        assert (found.phase, found.code) == ("stopped", 143)

    @pytest.mark.parametrize("status", ["cannot be read", "cannot be written"])
    def test_the_batch_job_ends_whatever_its_status_is(
        self, job: JobDir, slurm: Callable[..., Calls], status: str
    ) -> None:
        """The disk of its directory is full, for example."""
        calls = slurm(requeue=0)
        job.state.unlink()
        if status == "cannot be written":
            job.state.mkdir()
        with outliving_the_script("run-1", BATCH, AT_ONCE):
            pass
        assert calls() == ["scancel 12"]

    def test_a_job_that_other_nodes_have_brought_to_its_end_is_not_begun_anew(
        self, job: JobDir, slurm: Callable[..., Calls]
    ) -> None:
        calls = slurm()
        node, lock = create_job("run-1", new_token(), uid=job.uid, node="n2")
        os.close(lock)
        write_status(node, replace(RUNNING, phase="succeeded", ended=2.0, code=0))
        with outliving_the_script("run-1", BATCH, AT_ONCE):
            pass
        assert calls() == ["scancel 12"]
        found = read_summary(job)
        assert (found.phase, found.code) == ("succeeded", 0)

    @pytest.mark.parametrize("state", ["PENDING", "COMPLETING", "CANCELLED"])
    def test_a_batch_job_that_another_node_has_requeued_is_left_alone(
        self, job: JobDir, slurm: Callable[..., Calls], state: str
    ) -> None:
        calls = slurm(state)
        with outliving_the_script("run-1", BATCH, AT_ONCE):
            pass
        assert calls() == []

    def test_a_job_of_another_kind_is_left_alone(self, job: JobDir, slurm: Callable[..., Calls]) -> None:
        calls = slurm()
        for environ in ({}, {"SLURM_JOB_ID": "12"}, BATCH | {"UNIRUN_BATCH": "run-2"}):
            with outliving_the_script("run-1", environ, AT_ONCE):
                pass
        assert calls() == []


@pytest.mark.parametrize("comes_back", [True, False])
def test_slurm_that_does_not_answer_is_asked_again_until_it_is_away_for_long(
    job: JobDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], comes_back: bool
) -> None:
    now, asked = [100.0], list[tuple[str, ...]]()

    def state(number: str) -> BatchState:
        assert number == "12"
        if now[0] < 100.0 + SLURM_OUTAGE_TIMEOUT or not comes_back:
            raise RendezvousError("scontrol has not answered")
        return BatchState("RUNNING", requeues=False)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep, time=lambda: now[0])
    monkeypatch.setattr(firstnode, "time", clock)
    monkeypatch.setattr(firstnode, "batch_state", state)
    monkeypatch.setattr(firstnode, "read_status", lambda job: RUNNING)
    monkeypatch.setattr(firstnode, "ask_slurm", lambda *words: asked.append(words))
    firstnode._end(job, "12")
    told = capfd.readouterr().err
    if comes_back:
        assert (asked, told) == ([("scancel", "12")], "")
        assert now[0] == 100.0 + SLURM_OUTAGE_TIMEOUT
        reason = "its first node is lost, and with it the batch script and the state of the job"
        assert job.read_json(job.state.name)["reason"] == reason
    else:
        assert asked == []
        assert told == "unirun: scontrol has not answered; end it with: scancel 12\n"
        assert now[0] == 100.0 + SLURM_OUTAGE_TIMEOUT + SLURM_RETRY_INTERVAL


@given(st.lists(st.sampled_from(["7\n", "8\n", "", None]), max_size=8))
def test_a_script_lives_when_something_else_is_read(beats: list[str | None]) -> None:
    """A file that cannot be read now, as on a busy server, says nothing."""
    left = iter(beats)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        job = JobDir(Path(folder))
        job.batch.mkdir()
        beat = job.batch / "beat"
        beat.write_text("7\n")

        def change(_: float) -> None:
            text = next(left, beats[-1] if beats else "7\n")
            beat.unlink(missing_ok=True) if text is None else beat.write_text(text)

        patch.setattr(firstnode, "time", SimpleNamespace(sleep=change))
        assert script_is_gone(job) == all(text in (None, "7\n") for text in beats)


STEP = SlurmAllocation("7", "0", ("n1", "n2"), "n2", (0, 0))


@pytest.mark.parametrize("other", [{"job": "8"}, {"step": "1"}, {"restarts": 1}])
def test_nodes_meet_in_their_own_step_and_their_own_run(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    token = new_token()
    with published(STEP, TcpAddress("10.0.0.1", 29400, "n1"), token):
        assert find(STEP, 1.0) == ("10.0.0.1", 29400, token)
        with pytest.raises(RendezvousError, match="has not said within 0.1 s where it is"):
            find(replace(STEP, **other), 0.1)
    assert not [*(tmp_path / "slurm").iterdir()]


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("10.0.0.5", "10.0.0.5"),
        ("127.0.1.1", "192.168.1.5"),
        ("::1", "192.168.1.5"),
        ("10.9.9.9", "192.168.1.5"),
        ("", "192.168.1.5"),
    ],
)
def test_a_head_is_at_the_address_of_its_name_if_others_reach_that(
    address: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a node is often one of loopback in its own /etc/hosts."""

    def resolve(name: str) -> str:
        assert name == "n1"
        if not address:
            raise RendezvousError("n1 has no address")
        return address

    monkeypatch.setattr(firstnode, "resolve", resolve)
    monkeypatch.setattr(firstnode, "is_own", lambda addr: addr != "10.9.9.9")
    monkeypatch.setattr(firstnode, "reachable_address", lambda: "192.168.1.5")
    step = SlurmAllocation("12", "0", ("n1", "n2"), "n1", (0, 0))
    assert firstnode.address_here(step) == found
