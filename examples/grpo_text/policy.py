"""The policy that learns, one copy on each actor rank, data-parallel over them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from grpo import Lesson, answer_means, token_losses
from llama import answer_log_probs
from tokenizer import answer_mask
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import LlamaForCausalLM
from warmup import supervised_losses


class Policy:
    """A model and its optimizer. Ranks that start alike stay alike: they take the same steps together.

    Each rank brings the sum of its answers' losses, and the ranks add up gradients and numbers of answers. So
    every answer counts the same, however unequal the ranks' shares; a rank may even have none.
    """

    def __init__(
        self, model: LlamaForCausalLM, gradient_norm: float, add_up: Callable[[Tensor], object]
    ) -> None:
        """``add_up`` replaces a vector by its sum over the ranks, in place."""
        self.model = model
        self.updates = 0
        self._gradient_norm = gradient_norm
        self._add_up = add_up
        self._optimizer = AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)

    def warm_up(self, prompts: Tensor, answers: Tensor, rate: float) -> float:
        """Take one step towards the right answers ``[B, T]``. Returns the loss before it, over all ranks."""
        return self._step(supervised_losses(self.model, prompts, answers), rate)

    def improve(self, lesson: Lesson, rate: float, *, clip: float, kl_weight: float) -> float:
        """Take one step of GRPO. Returns the loss before it, over all ranks."""
        losses = token_losses(
            answer_log_probs(self.model, lesson.prompts, lesson.tokens),
            lesson.old_log_probs,
            lesson.reference_log_probs,
            lesson.advantages,
            clip=clip,
            kl_weight=kl_weight,
        )
        return self._step(answer_means(losses, answer_mask(lesson.tokens)), rate)

    def weights(self) -> dict[str, Tensor]:
        """A copy of the model's weights, by name."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def state(self) -> dict[str, Any]:
        """A copy of the state that another rank needs to continue like this one."""
        optimizer = copy.deepcopy(self._optimizer.state_dict())
        return {"weights": self.weights(), "optimizer": optimizer, "updates": self.updates}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from the `state` of another rank."""
        self.model.load_state_dict(state["weights"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]

    def _step(self, losses: Tensor, rate: float) -> float:
        """Take a step along the mean gradient of the ``losses`` ``[B]`` of all ranks. Returns the mean loss."""
        self._optimizer.zero_grad()
        total = losses.sum()
        if len(losses):
            total.backward()
        parameters = list(self.model.parameters())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        sums = torch.tensor([total.item(), float(len(losses))])
        message = torch.cat([*(gradient.flatten() for gradient in gradients), sums])
        self._add_up(message)
        count = message[-1].item()
        if not count:
            return 0.0
        pieces = (message[:-2] / count).split([p.numel() for p in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        clip_grad_norm_(parameters, self._gradient_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.updates += 1
        return message[-2].item() / count
