"""The refusals of ``unirun agent`` before it reaches for a job, and how often it asks a master that is hard to reach."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cli.in_process import run_cli
from tests.unit.dashboard.recorded import record
from tests.unit.rendezvous.fake_master import FakeJob
from unirun.cli import agent
from unirun.cli.commands import call
from unirun.errors import ConnectionLost, JobError, UsageError
from unirun.failover.nodes import RETRY_REMEDY, has_left
from unirun.observe.status import JobStatus, write_status
from unirun.rendezvous.creation import create_job
from unirun.wire.blocking import BlockingStream
from unirun.wire.handshake import new_token
from unirun.wire.messages import Attach, Drain, Drained


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "the following arguments are required: join|drain"),
        (("drain",), "the following arguments are required: node"),
        (("join", "--rdzv-endpoint", "h1:29400"), "the node has to prove the job's token"),
        (("join", "--token-file", "token"), "nothing says where masters of the job listen"),
        (("join", "--rdzv-endpoint", "h1:port", "--token-file", "token"), "'port' is no port"),
        (
            ("join", "--rdzv-endpoint", "127.0.0.1:1", "--token-file", "token", "--node-name", "a b"),
            "'a b' is no name of a node",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(
    arguments: tuple[str, ...], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    monkeypatch.delenv("UNIRUN_STORE", raising=False)
    token = tmp_path / "token"
    token.write_text("5a" * 32)
    token.chmod(0o600)
    with pytest.raises(UsageError) as refused:
        call("agent", arguments)
    assert problem in str(refused.value)


def test_a_node_of_no_job_cannot_be_drained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    monkeypatch.delenv("UNIRUN_STORE", raising=False)
    with pytest.raises(JobError):
        call("agent", ["drain", "h2"])


def test_what_is_to_be_called_to_drain_a_node_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    monkeypatch.delenv("UNIRUN_STORE", raising=False)
    locks = [create_job(run_id, new_token())[1] for run_id in ("run-1", "run-2")]
    with pytest.raises(UsageError, match="2 jobs run: run-1, run-2; name one: unirun agent drain h2 JOB"):
        call("agent", ["drain", "h2"])
    for lock in locks:
        os.close(lock)


@pytest.mark.parametrize("options", [(), ("--hosts", "h1")])
def test_no_node_joins_a_job_that_has_ended(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    monkeypatch.delenv("UNIRUN_STORE", raising=False)
    record("run-1")
    with pytest.raises(JobError, match="job run-1 has ended; no node can join it"):
        call("agent", ["join", "run-1", *options])


ANSWERS = {
    "wait": Drained("h2", "it moves", RETRY_REMEDY),
    "drained": Drained("h2"),
    "left": Drained("h2", has_left("h2"), "see unirun status"),
    "refused": Drained("h2", "it has all ranks", "add a node"),
}


@given(
    st.lists(st.sampled_from(("gone", "wait")), max_size=3), st.sampled_from(("drained", "left", "refused"))
)
def test_a_node_that_is_drained_is_asked_for_until_a_master_answers(before: list[str], last: str) -> None:
    """That it has left already is a success if the answer to an earlier question may have been lost."""
    words = iter([*before, last])

    def script(stream: BlockingStream) -> None:
        assert (stream.receive(), stream.receive()) == (Attach(), Drain("h2"))
        if (word := next(words)) == "gone":
            raise ConnectionLost("this master has died")
        stream.send(Drained("h3"))
        stream.send(ANSWERS[word])

    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNIRUN_HOME", home)
        patch.setattr(agent, "DRAIN_RETRY_INTERVAL", 0.0)
        with FakeJob() as job:
            write_status(job.job_dir, JobStatus("run-1", "job", "running", "", 0.0, None, None, ()))
            job.leader(script=script)
            code = run_cli("agent", "drain", "h2", "run-1")
    succeeds = last == "drained" or (last == "left" and "gone" in before)
    assert code == (0 if succeeds else JobError.exit_code)
    assert next(words, None) is None
