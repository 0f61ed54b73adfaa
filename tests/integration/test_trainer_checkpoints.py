"""Checkpoints of runs on real workers: going on from one, which are kept, damage, and other numbers of ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integration.harness import Unirun
from tests.waiting import eventually
from unirun import train
from unirun.errors import CheckpointDamaged, TrainingFailed
from unirun.train import Trainer
from unirun.train.checkpoints import writer

pytestmark = pytest.mark.usefixtures("warm_functions")

Results = list[dict[str, Any]]


class TestCheckpoints:
    def test_the_best_ones_are_kept(self, trainer: Trainer) -> None:
        def function() -> None:
            for step, loss in enumerate((0.5, 0.1, 0.7, 0.3)):
                train.save_checkpoint(step=step)
                train.report(loss=loss)

        strategy = train.CheckpointStrategy(2, "loss", "min")
        trainer.run(function, checkpoint_strategy=strategy)
        assert trainer.best_checkpoint_path is not None
        assert trainer.latest_checkpoint is not None
        kept = sorted(path.name for path in Path(trainer.best_checkpoint_path).parent.iterdir())
        assert kept == ["000002", "000004"]
        assert (trainer.best_checkpoint_path[-1], trainer.latest_checkpoint[-1]) == ("2", "4")

    def test_a_report_long_after_it_has_its_score_and_tells_of_it(self, trainer: Trainer) -> None:
        def function() -> None:
            for step in range(2):
                train.save_checkpoint(step=step)
                # Longer than a checkpoint waits for its report: the model is evaluated.
                time.sleep(writer.REPORT_TIMEOUT + 0.3)
                train.report(loss=float(step))

        trainer.run(function, checkpoint_strategy=train.CheckpointStrategy(None, "loss", "min"))
        assert trainer.best_checkpoint_path is not None
        assert trainer.best_checkpoint_path[-1] == "1"
        trainer.run(function)
        assert trainer.latest_checkpoint is not None
        assert trainer.latest_checkpoint[-1] == "2"

    def test_a_run_that_diverges_comes_to_its_end_and_keeps_its_best(self, trainer: Trainer) -> None:
        def function() -> None:
            for step, loss in enumerate((0.5, float("nan"), 0.7, float("inf"))):
                train.save_checkpoint(step=step)
                train.report(loss=loss)

        results = train.JsonLoggerCallback(ranks=[0])
        trainer.run(function, None, [results], checkpoint_strategy=train.CheckpointStrategy(2, "loss", "min"))
        assert trainer.best_checkpoint_path is not None
        run = Path(trainer.best_checkpoint_path).parents[1]
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["000001", "000004"]
        assert trainer.best_checkpoint_path[-1] == "1"
        losses = [json.loads(line)[0]["loss"] for line in (run / "results.json").read_text().splitlines()]
        assert losses == [0.5, None, 0.7, None]

    def test_a_damaged_one_is_skipped(self, trainer: Trainer, tmp_path: Path) -> None:
        """The last two are damaged and a rank killed: the run goes on from the one before, and they are not the best."""

        def function(config: dict[str, str]) -> int:
            state = train.load_checkpoint()
            first: int = state["step"] + 1 if state else 0
            for step in range(first, 4):
                mark = Path(config["mark"])
                train.save_checkpoint(step=step, score=step if mark.exists() else 100 + step)
                train.report(step=step)
                dist.barrier()
                if step == 2 and not mark.exists() and train.world_rank() == 0:
                    mark.touch()
                    (damaged,) = Path(config["logdir"]).glob("run_*/checkpoints/000002/state.pt")
                    damaged.write_bytes(b"nothing")
                    (last,) = Path(config["logdir"]).glob("run_*/checkpoints/000003")
                    while not (last / "checkpoint.json").exists():
                        time.sleep(0.01)
                    flipped = bytearray((last / "state.pt").read_bytes())
                    flipped[len(flipped) // 2] ^= 255
                    (last / "state.pt").write_bytes(flipped)
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.barrier()
            return first

        with Trainer(2, logdir=tmp_path / "logs") as own:
            config = {"mark": str(tmp_path / "mark"), "logdir": str(tmp_path / "logs")}
            strategy = train.CheckpointStrategy(None, "score")
            assert own.run(function, config=config, checkpoint_strategy=strategy) == [1, 1]
        assert own.best_checkpoint_path is not None
        assert own.latest_checkpoint is not None
        assert (own.best_checkpoint_path[-1], own.latest_checkpoint[-1]) == ("1", "6")

    def test_a_damaged_one_that_is_named_is_refused(self, trainer: Trainer, tmp_path: Path) -> None:
        trainer.run(lambda: train.save_checkpoint(weights=torch.zeros(1000)))
        assert trainer.latest_checkpoint is not None
        copy = shutil.copytree(trainer.latest_checkpoint, tmp_path / "000005")
        state = bytearray((copy / "state.pt").read_bytes())
        state[len(state) // 2] ^= 255
        (copy / "state.pt").write_bytes(state)
        with pytest.raises(CheckpointDamaged, match=f"checkpoint 5 is damaged: {copy}/state.pt is not as it"):
            trainer.run(train.load_checkpoint, checkpoint=copy)

    def test_one_that_other_ranks_than_0_have_saved_is_an_error(self, trainer: Trainer) -> None:
        def function() -> None:
            for step in (1, 2):
                if train.world_rank() == 1:
                    train.save_checkpoint(step=step)
                train.report()
            time.sleep(600.0)

        with pytest.raises(TrainingFailed, match="rank 0 no checkpoints, rank 1 2 checkpoints"):
            trainer.run(function)

    def test_what_other_ranks_than_0_have_saved_is_told_once(
        self, trainer: Trainer, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def function() -> None:
            for step in range(2):
                train.save_checkpoint(step=step, model=torch.nn.Linear(1, 1), generator=train.world_rank())
                train.report()

        trainer.run(function)
        assert capfd.readouterr().err.count("'generator' of ranks 1-2 differs from the value of rank 0") == 1

    def test_one_that_is_not_loaded_after_a_loss_is_told(
        self, trainer: Trainer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def function(config: dict[str, Path]) -> None:
            for step in range(3):
                # It waits until the one before counts.
                train.save_checkpoint(step=step)
                train.report(step=step)
                dist.barrier()
                if step == 1 and train.world_rank() == 1 and not config["mark"].exists():
                    config["mark"].touch()
                    os.kill(os.getpid(), signal.SIGKILL)

        trainer.run(function, {"mark": tmp_path / "mark"})
        shown: list[str] = []

        def told() -> bool:
            shown.append(capfd.readouterr().err)
            return (
                re.search("/checkpoints/00000[12], which the function has not loaded", "".join(shown))
                is not None
            )

        eventually(told, "it is told")

    def test_what_four_ranks_have_saved_in_parts_loads_on_two(self, home: Unirun) -> None:
        def function() -> Any:
            torch.manual_seed(3)
            model = train.prepare_model(torch.nn.Linear(10, 6), parallel="fsdp")
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            state = train.load_checkpoint(into={"model": model, "optimizers": (optimizer,), "epoch": -1})
            if state is None:
                model(torch.ones(2, 10)).sum().backward()
                optimizer.step()
                train.save_checkpoint(model=model, optimizers=(optimizer,), epoch=4)
                train.report()
            momenta = [each["exp_avg"] for each in optimizer.state_dict()["state"].values()]
            whole = [tensor.full_tensor() for tensor in (*model.parameters(), *momenta)]
            return [tensor.tolist() for tensor in whole], state and state["epoch"]

        with Trainer(4) as four:
            (saved, epoch), *_ = four.run(function)
            path = four.latest_checkpoint
        assert epoch is None
        with Trainer(2) as two:
            assert two.run(function, checkpoint=path) == [(saved, 4)] * 2
            read = two.run(lambda: train.load_checkpoint(), checkpoint=path)[0]
        assert read["model"]["weight"].tolist() == saved[0]
        assert read["optimizers"][0]["state"][0]["exp_avg"].tolist() == saved[2]
        assert read["epoch"] == 4
