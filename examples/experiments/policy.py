"""The common part of policy-gradient methods, as functions of packed sequences.

Sequences are a prompt and its response. What is known of each token stands at its place: ``logprobs[t]`` is the
logarithm of the probability of token ``t`` given those before, ``values[t]`` the reward that is expected after token
``t``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from unirun.experiments import Model, Place

TOKENS = "packed_input_ids"


def advantages(
    rewards: torch.Tensor, values: torch.Tensor, prompt: torch.Tensor, discount: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The advantages of the tokens of one sequence, and the returns that a critic should have expected before each
    (generalized advantage estimation, Schulman et al. 2016).

    All are ``[length]``: `rewards` for each token, `values` after each, `prompt` true for the tokens of the prompt.
    What is before token ``t`` stands at ``t - 1``; both results are 0 in the prompt.
    """
    found = torch.zeros(len(rewards))
    first = int(prompt.sum())
    later = 0.0
    for t in range(len(rewards) - 1, first - 1, -1):
        following = float(values[t]) if t + 1 < len(rewards) else 0.0
        delta = float(rewards[t]) + discount * following - float(values[t - 1])
        later = delta + discount * gae_lambda * later
        found[t] = later
    before = torch.cat([values[:1], values[:-1]])
    return found, torch.where(prompt, torch.zeros(()), found + before)


def whitened(values: torch.Tensor, mask: torch.Tensor, place: Place) -> torch.Tensor:
    """`values` with mean 0 and variance 1 where `mask` is true, over all data-parallel ranks; 0 elsewhere."""
    some = values[mask].double()
    sums = torch.stack([some.sum(), (some**2).sum(), torch.tensor(float(len(some)), dtype=torch.float64)])
    group = place.group("data")
    if group is not None:
        dist.all_reduce(sums, group=group)
    mean = sums[0] / sums[2]
    variance = (sums[1] / sums[2] - mean**2).clamp(min=1e-8)
    return torch.where(mask, (values - mean.float()) / variance.sqrt().float(), torch.zeros(()))


def clipped(logprobs: torch.Tensor, old: torch.Tensor, gains: torch.Tensor, clip: float) -> torch.Tensor:
    """The loss of each token: PPO's clipped ratio times the gain (Schulman et al. 2017)."""
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * gains, ratio.clamp(1.0 - clip, 1.0 + clip) * gains)


def stop_tokens(tokenizer: Any) -> set[int]:
    """The tokens that end a response: the end of a sequence, of which some tokenizers have several, and other special
    tokens, as the end of a turn."""
    ends = tokenizer.eos_token_id
    return {*([ends] if isinstance(ends, int) else ends), *getattr(tokenizer, "all_special_ids", ())}


def answer_of(model: Model, tokens: torch.Tensor, prompt: torch.Tensor) -> str:
    """The text of a response; empty when it has not ended."""
    response: Sequence[int] = tokens[~prompt].tolist()
    if not response or response[-1] not in stop_tokens(model.tokenizer):
        return ""
    text: str = model.tokenizer.decode(response)
    return text
