"""A script whose process was killed is started again, and its runs go on where they were."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unirun.errors import UsageError
from unirun.train.arguments import (
    check_writable,
    hold,
    left_unfinished,
    mark_finished,
    next_run,
    release,
    runs_in,
)
from unirun.train.callbacks import Callbacks
from unirun.train.checkpoints import CheckpointStrategy, Folder, Info
from unirun.train.checkpoints.writer import CheckpointWriter
from unirun.train.running import TrainingIterator
from unirun.train.task import Result, RunTask


def with_checkpoint(run: str) -> None:
    writer = CheckpointWriter(Folder(f"{run}/checkpoints"), CheckpointStrategy(), 0, 1, 1)
    writer.save({"epoch": 1}, {})
    writer.commit(1).result()
    writer.close()


@pytest.mark.parametrize("name", ["logs", "a::b", "a?b", "50%", "[1]*"])
def test_the_run_of_a_number_is_found_again(tmp_path: Path, name: str) -> None:
    logdir = str(tmp_path / name)
    check_writable(logdir)
    first, second = (next_run(logdir)[0] for _ in range(2))
    assert runs_in(logdir) == {1: first, 2: second}
    assert next_run(logdir, 1) == (first, first)
    assert next_run(logdir, 3) == (f"{logdir}/run_003", f"{logdir}/run_003")


@pytest.mark.parametrize("name", ["logs", "a::b"])
def test_a_run_that_has_a_checkpoint_and_no_end_is_told(tmp_path: Path, name: str) -> None:
    logdir = str(tmp_path / name)
    check_writable(logdir)
    assert left_unfinished(logdir) == ""
    run, _ = next_run(logdir)
    # It has nothing to go on from.
    assert left_unfinished(logdir) == ""
    with_checkpoint(run)
    assert left_unfinished(logdir) == run
    mark_finished(run)
    assert left_unfinished(logdir) == ""
    assert Path(run, "finished").exists()


def test_runs_behind_a_url_are_found_too(capsys: pytest.CaptureFixture[str]) -> None:
    run, local = next_run("memory://going-on")
    with_checkpoint(run)
    assert left_unfinished("memory://going-on") == run
    again, other = next_run("memory://going-on", 1)
    assert (again, other == local) == (run, False)
    told = "unirun: runs in memory://going-on have no lock: start only one program that goes on with them\n"
    assert capsys.readouterr().err == told
    mark_finished(run)
    assert left_unfinished("memory://going-on") == ""


RESULT = Result(
    "/runs/run_001",
    {"loss": 0.5, "note": "text"},
    [{"loss": 1.0}, {"loss": 0.5}],
    [Info(1, "/runs/run_001/checkpoints/000001", 1.0), Info(2, "/runs/run_001/checkpoints/000002", 0.5)],
    "/runs/run_001/checkpoints/000001",
    None,
)


def test_a_result_has_metrics_and_checkpoints() -> None:
    assert RESULT.metrics == {"loss": 0.5, "note": "text"}
    assert RESULT.checkpoint == "/runs/run_001/checkpoints/000002"
    assert RESULT.best_checkpoints == [
        ("/runs/run_001/checkpoints/000001", 1.0),
        ("/runs/run_001/checkpoints/000002", 0.5),
    ]
    assert repr(RESULT).startswith("Result(path='/runs/run_001', metrics={'loss': 0.5")


def test_its_history_is_a_data_frame_where_pandas_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in, as pandas is not needed for anything else."""
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=tuple))
    assert RESULT.metrics_dataframe == ({"loss": 1.0}, {"loss": 0.5})
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="no data frame: .*; run pip install pandas, or use history"):
        RESULT.metrics_dataframe  # noqa: B018


def test_two_trainers_do_not_go_on_with_one_run_at_a_time(tmp_path: Path) -> None:
    run, _ = next_run(str(tmp_path))
    held = hold(run)
    assert held is not None
    told = rf"{re.escape(run)} is in use by process {os.getpid()} on {re.escape(socket.gethostname())}"
    for _ in range(2):
        with pytest.raises(UsageError, match=told):
            hold(run)
    release(held)
    release(held)
    again = hold(run)
    assert again is not None
    again.close()
    release(hold(next_run(str(tmp_path))[0]))
    task = RunTask(
        print, [], False, {}, {}, f"{next_run(str(tmp_path))[0]}/checkpoints", CheckpointStrategy()
    )
    attempts: Any = SimpleNamespace(workers=None)
    options: dict[str, Any] = {"elastic": False, "grow_every": 1.0, "max_failures": 0, "retry": ()}
    left = TrainingIterator(
        attempts, task, Callbacks(()), lambda data: data, checkpoint=None, logdir="", **options
    )
    with pytest.raises(UsageError, match="is in use"):
        hold(left.url)
    # Before its first round.
    left.close()
    release(hold(left.url))
    assert hold("memory://logs/run_001") is None
    assert hold(str(tmp_path / "gone")) is None
