"""The refusals of ``unirun agent`` before it reaches for a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from unirun.cli.commands import call
from unirun.errors import JobError, UsageError


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
