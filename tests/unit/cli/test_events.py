"""`unirun events` shows each event below the one that caused it."""

from __future__ import annotations

import json
import os

import pytest

from tests.unit.cli.in_process import run_cli
from unirun.observe.events import EventLog
from unirun.observe.jobdir import JobDir
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


def test_a_job_without_events_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found, lock = create_job("job-2", new_token())
    os.close(lock)
    assert run_cli("events", found.run_id) == 0
    assert capsys.readouterr().out == ""
