"""The training that is killed, the same under unirun and under Ray Train: steps of a small model over gloo."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 4
KILLED, KILLED_AFTER = 1, 10
"""This rank is killed after the report of this step."""

AFTER = 3
"""Steps that are made after the training has gone on."""

STEPS = 100_000
"""Steps without a kill: more than there are until the deadline."""


class Steps:
    """A model of two layers with its optimizer, from the beginning or from the state of a checkpoint."""

    def __init__(self, state: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.optimizer = torch.optim.Adam(model.parameters())
        self.resumed = 0
        if state is not None:
            model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.resumed = int(state["step"])
        self.model = DistributedDataParallel(model)
        self.last = self.resumed + AFTER if self.resumed else STEPS
        """The step that ends the training."""

    def make(self) -> float:
        """One step. Returns the loss."""
        loss = nn.functional.cross_entropy(self.model(torch.rand(32, 64)), torch.randint(10, (32,)))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def state(self, step: int) -> dict[str, Any]:
        """The content of a checkpoint after `step`."""
        return {
            "step": step,
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
