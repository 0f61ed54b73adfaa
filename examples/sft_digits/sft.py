"""Supervised fine-tuning: a classifier that knows the digits 0 to 4 learns 5 to 9, and is kept from forgetting.

One role, `Model`, is data-parallel like any torchrun script; the trainer sends it through the stages. A model
travels through the calls, weights in and weights out, so no rank has anything to lose: when one dies in the
middle of a stage, the stage is simply done again.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from digits import held_out, load, of_classes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import unirun

BATCH = 64  # images per step, over all ranks
HIDDEN = 64
Weights = dict[str, Tensor]
Row = dict[str, float | str]


def network() -> nn.Sequential:
    """From images ``[B, 64]`` to logits ``[B, 10]``."""
    return nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


class Model(unirun.Workload):
    """One rank of the data-parallel model."""

    def setup(self) -> None:
        """Form the process group of the role."""
        torch.set_num_threads(1)  # the network is tiny, and ranks share the cores
        dist.init_process_group("gloo")

    @unirun.trainer_invocation(idempotent=True, post_func=lambda models: models[0])
    def tune(
        self, weights: Weights, images: Tensor, labels: Tensor, *, epochs: int, lr: float, seed: int
    ) -> Weights:
        """Train a model with these weights on this rank's part of the images. Returns the new weights."""
        model = network()
        model.load_state_dict(weights)
        # Made for each stage, so it is of the process group that there is now.
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        generator = torch.Generator().manual_seed(seed * self.world_size + self.rank)
        # All ranks take as many steps, also where one has an image more.
        steps = max(len(images) * self.world_size // BATCH, 1)
        for epoch in range(epochs):
            total = 0.0
            for batch in torch.randperm(len(images), generator=generator).tensor_split(steps):
                loss = nn.functional.cross_entropy(parallel(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item()
            self.master_handle.report({"epoch": epoch + 1, "loss": total / steps})
        return model.state_dict()

    @unirun.trainer_invocation(idempotent=True, post_func=sum)
    @torch.no_grad()
    def correct(self, weights: Weights, images: Tensor, labels: Tensor) -> int:
        """The number of images of this rank's part that the model classifies correctly."""
        model = network()
        model.load_state_dict(weights)
        return int((model(images).argmax(-1) == labels).sum())


class SFTTrainer(unirun.BaseTrainer):
    """Pre-trains on 0 to 4, fine-tunes on 5 to 9 alone, and again with some old images among the new ones."""

    def init(self) -> None:
        """Load the images, and read the job's ``config:``."""
        self.seed = int(self.config.get("seed", 0))
        self.epochs = int(self.config.get("epochs", 40))
        self.rehearsed = float(self.config.get("rehearsed", 0.1))
        images, labels = load()
        test = held_out(len(images))
        self.train, self.test = (images[~test], labels[~test]), (images[test], labels[test])

    def fit(self) -> list[Row]:
        """Returns a row for each model: how well it knows the old and the new digits."""
        torch.manual_seed(self.seed)
        old, new = of_classes(self.train, range(5)), of_classes(self.train, range(5, 10))
        some = torch.randperm(len(old[0]))[: round(self.rehearsed * len(old[0]))]
        mixed = torch.cat([new[0], old[0][some]]), torch.cat([new[1], old[1][some]])

        pretrained = self.tune(network().state_dict(), old, lr=5e-3)
        return [
            self.row("pre-trained on 0-4", pretrained),
            self.row("fine-tuned on 5-9", self.tune(pretrained, new, lr=2e-3)),
            self.row(
                f"fine-tuned on 5-9 and {self.rehearsed:.0%} of 0-4", self.tune(pretrained, mixed, lr=2e-3)
            ),
        ]

    def tune(self, weights: Weights, data: tuple[Tensor, Tensor], *, lr: float) -> Weights:
        """One stage, on data that is shuffled and shared out among the ranks."""
        order = torch.randperm(len(data[0]))
        images, labels = (unirun.shard(each[order]) for each in data)
        tuned: Weights = self.RG_MODEL.tune(
            weights, images, labels, epochs=self.epochs, lr=lr, seed=self.seed
        )
        return tuned

    def row(self, name: str, weights: Weights) -> Row:
        """The accuracies of a model on held-out images."""
        accuracies = {}
        for column, classes in (("0-4", range(5)), ("5-9", range(5, 10)), ("all", range(10))):
            images, labels = of_classes(self.test, classes)
            right = self.RG_MODEL.correct(weights, unirun.shard(images), unirun.shard(labels))
            accuracies[column] = right / len(labels)
        knows = ", ".join(f"{accuracy:.1%} of {column}" for column, accuracy in accuracies.items())
        print(f"{name}: knows {knows}", flush=True)
        return {"model": name, **accuracies}
