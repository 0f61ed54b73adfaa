"""A model that the ranks of a role train together, and that survives the loss of a rank."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam
from torch.optim.lr_scheduler import LinearLR

State = dict[str, Any]


class Replica:
    """One rank's copy of the model. It is the same on all ranks after each update.

    An update is a row of gradient steps. When a rank dies in the middle of one, the others have taken some of
    them: `agree` puts them back to the last update that was complete, hands it to the rank that came in the dead
    one's place, and the update can be made again as if nothing had happened.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        updates: int,
        save: Callable[[bytes], None],
        saved: bytes | None = None,
    ) -> None:
        """The learning rate falls linearly from ``lr`` to zero over ``updates``.

        ``save`` keeps what a rank without colleagues would lose when it dies; ``saved`` is what it kept before.
        """
        self.model, self._lr, self._updates, self._save = model, lr, updates, save
        self._restart()
        self.done = (0, 0)
        """The run that this is, and the number of its updates that are complete. ``(0, 0)``: no run has begun."""
        self._kept: State | None = None
        if saved is not None:
            self._restore(pickle.loads(saved))  # noqa: S301 - this rank wrote it

    def begin(self, run: int) -> None:
        """Start the ``run``-th training, of the model's present weights; ``run`` counts from 1."""
        self._restart()
        self.complete((run, 0))

    def is_due(self, done: tuple[int, int]) -> bool:
        """Return True if this update is to be made now; it is not when the trainer asks once more for a
        complete one.

        Raises `RuntimeError` when those before it are missing, because all ranks died at the same time.
        """
        if self.done >= done:
            return False
        if self.done != (done[0], done[1] - 1):
            raise RuntimeError(f"update {done} follows {self.done}: all copies of the weights were lost")
        return True

    def step(self, loss: Tensor, gradient_norm: float) -> None:
        """One gradient step on the mean of all ranks' losses; every rank takes as many."""
        self._optimizer.zero_grad()
        loss.backward()
        parameters = list(self.model.parameters())
        gradients = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        dist.all_reduce(gradients)  # over the default group, which is this role's own
        gradients /= dist.get_world_size()
        parts = gradients.split([p.numel() for p in parameters if p.grad is not None])
        for parameter, part in zip((p for p in parameters if p.grad is not None), parts, strict=True):
            parameter.grad = part.view_as(parameter)
        clip_grad_norm_(parameters, gradient_norm)
        self._optimizer.step()

    def complete(self, done: tuple[int, int]) -> None:
        """End an update: save its result."""
        if done[1] > 0:
            self._schedule.step()
        self.done = done
        self._kept = copy.deepcopy(
            {
                "done": done,
                "model": self.model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "schedule": self._schedule.state_dict(),
            }
        )
        if dist.get_world_size() == 1:
            # Nobody else has it.
            self._save(pickle.dumps(self._kept))

    def agree(self) -> None:
        """Called on all ranks when their group was formed: go back or forward to the latest complete update."""
        states: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
        dist.all_gather_object(states, self.done)
        latest = max(states)
        if latest > (0, 0):
            message = [self._kept]
            dist.broadcast_object_list(message, src=states.index(latest))
            assert message[0] is not None
            self._restore(message[0])

    def _restart(self) -> None:
        self._optimizer = Adam(self.model.parameters(), lr=self._lr, eps=1e-5)
        self._schedule = LinearLR(self._optimizer, 1.0, 0.0, total_iters=self._updates)

    def _restore(self, state: State) -> None:
        self._kept, self.done = state, state["done"]
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
