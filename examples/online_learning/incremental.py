"""A classifier that learns from a stream, and is tested on each batch before it learns from it."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

LEARNING_RATE = 3e-3  # of Adam
STEPS = 4  # gradient steps per batch
WINDOW = 4  # batches that are learnt from: the present one and those just before it


class Incremental:
    """The learner, and beside it a copy that stopped learning at batch ``freeze``."""

    def __init__(self, inputs: int, classes: int, *, freeze: int) -> None:
        """The weights come from torch's generator."""
        self._model = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, classes))
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=LEARNING_RATE)
        self._frozen = self._model
        self._freeze = freeze
        self._window: deque[tuple[Tensor, Tensor]] = deque(maxlen=WINDOW)

    def step(self, t: int, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
        """Test on batch ``t``, then learn from it: the accuracies of the learner and of the frozen copy."""
        if t >= self._freeze and self._frozen is self._model:
            self._frozen = copy.deepcopy(self._model)
        scores = _accuracy(self._model, inputs, labels), _accuracy(self._frozen, inputs, labels)
        self._window.append((inputs, labels))
        all_inputs, all_labels = (torch.cat(column) for column in zip(*self._window, strict=True))
        generator = torch.Generator().manual_seed(t)
        for _ in range(STEPS):
            batch = torch.randint(len(all_inputs), (len(inputs),), generator=generator)
            loss = nn.functional.cross_entropy(self._model(all_inputs[batch]), all_labels[batch])
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
        return scores

    def state(self) -> dict[str, Any]:
        """Everything but the window, which fills again by itself."""
        learning = self._frozen is self._model
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "frozen": None if learning else self._frozen.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        if state["frozen"] is not None:
            self._frozen = copy.deepcopy(self._model)
            self._frozen.load_state_dict(state["frozen"])


@torch.no_grad()
def _accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    right: Tensor = model(inputs).argmax(-1) == labels
    return right.float().mean().item()
