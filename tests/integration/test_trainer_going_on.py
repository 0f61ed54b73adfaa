"""A script whose process was killed is started again as it is, and its runs go on where they were."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.integration.harness import Unirun

pytestmark = pytest.mark.usefixtures("warm_functions")

SCRIPT = """
import os, pathlib, signal, sys
from unirun import train

def train_func(config):
    state = train.load_checkpoint()
    files = train.checkpoint_files(train.world_rank())
    said = files and (files / "note").read_text()
    for epoch in range(state["epoch"] if state else 0, 4):
        folder = pathlib.Path(config["notes"], f"{train.world_rank()}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "note").write_text(f"rank {train.world_rank()}, epoch {epoch}")
        train.save_checkpoint(epoch=epoch + 1, files=folder)
        train.report(epoch=epoch)
    return said, state and state["epoch"]

class Killed(train.TrainingCallback):
    def handle_result(self, results):
        if sys.argv[1] == "killed" and results[0]["epoch"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)

with train.Trainer(2, logdir="runs", resume=sys.argv[1] == "again") as trainer:
    callbacks = [Killed(), train.JsonLoggerCallback()]
    print(trainer.run(train_func, {"notes": os.path.abspath("notes")}, callbacks))
    print([each["epoch"] for each in trainer.result.history], trainer.result.checkpoint)
"""


def test_a_script_that_was_killed_goes_on_when_it_is_started_again(unirun: Unirun, tmp_path: Path) -> None:
    """1. Its process is killed after two epochs, each with files of both ranks in a checkpoint.

    2. With `resume` the run goes on in its directory, from the last checkpoint.
    3. Another start without `resume` says that it could go on, and begins anew.
    """
    (tmp_path / "fit.py").write_text(SCRIPT)

    def started(how: str) -> tuple[int, str, str]:
        end = unirun.start_program([sys.executable, "fit.py", how], cwd=tmp_path).end()
        return end.code, end.out, end.err

    assert started("killed")[0] == -signal.SIGKILL
    code, out, err = started("again")
    assert code == 0, err
    assert out.splitlines()[0] == "[('rank 0, epoch 1', 2), ('rank 1, epoch 1', 2)]"
    assert out.splitlines()[1] == f"[2, 3] {tmp_path}/runs/run_001/checkpoints/000004"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run_001"]
    (tmp_path / "runs" / "run_001" / "finished").unlink()
    code, out, err = started("new")
    assert code == 0, err
    assert "the run in" in err
    assert "was not finished; Trainer(…, resume=True) goes on from its checkpoint" in err
    assert out.splitlines()[1] == f"[0, 1, 2, 3] {os.fspath(tmp_path)}/runs/run_002/checkpoints/000004"
