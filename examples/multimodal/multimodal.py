"""Multimodal learning: each modality has an encoder in a role of its own, and a third role brings them together.

    cd examples/multimodal
    unirun --config job.yaml

The model is cut where the roles meet (split learning). Images stay with the image encoders, names with the name
encoders and labels with the fusion; the trainer moves embeddings one way and their gradients the other way.
"""

from __future__ import annotations

from typing import Any

import modalities
import torch
import torch.distributed as dist
from networks import EMBEDDING, Fusion, ImageEncoder, NameEncoder
from part import Blank, Part
from torch import Tensor, nn

import unirun

BATCH = 64
MODES = ("image", "name", "both")


State = dict[str, Any]


def first(states: list[State]) -> State:
    """The state of rank 0; the others are the same."""
    return states[0]


class Stage(unirun.Workload):
    """The common base of all roles: a part of the model, which the trainer can save and restore."""

    NETWORK: type[nn.Module]

    def setup(self) -> None:
        """Form the process group of the role."""
        torch.set_num_threads(1)  # the networks are tiny, and ranks share the cores
        dist.init_process_group("gloo")
        self.part = Part(self.NETWORK)

    @unirun.trainer_invocation(idempotent=True, post_func=first)
    def begin(self, seed: int) -> State:
        """Initialize the weights. Returns their state."""
        self.part.begin(seed)
        return self.part.state()

    @unirun.trainer_invocation(target="RANK0")
    def state(self) -> State:
        """The weights, which are the same on all ranks, and the optimizer's state."""
        return self.part.state()

    @unirun.trainer_invocation(idempotent=True)
    def restore(self, state: State) -> None:
        """Go back to a state; a rank that was started again gets its weights here."""
        self.part.restore(state)


class Encoder(Stage):
    """The encoder of one modality: it has the inputs and computes embeddings."""

    @staticmethod
    def inputs(seed: int, view: int) -> Tensor:
        """All inputs of this modality."""
        raise NotImplementedError

    def setup(self) -> None:
        """Form the process group. Inputs are loaded when they are needed first."""
        super().setup()
        self.view, self.data = (-1, -1), torch.empty(0)

    @unirun.trainer_invocation(blocking=False, post_func=torch.cat)
    def forward(self, seed: int, view: int, indices: Tensor) -> Tensor:
        """The embeddings ``[B, EMBEDDING]`` of these inputs in a ``view``; `backward` may follow."""
        if self.view != (seed, view):
            self.view, self.data = (seed, view), self.inputs(seed, view)
        self.embeddings: Tensor = self.part.network(self.data[indices])
        detached: Tensor = self.embeddings.detach()
        return detached

    @unirun.trainer_invocation(blocking=False)
    def backward(self, gradients: Tensor) -> None:
        """Learn from the gradients of the loss by the latest embeddings."""
        self.embeddings.backward(gradients)
        self.part.step()


class Images(Encoder):
    """The encoder of images."""

    NETWORK = ImageEncoder
    inputs = staticmethod(modalities.images)


class Names(Encoder):
    """The encoder of names."""

    NETWORK = NameEncoder
    inputs = staticmethod(modalities.names)


def moved(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The gradients of all ranks, as two tensors."""
    image, name = zip(*parts, strict=True)
    return torch.cat(image), torch.cat(name)


class Brain(Stage):
    """The fusion network, which has the labels."""

    NETWORK = Fusion

    def setup(self) -> None:
        """Load the labels."""
        super().setup()
        self.labels = modalities.labels()

    @unirun.trainer_invocation(post_func=moved)
    def learn(self, image: Tensor, name: Tensor, indices: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Learn from this rank's share of a batch of ``total``; the gradients by both embeddings."""
        image.requires_grad_(), name.requires_grad_()
        logits = self.part.network(image, name)
        loss = nn.functional.cross_entropy(logits, self.labels[indices], reduction="sum") / total
        loss.backward()
        self.part.step()
        assert image.grad is not None
        assert name.grad is not None
        return image.grad, name.grad

    @unirun.trainer_invocation(idempotent=True, post_func=sum)
    @torch.no_grad()
    def correct(self, image: Tensor, name: Tensor, indices: Tensor) -> int:
        """The number of these digits that are recognised."""
        logits = self.part.network(image, name)
        return int((logits.argmax(-1) == self.labels[indices]).sum())


class MultimodalTrainer(unirun.BaseTrainer):
    """Trains with either modality alone and with both, and compares."""

    def init(self) -> None:
        """Load the digits to train on and to test on."""
        self.seed, self.epochs = int(self.config.seed), int(self.config.epochs)
        self.train_set, self.test_set = modalities.split(len(modalities.labels()))

    def fit(self) -> dict[str, float]:
        """Returns the accuracy of each mode on held-out digits."""
        accuracies = {}
        for mode in MODES:
            accuracies[mode] = self.train(mode)
            print(f"{mode:6} accuracy {accuracies[mode]:.1%}", flush=True)
        gain = accuracies["both"] - max(accuracies["image"], accuracies["name"])
        print(f"both together are {100 * gain:.1f} points better than the better one alone", flush=True)
        return accuracies

    def train(self, mode: str) -> float:
        """Train from new weights. Returns the accuracy. An epoch in which a worker is lost is repeated."""
        groups = (self.RG_IMAGES, self.RG_NAMES, self.RG_BRAIN)
        states = [group.begin(self.seed) for group in groups]
        epoch = 1
        while epoch <= self.epochs:
            try:
                self.epoch(mode, epoch)
                states = [group.state() for group in groups]
                epoch += 1
            except (unirun.WorkerLost, Blank) as loss:
                print(f"epoch {epoch} begins again: {loss}", flush=True)
                for group, state in zip(groups, states, strict=True):
                    group.restore(state)
        image, name = self.embed(mode, 0, self.test_set)
        right: int = self.RG_BRAIN.correct(*map(unirun.shard, (image, name, self.test_set)))
        return right / len(self.test_set)

    def epoch(self, mode: str, epoch: int) -> None:
        """Train one epoch. Each epoch has another view of the digits."""
        generator = torch.Generator().manual_seed(1000 * self.seed + epoch)
        order = self.train_set[torch.randperm(len(self.train_set), generator=generator)]
        for batch in order.split(BATCH):
            image, name = self.embed(mode, epoch, batch)
            shards = map(unirun.shard, (image, name, batch))
            gradients = dict(zip(MODES, self.RG_BRAIN.learn(*shards, len(batch)), strict=False))
            refs = [
                group.backward(unirun.shard(gradients[modality]))
                for modality, group in self.encoders(mode).items()
            ]
            for ref in refs:
                ref.result()

    def embed(self, mode: str, view: int, indices: Tensor) -> list[Tensor]:
        """The embeddings of both modalities, made at the same time; zeros for one that takes no part."""
        refs = {
            modality: group.forward(self.seed, view, unirun.shard(indices))
            for modality, group in self.encoders(mode).items()
        }
        nothing = torch.zeros(len(indices), EMBEDDING)
        return [refs[modality].result() if modality in refs else nothing for modality in ("image", "name")]

    def encoders(self, mode: str) -> dict[str, unirun.RoleGroup]:
        """The role groups that take part in a mode."""
        every = {"image": self.RG_IMAGES, "name": self.RG_NAMES}
        return {modality: group for modality, group in every.items() if mode in (modality, "both")}
