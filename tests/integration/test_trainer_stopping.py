"""A run whose workers are told to end saves a checkpoint in all ranks, at the same call of `train.should_stop`."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.integration.harness import START_TIMEOUT, Unirun
from tests.waiting import eventually
from unirun import train
from unirun.errors import TrainingFailed
from unirun.train import Trainer

pytestmark = pytest.mark.usefixtures("warm_functions")


def test_a_run_saves_at_one_step_when_its_job_is_stopped_and_another_goes_on(
    home: Unirun, tmp_path: Path
) -> None:
    def function() -> int:
        saved = train.load_checkpoint()
        if saved:
            return int(saved["step"])
        for step in range(100_000):
            if train.should_stop():
                train.save_checkpoint(step=step)
                (tmp_path / f"saved-{train.world_rank()}").write_text(str(step))
                break
            dist.all_reduce(torch.ones(1))
            time.sleep(random.random() * 0.02)
            if step == 5:
                (tmp_path / f"up-{train.world_rank()}").touch()
        return 0

    def stop() -> None:
        eventually(lambda: len([*tmp_path.glob("up-*")]) == 3, "all ranks are up", START_TIMEOUT)
        home("stop")

    with Trainer(num_workers=3, max_failures=0, logdir=str(tmp_path / "logs")) as trainer:
        thread = threading.Thread(target=stop)
        thread.start()
        with pytest.raises(TrainingFailed):
            trainer.run(function)
        thread.join()
        steps = [int((tmp_path / f"saved-{rank}").read_text()) for rank in range(3)]
        assert len({*steps}) == 1
        assert trainer.run(function, checkpoint=str(*tmp_path.glob("logs/*/checkpoints/*"))) == [steps[0]] * 3
