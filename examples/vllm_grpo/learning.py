"""Losses of B answers of at most T tokens, as functions of tensors."""

from collections.abc import Sequence

import torch
from additions import END, tokens_of
from torch import Tensor, nn


def log_probs(model: nn.Module, questions: Sequence[str], tokens: Tensor) -> Tensor:
    """The log-probability ``[B, T]`` of each token of the answers ``[B, T]`` to B questions of one length."""
    prompts = torch.tensor([tokens_of(question) for question in questions])
    logits = model(input_ids=torch.cat([prompts, tokens[:, :-1]], 1)).logits[:, prompts.shape[1] - 1 :]
    found: Tensor = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return found


def mean(values: Tensor, tokens: Tensor) -> Tensor:
    """The mean of ``values`` ``[B, T]`` over the tokens up to the first END of each answer, with it."""
    return values[(tokens == END).cumsum(1) <= 1].mean()


def advantages(rewards: Tensor) -> Tensor:
    """The advantage of each answer over the others to its question, in standard deviations; ``[N, G]``."""
    deviation, average = torch.std_mean(rewards, 1, correction=0, keepdim=True)
    return (rewards - average) / (deviation + 1e-4)


def grpo(new: Tensor, old: Tensor, advantages: Tensor, clip: float = 0.2) -> Tensor:
    """The loss ``[B, T]`` of each token (arXiv:2402.03300, without its KL term), from log-probabilities of now and of
    the policy that has drawn it, and advantages ``[B]``."""
    ratio, gain = (new - old).exp(), advantages.unsqueeze(1)
    return -torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
