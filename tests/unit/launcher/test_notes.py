"""The last lines of workers that have ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unit.launcher.agent import worker
from unirun.failover.diagnosis import OOM_KILLED
from unirun.launcher import notes
from unirun.launcher.events import AgentState
from unirun.launcher.notes import Kills, kill_note, tail
from unirun.wire.reports import Reaped


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The log directory of rank 0, in which stdout was written last."""
    folder = tmp_path / "engine" / "0" / "0"
    folder.mkdir(parents=True)
    for number, (name, text) in enumerate((("stderr", "warned\n"), ("stdout", "loading\nno such model\n"))):
        (folder / f"{name}.log").write_text(text)
        os.utime(folder / f"{name}.log", (number, number))
    return folder


def told(folder: Path, kind: str, code: int | None = 1, number: int | None = None) -> str:
    one = worker(1, "engine", 0, kind=kind)
    one = replace(one, request=replace(one.request, logs=str(folder.parents[2])))
    return tail(AgentState("n0", workers={1: one}), Reaped(1, 0.0, code, number))


def test_of_a_rank_they_are_those_of_stderr_when_it_has_failed(folder: Path) -> None:
    assert told(folder, "script") == "warned"
    assert told(folder, "script", None, 9) == "warned"
    assert told(folder, "script", 0) == ""


@pytest.mark.parametrize("code", [0, 1])
def test_of_a_program_they_are_those_of_the_file_that_was_written_last(folder: Path, code: int) -> None:
    assert told(folder, "program", code) == "loading\nno such model"
    os.utime(folder / "stderr.log", (2, 2))
    assert told(folder, "program", code) == "warned"


def test_an_empty_file_says_nothing(folder: Path) -> None:
    (folder / "stderr.log").write_text("")
    assert told(folder, "program") == "loading\nno such model"


def test_without_logs_there_are_none(folder: Path) -> None:
    (folder / "stdout.log").unlink()
    assert told(folder, "program") == ""


@pytest.mark.parametrize("pid", [4242, 4243])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, None])
@pytest.mark.parametrize("cause", ["own", "order", "hung"])
def test_a_lack_of_memory_explains_a_kill_that_unirun_has_not_sent(
    cause: str, number: int | None, pid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").write_bytes(b"6,1,2,-;Out of memory: Killed process 4242 (python)")
    monkeypatch.setattr(notes, "kills_so_far", lambda: Kills(0, 8))
    monkeypatch.setattr(notes, "_log", lambda: tmp_path / "log")
    one = replace(worker(1, "actor", 0), pid=pid, cause=cause)
    state, end = AgentState("n0", workers={1: one}), Reaped(1, 0.0, None if number else 1, number)
    explained = (cause, number, pid) == ("own", signal.SIGKILL, 4242)
    assert kill_note(state, end, Kills(0, 7)) == (OOM_KILLED if explained else "")
    assert kill_note(state, replace(end, id=2), Kills(0, 7)) == "", "nothing is known of it"
