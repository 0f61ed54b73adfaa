"""Learns scikit-learn's handwritten digits with a small network."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from unirun import train


def train_func(config: dict[str, Any]) -> float:
    """Train a small network. Returns its accuracy on the held-out images."""
    torch.manual_seed(config["seed"])
    images, labels = digits()
    held_out = torch.arange(len(images)) % 5 == 0
    data = TensorDataset(images[~held_out], labels[~held_out])
    loader = train.prepare_data_loader(DataLoader(data, config["batch"] // train.world_size(), shuffle=True))
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = train.prepare_model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["learning_rate"])
    state = train.load_checkpoint(into={"model": model, "optimizer": optimizer, "epoch": 0})

    for epoch in range(state["epoch"] if state is not None else 0, config["epochs"]):
        losses = []
        for image_batch, label_batch in loader:
            loss = nn.functional.cross_entropy(model(image_batch), label_batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        correct = accuracy(model, images[held_out], labels[held_out])
        train.save_checkpoint(epoch=epoch + 1, model=model, optimizer=optimizer)
        train.report(epoch=epoch + 1, loss=sum(losses) / len(losses), accuracy=correct)
    return accuracy(model, images[held_out], labels[held_out])


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of the images that are classified as they are labelled."""
    with torch.no_grad():
        return float((model(images).argmax(-1) == labels).float().mean())


def digits() -> tuple[Tensor, Tensor]:
    """The 1797 images of 8 x 8 pixels, ``[1797, 64]`` with grey values in 0..1, and their labels 0..9."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Learns to read digits.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", help="a checkpoint to go on from")
    args = parser.parse_args()
    config = {"batch": 64, "learning_rate": 1e-2, **vars(args)}
    final, *_ = train.Trainer(2).run(train_func, config, [train.ProgressCallback()], checkpoint=args.resume)
    print(f"final accuracy {final:.4f}")
