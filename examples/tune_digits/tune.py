"""Search the hyperparameters of a small network on scikit-learn's digits: 20 trials, two at a time.

python examples/tune_digits/tune.py
python examples/tune_digits/tune.py --storage sqlite:///study.db    # goes on after it was killed
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import optuna
import torch
from plot import plot
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unirun import train

EPOCHS = 15
WARM_UP = 3  # the first epoch after which a trial may be pruned


def train_func(config: dict[str, Any]) -> None:
    """Train a network with one hidden layer, and report its accuracy on every fifth image after each epoch."""
    torch.manual_seed(0)
    images, labels = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    images = images.float() / 16.0
    held_out = torch.arange(len(images)) % 5 == 0
    training = TensorDataset(images[~held_out], labels[~held_out])
    loader = train.prepare_data_loader(DataLoader(training, config["batch_size"], shuffle=True))
    model: nn.Module = nn.Sequential(
        nn.Linear(64, config["hidden"]), nn.ReLU(), nn.Linear(config["hidden"], 10)
    )
    model = train.prepare_model(model)
    device = train.device()
    optimizer = torch.optim.SGD(model.parameters(), config["learning_rate"], momentum=0.9)
    for _ in range(EPOCHS):
        for image_batch, label_batch in loader:
            loss = nn.functional.cross_entropy(model(image_batch.to(device)), label_batch.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            guesses = model(images[held_out].to(device)).argmax(-1).cpu()
        train.report(accuracy=(guesses == labels[held_out]).float().mean())


def space(trial: optuna.Trial) -> dict[str, Any]:
    """The parameters of one trial."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1.0, log=True),
        "hidden": trial.suggest_int("hidden", 4, 256, log=True),
        "batch_size": trial.suggest_int("batch_size", 16, 256, log=True),
    }


def main() -> None:
    """Search, print the best trial, and draw the search."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each trial")
    parser.add_argument("--storage", help="where Optuna keeps the study, as sqlite:///study.db")
    parser.add_argument("--out", type=Path, default=Path("plot.png"))
    args = parser.parse_args()

    study = optuna.create_study(
        study_name="digits",
        storage=args.storage,
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(),
        pruner=optuna.pruners.MedianPruner(n_warmup_steps=WARM_UP),
    )
    begin = time.monotonic()
    with train.Trainer(args.ranks) as trainer:
        trainable = trainer.to_trainable(
            train_func, space, metric="accuracy", mode="max", max_concurrent=args.jobs
        )
        study.optimize(trainable, n_trials=trainable.resume(study, args.trials), n_jobs=args.jobs)
    seconds = time.monotonic() - begin

    states = [trial.state.name for trial in study.trials]
    print(f"{states.count('COMPLETE')} trials complete, {states.count('PRUNED')} pruned, {seconds:.1f} s")
    print(f"accuracy {study.best_value:.1%} with")
    for name, value in study.best_params.items():
        print(f"  {name} {value:.3g}")
    plot(study, args.out)


if __name__ == "__main__":
    main()
