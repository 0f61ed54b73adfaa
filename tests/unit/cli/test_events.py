"""`unirun events` and `unirun failures` show what happened to a job, what has failed and why, and what was decided."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import tempfile
import threading
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from tests.unit.cli.in_process import run_cli
from tests.unit.observe.ending_job import ending
from unirun.cli import events
from unirun.cli.events import moment
from unirun.errors import UsageError
from unirun.observe.events import EventLog
from unirun.observe.jobdir import JobDir
from unirun.observe.status import FailureStatus, JobStatus, write_status
from unirun.rendezvous.creation import create_job
from unirun.wire.handshake import new_token


@pytest.fixture
def job() -> JobDir:
    """A job whose actor:1 has failed and was restarted, while n1 joined."""
    found, lock = create_job("job-1", new_token())
    os.close(lock)
    times = iter([100.0, 100.5, 100.625, 101.0, 102.0])
    log = EventLog(found.events, 1, clock=lambda: next(times))
    log.write("exit", "actor:1 ended: exit code 3", id="1-1", about=("actor:1",))
    log.write("join", "n1 joined", id="1-2", about=("n1",))
    log.write("decision", "restart 1 of 2", id="1-3", cause="1-1", about=("actor:1",))
    log.write("restart", "actor:1 joins generation 1", id="1-4", cause="1-3", about=("actor:1",))
    log.write("order", "n1 starts critic:0", cause="1-lost", about=("critic:0", "n1"))
    log.close()
    return found


def test_events_are_shown_with_their_times_below_their_causes(
    job: JobDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("events", job.run_id) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "     0.000  exit: actor:1 ended: exit code 3",
        "     0.625    decision: restart 1 of 2",
        "     1.000      restart: actor:1 joins generation 1",
        "     0.500  join: n1 joined",
        "     2.000  order: n1 starts critic:0",
    ]


@pytest.mark.parametrize(
    ("who", "kinds"), [("actor:1", ["exit", "decision", "restart"]), ("n1", ["join", "order"])]
)
def test_a_story_is_that_of_one_worker_or_node(
    job: JobDir, who: str, kinds: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_cli("events", job.run_id, "--story", who, "--json")
    assert [json.loads(line)["kind"] for line in capsys.readouterr().out.splitlines()] == kinds


def test_a_story_of_nobody_is_an_error_with_a_remedy(job: JobDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("events", job.run_id, "--story", "critic:7") != 0
    assert "no event of job job-1 concerns critic:7; name a worker" in capsys.readouterr().err


def test_events_of_a_kind_and_since_a_time_are_chosen(
    job: JobDir, capsys: pytest.CaptureFixture[str]
) -> None:
    since = datetime.fromtimestamp(101.0).isoformat()
    run_cli("events", job.run_id, "--since", since, "--json")
    run_cli("events", job.run_id, "--kind", "decision", "--kind", "join", "--json")
    kinds = [json.loads(line)["kind"] for line in capsys.readouterr().out.splitlines()]
    assert kinds == ["restart", "order", "join", "decision"]


def test_since_is_a_date_or_an_age() -> None:
    assert moment("5m", 1000.0) == 700.0
    assert moment("2026-11-27T05:00+00:00", 0.0) == 1795755600.0
    assert moment("2026-11-27T05:00Z", 0.0) == 1795755600.0
    with pytest.raises(UsageError, match="'soon' is no"):
        moment("soon", 0.0)
    with pytest.raises(UsageError, match="'12' is no time"):
        moment("12", 0.0)


def test_decisions_of_a_master_that_had_been_replaced_are_marked(
    job: JobDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for epoch, text in ((2, "another master leads"), (1, "restart 2 of 2")):
        log = EventLog(job.events, epoch)
        log.write("decision", text, id=f"{epoch}-9")
        log.close()
    run_cli("events", job.run_id, "--kind", "decision", "--json")
    run_cli("events", job.run_id)
    *rows, last = capsys.readouterr().out.splitlines()
    assert [row.get("replaced", False) for row in map(json.loads, rows[:3])] == [False, False, True]
    assert last.endswith("restart 2 of 2 (of the master of term 1, which had been replaced)")


def test_a_log_that_is_followed_is_printed_to_the_end_of_the_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, lock = create_job("job-3", new_token())
    log = EventLog(found.events, 1)
    log.write("start", "the job starts")
    write_status(found, JobStatus("job-3", "job", "running", "", 1.0, None, None, ()))

    def end() -> None:
        log.write("decision", "restart 1 of 2", about=("actor:1",))
        log.write("end", "the job is over")
        log.close()
        write_status(found, JobStatus("job-3", "job", "succeeded", "", 1.0, 2.0, 0, ()))

    later = threading.Timer(0.05, end)
    later.start()
    assert run_cli("events", found.run_id, "-f", "--kind", "decision", "--kind", "end") == 0
    os.close(lock)
    rows = [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()]
    assert rows == ["decision: restart 1 of 2", "end: the job is over"]


def test_a_job_without_events_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found, lock = create_job("job-2", new_token())
    os.close(lock)
    assert run_cli("events", found.run_id) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("moment", range(5))
def test_all_is_printed_of_a_job_that_ends_while_its_events_are_followed(
    moment: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, lock = create_job("job-4", new_token())
    log = EventLog(job.events, 1)
    write_status(job, JobStatus("job-4", "job", "running", "", 1.0, None, None, ()))

    def end() -> None:
        log.write("end", "the job is over")
        log.close()
        write_status(job, JobStatus("job-4", "job", "succeeded", "", 1.0, 2.0, 0, ()))
        os.close(lock)

    monkeypatch.setattr(events, "find_here", lambda *_: ending(job, moment, end))
    assert run_cli("events", job.run_id, "-f") == 0
    assert capsys.readouterr().out.endswith("end: the job is over\n")


EVENTS = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from(("exit", "join")), st.integers(0, 1)), max_size=8
)


@given(EVENTS, st.sampled_from(((), ("--story", "actor:1"), ("--kind", "exit"))))
def test_a_log_that_is_followed_to_its_end_is_shown_as_one_that_is_read(
    written: list[tuple[int, str, int]], options: tuple[str, ...]
) -> None:
    """Also what masters have written that had been replaced."""
    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNIRUN_HOME", home)
        job, lock = create_job("job-1", new_token())
        os.close(lock)
        write_status(job, JobStatus("job-1", "job", "failed", "", 0.0, 1.0, 1, ()))
        log = EventLog(job.events)
        for number, (term, kind, rank) in enumerate(written):
            log.write(kind, f"event {number}", id=f"{term}-{number}", about=(f"actor:{rank}",))
        log.close()
        shown = []
        for follow in ((), ("--follow",)):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                run_cli("events", "job-1", "--json", *options, *follow)
            shown.append(out.getvalue())
    assert shown[0] == shown[1]


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
def failed_job() -> JobDir:
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


def test_all_failures_are_listed(failed_job: JobDir, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_one_failure_is_explained(failed_job: JobDir, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_programs_get_one_object_for_each(failed_job: JobDir, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_failure_that_there_was_not_is_an_error(
    failed_job: JobDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("failures", "--why", "2") != 0
    assert "job job-1 has no failure 2; it has had 1 so far" in capsys.readouterr().err


def test_a_job_without_failures_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    _, lock = create_job("job-1", new_token())
    os.close(lock)
    assert run_cli("failures") == 0
    assert capsys.readouterr().out == "job job-1 has had no failure\n"
