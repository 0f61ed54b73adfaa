"""Checkpoints of runs on real workers: going on from one, which are kept, damage, and other numbers of ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integration.harness import Unirun
from unirun import train
from unirun.errors import UsageError
from unirun.train import Trainer
from unirun.train.checkpoints import writer

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
                time.sleep(writer.HOLD + 0.3)
                train.report(loss=float(step))

        trainer.run(function, checkpoint_strategy=train.CheckpointStrategy(None, "loss", "min"))
        assert trainer.best_checkpoint_path is not None
        assert trainer.best_checkpoint_path[-1] == "1"
        trainer.run(function)
        assert trainer.latest_checkpoint is not None
        assert trainer.latest_checkpoint[-1] == "2"

    def test_a_score_that_is_not_a_number_ends_the_run(self, trainer: Trainer) -> None:
        def function() -> None:
            train.save_checkpoint(step=1)
            train.report(loss=float("nan"))

        with pytest.raises(UsageError, match="the score 'loss' of a checkpoint is nan"):
            trainer.run(function, checkpoint_strategy=train.CheckpointStrategy(2, "loss"))

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
                    (last / "state.pt").write_bytes(b"nothing")
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
