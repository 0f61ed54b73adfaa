"""`unirun failures` shows what has failed, why, and what was decided."""

from __future__ import annotations

import itertools
import json
import os

import pytest
from msgspec import to_builtins

from tests.unit.cli.in_process import run_cli
from unirun.observe.events import EventLog
from unirun.observe.jobdir import JobDir
from unirun.observe.status import FailureStatus
from unirun.rendezvous.creation import create_job
from unirun.wire.handshake import new_token

FAILED = FailureStatus(
    "actor",
    1,
    0,
    "vm",
    100.5,
    "exit code 1",
    message="ValueError: loss is nan",
    decision="actor:1 ended with exit code 1; restart 1 of 2 of role actor",
    kind="exception",
    cause="ValueError: loss is nan",
    rule="exit",
    noticed=100.75,
    slots=("3",),
    affected=("trainer:0 waits for actor:1",),
    traceback="Traceback …\nValueError: loss is nan",
    log="/logs/actor/1/0",
)


@pytest.fixture
def job() -> JobDir:
    """A job whose actor:1 has failed, and is there again."""
    found, lock = create_job("job-1", new_token())
    os.close(lock)
    times = itertools.count(100)
    log = EventLog(found.events, 1, clock=lambda: float(next(times)))
    log.write("exit", "actor:1 ended: exit code 1", id="1-1", about=("actor:1",))
    record = {"failure": to_builtins(FAILED)}
    log.write("failure", "actor:1 failed", id="1-2", cause="1-1", about=("actor:1",), **record)
    log.write("decision", "restart 1 of 2", id="1-3", cause="1-1", about=("actor:1",))
    log.write("started", "actor:1 has process 7", id="1-4", cause="1-3", about=("actor:1",))
    log.write("running", "role actor: every rank runs", id="1-5", cause="1-3", about=("actor",))
    log.close()
    return found


def test_all_failures_are_listed(job: JobDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("failures") == 0
    _, row = capsys.readouterr().out.splitlines()
    cells = [cell for cell in row.split("  ") if cell]
    assert [cell.strip() for cell in cells] == [
        "1",
        "0.500",
        "actor:1",
        "0",
        "vm",
        "exit code 1",
        "ValueError: loss is nan",
        "restart 1 of 2 of role actor",
        "3.500 s",
    ]


def test_one_failure_is_explained(job: JobDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("failures", "job-1", "--why", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:8] == [
        "failure 1: actor:1 on vm, slot 3, 0.500 s after the first event",
        "  incarnation 0, generation 0, exit code 1",
        "likely cause: ValueError: loss is nan (exception)",
        "noticed by: the end of its process",
        "decided: actor:1 ended with exit code 1; restart 1 of 2 of role actor",
        "affected: trainer:0 waits for actor:1",
        "took: detect 0.250 s, decide 1.250 s, respawn 1.000 s, rejoin 1.000 s, away 3.500 s",
        lines[7],
    ]
    assert [line.strip().split(" ", 2)[2].strip() for line in lines[8:13]] == [
        "exit: actor:1 ended: exit code 1",
        "failure: actor:1 failed",
        "decision: restart 1 of 2",
        "started: actor:1 has process 7",
        "running: role actor: every rank runs",
    ]
    assert lines[13:] == [
        "error:",
        "  Traceback …",
        "  ValueError: loss is nan",
        "log: /logs/actor/1/0/stderr.log",
    ]


def test_programs_get_one_object_for_each(job: JobDir, capsys: pytest.CaptureFixture[str]) -> None:
    run_cli("failures", "--json")
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["record"] == json.loads(json.dumps(to_builtins(FAILED)))
    assert found["durations"]["away"] == 3.5
    assert "events" not in found
    run_cli("failures", "--json", "--why", "1")
    assert [each["kind"] for each in json.loads(capsys.readouterr().out)["events"]] == [
        "exit",
        "failure",
        "decision",
        "started",
        "running",
    ]


def test_a_failure_that_there_was_not_is_an_error(job: JobDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("failures", "--why", "2") != 0
    assert "job job-1 has no failure 2; it has had 1 so far" in capsys.readouterr().err


def test_a_job_without_failures_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    _, lock = create_job("job-1", new_token())
    os.close(lock)
    assert run_cli("failures") == 0
    assert capsys.readouterr().out == "job job-1 has had no failure\n"
