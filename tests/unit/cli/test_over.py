"""Commands that look into jobs, on a job that is over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.in_process import run_cli
from tests.unit.dashboard.recorded import record

pytestmark = pytest.mark.usefixtures("own_home")


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    monkeypatch.delenv("UNIRUN_STORE", raising=False)


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["status"], "actor"),
        (["ls"], "succeeded"),
        (["logs"], "last line"),
        (["events"], "actor:1 failed"),
        (["failures"], "exit code 1"),
        (["top", "--once"], "actor:3"),
        (["graph"], "update"),
    ],
    ids=lambda each: each if isinstance(each, str) else " ".join(each),
)
def test_a_job_that_is_over_is_shown(argv: list[str], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    record("job-1")
    command, *flags = argv
    assert run_cli(command, *([] if command == "ls" else ["job-1"]), *flags) == 0
    assert shown in capsys.readouterr().out


def test_a_job_that_is_over_has_a_trace_and_a_report(tmp_path: Path) -> None:
    record("job-1")
    trace, report = tmp_path / "trace.json", tmp_path / "report.html"
    assert run_cli("trace", "job-1", "-o", str(trace)) == 0
    names = {each["name"] for each in json.loads(trace.read_text())["traceEvents"]}
    assert {"failure", "decision", "start of actor", "process"} <= names
    assert run_cli("report", "job-1", "-o", str(report)) == 0


@pytest.mark.parametrize("argv", [["stacks"], ["debug", "actor:0"], ["profile", "actor:0"]], ids=" ".join)
def test_processes_that_are_gone_are_said_to_be(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    record("job-1")
    command, *rest = argv
    assert run_cli(command, "job-1", *rest) != 0
    assert "has ended" in capsys.readouterr().err
