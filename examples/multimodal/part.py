"""One part of a split model: a network, its optimizer, and the ranks that train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

LEARNING_RATE = 3e-3  # of Adam


class Blank(Exception):
    """The worker has no weights: it was started again, and they are not restored yet."""


class Part:
    """One rank's copy of a part. Gradients are added up over the ranks, so that losses are those of whole batches."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        """``make`` makes the network, with the weights that torch's generator gives."""
        self._make = make
        self._network: nn.Module | None = None

    @property
    def network(self) -> nn.Module:
        """The network. Raises `Blank` before `begin` or `restore`, so that untrained weights are never used."""
        if self._network is None:
            raise Blank("a worker was started again and has no weights yet")
        return self._network

    def begin(self, seed: int) -> None:
        """Start anew, with the same weights on all ranks."""
        torch.manual_seed(seed)
        self._network = self._make()
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=LEARNING_RATE)

    def step(self) -> None:
        """One gradient step; backward has been called, and all ranks of the role come here together."""
        gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)  # over the default group, which is this role's own
        for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs."""
        return {"network": self.network.state_dict(), "optimizer": self._optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a `state`."""
        if self._network is None:
            self.begin(0)
        self.network.load_state_dict(state["network"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._optimizer.zero_grad()
