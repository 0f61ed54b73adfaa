from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from tests.waiting import eventually_async
from unirun.launcher.master import notifying
from unirun.launcher.master.notifying import Notifier, Occasions
from unirun.observe.events import LoggedEvent


def event(kind: str, about: str = "", **details: str) -> LoggedEvent:
    return LoggedEvent("1-1", 1.0, kind, f"{kind} of {about}", about=(about, "node0"), details=details)


def test_a_role_recovers_when_it_runs_again_after_a_failure() -> None:
    story = [
        event("running", "actor"),
        event("failure", "actor:1"),
        event("failure", "actor:2"),
        event("exit", "actor:2"),
        event("running", "critic"),
        event("running", "actor"),
        event("running", "actor"),
        event("end"),
    ]
    occasions = Occasions()
    assert [occasions.occasion(each) for each in story] == (
        ["", "failure", "failure", "", "", "recovery", "", "end"]
    )
    # The master that has seen the failure is dead.
    assert Occasions(story[:3]).occasion(story[5]) == "recovery"


def told(command: str, *events: LoggedEvent) -> None:
    """Run `command` for the events, and wait for its ends."""

    async def tell() -> None:
        notifier = Notifier(command, "job-1", [])
        for each in events:
            notifier.tell(each)
        await notifier.close()

    asyncio.run(asyncio.wait_for(tell(), 60))


@pytest.mark.starts_processes
def test_the_command_has_the_event_on_its_stdin_and_in_a_variable(tmp_path: Path) -> None:
    told(
        f'cat > {tmp_path}/stdin; printf %s "$UNIRUN_EVENT" > {tmp_path}/variable',
        event("failure", "actor:1"),
    )
    found = json.loads((tmp_path / "stdin").read_text())
    assert (found["job"], found["occasion"], found["kind"]) == ("job-1", "failure", "failure")
    assert found["about"] == ["actor:1", "node0"]
    assert json.loads((tmp_path / "variable").read_text()) == found


@pytest.mark.starts_processes
def test_a_long_event_is_whole_on_stdin_and_without_details_in_the_variable(tmp_path: Path) -> None:
    long = event("failure", "actor:1", traceback="x" * 300_000)
    told(f'cat > {tmp_path}/stdin; printf %s "$UNIRUN_EVENT" > {tmp_path}/variable', long)
    assert json.loads((tmp_path / "stdin").read_text())["details"] == long.details
    assert json.loads((tmp_path / "variable").read_text())["details"] == {}


@pytest.mark.starts_processes
def test_a_command_is_ended_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notifying, "COMMAND_TIMEOUT", 0.2)
    told("sleep 1000", event("end"))
    assert "the notify command was ended after 0.2 s" in capfd.readouterr().err


@pytest.mark.starts_processes
def test_what_runs_at_the_end_is_killed_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notifying, "END_TIMEOUT", 0.2)
    told(f"sleep 1; touch {tmp_path}/late", event("end"))
    assert "has not ended within 0.2 s of the end" in capfd.readouterr().err
    time.sleep(1.2)
    assert not (tmp_path / "late").exists()


@pytest.mark.starts_processes
def test_many_failures_have_few_commands_and_the_end_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notifying, "MOST", 2)
    failures = [event("failure", f"actor:{rank}") for rank in range(4)]
    told(f"sleep 0.5; mktemp {tmp_path}/XXXXXX", *failures, event("end"))
    assert len([*tmp_path.iterdir()]) == 3
    assert "there is none for: failure of actor:3" in capfd.readouterr().err


@pytest.mark.starts_processes
def test_the_end_with_exit_code_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    told("exit 3", event("end"))
    assert "the notify command ended with exit code 3" in capfd.readouterr().err


@pytest.mark.starts_processes
def test_the_end_waits_for_a_command_though_all_before_have_ended(tmp_path: Path) -> None:
    async def tell() -> None:
        # The second one is slow.
        notifier = Notifier(f"ls {tmp_path} | grep -q . && sleep 0.3; mktemp {tmp_path}/XXXXXX", "job-1", [])
        notifier.tell(event("failure", "actor:1"))
        await eventually_async(lambda: not notifier._running, "the first command has ended")
        notifier.tell(event("end"))
        await notifier.close()

    asyncio.run(asyncio.wait_for(tell(), 60))
    assert len([*tmp_path.iterdir()]) == 2
