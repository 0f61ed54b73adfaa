"""Datasets under kills and with other numbers of ranks, and runs that give the same numbers, with real workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.effort import variants
from tests.integration.harness import Unirun, home_of
from tests.integration.test_losing_a_node import agents
from tests.integration.warm import Warm, WarmUnirun
from unirun import train
from unirun.train import Trainer

pytestmark = pytest.mark.usefixtures("warm_functions")

SAMPLES = 200


def consume(config: dict[str, Any]) -> Any:
    """Two epochs; what all ranks have used so far is in the checkpoint. At one step a rank is killed once."""
    state = train.load_checkpoint()
    used = [*state["used"]] if state else []
    shard = train.get_dataset_shard(shuffle=True, seed=3)
    loader = shard.to_torch(config["batch"])
    step = state["step"] + 1 if state else 0
    for _ in range(shard.progress.epoch, 2):
        for batch in loader:
            mine: list[Any] = [None] * train.world_size()
            dist.all_gather_object(mine, batch.tolist())
            used += [sample for each in mine for sample in each]
            mark = Path(config["mark"])
            if step == config["kill"] and train.world_rank() == train.world_size() - 1 and not mark.exists():
                mark.touch()
                os.kill(config["victim"] or os.getpid(), signal.SIGKILL)
                dist.barrier()
            train.save_checkpoint(used=used, step=step)
            train.report(world=train.world_size())
            step += 1
    return used


def each_once(used: list[int]) -> bool:
    """Each sample in each of two epochs, in another order."""
    first, second = used[:SAMPLES], used[SAMPLES:]
    return sorted(first) == sorted(second) == [*range(SAMPLES)] and first != second


@pytest.mark.parametrize("kill", variants(7, 0))
def test_each_sample_of_an_epoch_is_used_once_though_a_rank_is_killed(
    home: Unirun, tmp_path: Path, kill: int
) -> None:
    config = {"batch": 8, "kill": kill, "mark": str(tmp_path / "killed"), "victim": None}
    with Trainer(2) as trainer:
        results = trainer.run(consume, config=config, dataset=torch.arange(SAMPLES))
    assert (tmp_path / "killed").exists()
    assert each_once(results[0])


def test_each_sample_is_used_once_though_a_node_is_lost_and_fewer_ranks_go_on(
    warm: Warm, tmp_path: Path
) -> None:
    worlds: list[int] = []

    class Worlds(train.TrainingCallback):
        def handle_result(self, results: list[dict[str, Any]]) -> None:
            worlds.append(len(results))

    # A home with one job.
    with (
        home_of(WarmUnirun(tmp_path, warm)) as home,
        Trainer((2, 6), placement="fake:nodes=3,devices=2", max_failures=0) as trainer,
    ):
        trainer.start()
        (agent,) = agents(home, "node2")
        config = {"batch": 5, "kill": 4, "mark": str(tmp_path / "killed"), "victim": agent}
        results = trainer.run(consume, config=config, dataset=torch.arange(SAMPLES), callbacks=[Worlds()])
    assert {*worlds} == {6, 4}
    # The last report before the loss may not have reached the driver.
    assert worlds == sorted(worlds, reverse=True)
    assert worlds.count(6) in (3, 4)
    assert each_once(results[0])


def learn(config: dict[str, Any]) -> list[float]:
    """A small network with dropout; the losses, to the bit."""
    train.enable_reproducibility(5)
    model = train.prepare_model(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    shard = train.get_dataset_shard(shuffle=True)
    state = train.load_checkpoint()
    losses: list[float] = []
    if state is not None:
        train.unwrap(model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]
    for batch in shard.to_torch(10):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        train.backward(loss)
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses = [*losses, mean.item()]  # of all ranks: a checkpoint has one value for all
        mark = Path(config["mark"])
        if len(losses) == 5 and train.world_rank() == 1 and config["kill"] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        train.save_checkpoint(model=model, optimizer=optimizer, losses=losses)
        train.report(loss=losses[-1])
    return losses


def test_two_runs_and_one_that_was_killed_give_the_same_losses_to_the_bit(
    home: Unirun, tmp_path: Path
) -> None:
    dataset = torch.rand(200, 4, generator=torch.Generator().manual_seed(0))
    found = []
    with Trainer(2) as trainer:
        for kill in (False, False, True):
            config = {"kill": kill, "mark": str(tmp_path / "killed")}
            found.append(trainer.run(learn, config=config, dataset=dataset))
    assert (tmp_path / "killed").exists()
    assert found[0] == found[1] == found[2]
    assert found[0][0] == found[0][1]
    assert len({*found[0][0]}) == 10


def test_datasets_that_are_empty_or_shorter_than_the_ranks_or_of_unknown_length(home: Unirun) -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(7))

    def function() -> list[Any]:
        return [
            [*train.get_dataset_shard("empty")],
            [*train.get_dataset_shard("short")],
            [*train.get_dataset_shard("stream")],
            [batch.tolist() for batch in train.get_dataset_shard("stream2").to_torch(2)],
        ]

    with Trainer(3) as trainer:
        datasets = {"empty": [], "short": [1], "stream": Stream(), "stream2": Stream()}
        found = trainer.run(function, dataset=datasets)
    assert [each[0] for each in found] == [[], [], []]
    assert [each[1] for each in found] == [[1], [], []]
    assert [each[2] for each in found] == [[0, 3, 6], [1, 4], [2, 5]]
    assert sorted(sample for each in found for batch in each[3] for sample in batch) == [*range(7)]
