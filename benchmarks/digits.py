"""Trains a small network on scikit-learn's digits, in three ways; each writes one JSON value to RESULT.

python -m benchmarks.digits trainer RESULT         two ranks of a Trainer: samples in a second
torchrun -m benchmarks.digits torchrun RESULT      the same loop, in each rank
python -m benchmarks.digits study RESULT           20 trials of Optuna, two at a time: their accuracies
unirun -m benchmarks.digits trial RESULT NUMBER    one of these trials, in a job of its own: its accuracy
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from unirun import train

RANKS, BATCH, EPOCHS = 2, 32, 160
"""Of the loop whose speed is measured; a batch is that of a rank, and one more epoch comes first."""

TRIALS, AT_A_TIME, TRIAL_EPOCHS = 20, 2, 15


def digits() -> tuple[Tensor, Tensor]:
    """1797 images, ``[1797, 64]`` with grey values in 0..1, and their labels."""
    # Not at the top: it takes a second, and the figures' tests need none of the images.
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels)


def network(hidden: int) -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def epoch(loader: Iterable[Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Train once on all batches. Returns the mean loss."""
    losses = []
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def speed(
    prepare_loader: Callable[[TensorDataset], Iterable[Any]],
    prepare_model: Callable[[nn.Module], nn.Module],
    after: Callable[[int, nn.Module, torch.optim.Optimizer, float], None],
) -> float:
    """Samples per second of all ranks. `after` saves a checkpoint and reports the loss after each epoch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(*digits())
    loader, model = prepare_loader(data), prepare_model(network(64))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    began = 0.0
    for number in range(EPOCHS + 1):
        if number == 1:
            began = time.perf_counter()
        loss = epoch(loader, model, optimizer)
        after(number, model, optimizer, loss)
    return EPOCHS * len(data) / (time.perf_counter() - began)


def under_trainer() -> float:
    """The loop as a function of a `Trainer`."""

    def function() -> float:
        def after(number: int, model: nn.Module, optimizer: torch.optim.Optimizer, loss: float) -> None:
            train.save_checkpoint(epoch=number, model=model, optimizer=optimizer)
            train.report(epoch=number, loss=loss)

        def loader(data: TensorDataset) -> Iterable[Any]:
            return train.prepare_data_loader(DataLoader(data, BATCH, shuffle=True))

        return speed(loader, train.prepare_model, after)

    with train.Trainer(RANKS) as trainer:
        return float(min(trainer.run(function, checkpoint_strategy=train.CheckpointStrategy(num_to_keep=1))))


def under_torchrun(result: Path) -> float | None:
    """The same loop, as it is usually written for torchrun. Only rank 0 has a result."""
    dist.init_process_group("gloo")
    rank, samplers = dist.get_rank(), list[DistributedSampler[Any]]()

    def loader(data: TensorDataset) -> Iterable[Any]:
        samplers.append(DistributedSampler(data, shuffle=True))
        return DataLoader(data, BATCH, sampler=samplers[0])

    def after(number: int, model: nn.Module, optimizer: torch.optim.Optimizer, loss: float) -> None:
        samplers[0].set_epoch(number + 1)
        if rank == 0:
            part = result.with_suffix(".part")
            state = {"epoch": number, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, part)
            part.rename(result.with_suffix(".pt"))
            print(f"epoch {number}: loss {loss:.4f}", flush=True)

    found = speed(loader, DistributedDataParallel, after)
    slowest = torch.tensor(found)
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    dist.destroy_process_group()
    return slowest.item() if rank == 0 else None


def parameters(number: int) -> dict[str, Any]:
    """The parameters of a trial, the same in a study and in a job."""
    chance = random.Random(number)
    return {
        "learning_rate": 10 ** chance.uniform(-3, -1),
        "hidden": chance.randint(16, 256),
        "batch_size": chance.randint(32, 256),
    }


def trial(config: dict[str, Any]) -> float:
    """Train a network, and report its accuracy on every fifth image after each epoch. Returns the last one."""
    torch.manual_seed(0)
    images, labels = digits()
    held_out = torch.arange(len(images)) % 5 == 0
    loader = train.prepare_data_loader(
        DataLoader(
            TensorDataset(images[~held_out], labels[~held_out]),
            config["batch_size"],
            shuffle=True,
        )
    )
    model = train.prepare_model(network(config["hidden"]))
    optimizer = torch.optim.SGD(model.parameters(), config["learning_rate"], momentum=0.9)
    accuracy = 0.0
    for _ in range(TRIAL_EPOCHS):
        epoch(loader, model, optimizer)
        with torch.no_grad():
            accuracy = float((model(images[held_out]).argmax(-1) == labels[held_out]).float().mean())
        train.report(accuracy=accuracy)
    return accuracy


def study() -> list[float]:
    """Run all trials, with the parameters of a study."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {
            "learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1, log=True),
            "hidden": trial.suggest_int("hidden", 16, 256),
            "batch_size": trial.suggest_int("batch_size", 32, 256),
        }

    found = optuna.create_study(direction="maximize", pruner=optuna.pruners.NopPruner())
    for number in range(TRIALS):
        found.enqueue_trial(parameters(number))
    with train.Trainer() as trainer:
        trainable = trainer.to_trainable(
            trial, space, metric="accuracy", mode="max", max_concurrent=AT_A_TIME
        )
        found.optimize(trainable, TRIALS, n_jobs=AT_A_TIME)
    return [float(each.values[0]) for each in found.trials]


def main(way: str, result: Path, *number: str) -> None:
    """Train, and write the result."""
    ways: dict[str, Callable[[], Any]] = {
        "trainer": under_trainer,
        "torchrun": lambda: under_torchrun(result),
        "study": study,
        "trial": lambda: trial(parameters(int(number[0]))),
    }
    value = ways[way]()
    if int(os.environ.get("RANK", "0")) == 0:
        result.write_text(json.dumps(value))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
