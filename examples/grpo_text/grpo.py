"""Group-relative policy optimisation, as plain functions of tensors: no processes, no language model.

Source: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300): advantages as in its section 4.1.2, the loss is minus
its equation 3, the divergence is its equation 4.

Shapes: N prompts, G answers to each of them, B answers, P tokens in a prompt, T tokens of room for an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Prompts with their sampled answers. It has a length and slices, so `unirun.shard` splits it."""

    prompts: Tensor
    """``[N, P]``"""
    tokens: Tensor
    """``[N, G, T]``"""
    log_probs: Tensor
    """``[N, G, T]``, of each token under the policy that drew it"""

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: slice | Tensor) -> Groups:
        """The prompts of a slice, or those that a mask ``[N]`` picks."""
        return Groups(self.prompts[index], self.tokens[index], self.log_probs[index])

    @staticmethod
    def joined(parts: Sequence[Groups]) -> Groups:
        """All prompts of ``parts``, in order; prompts of all parts must be of the same width."""
        return Groups(*map(torch.cat, zip(*[(p.prompts, p.tokens, p.log_probs) for p in parts], strict=True)))


@dataclass(frozen=True)
class Lesson:
    """B answers with GRPO's values for them, flat."""

    prompts: Tensor
    """``[B, P]``, each prompt as often as it has answers"""
    tokens: Tensor
    """``[B, T]``"""
    old_log_probs: Tensor
    """``[B, T]``, under the policy that drew the answers"""
    reference_log_probs: Tensor
    """``[B, T]``, under the reference"""
    advantages: Tensor
    """``[B]``"""

    @staticmethod
    def of(groups: Groups, reference_log_probs: Tensor, advantages: Tensor) -> Lesson:
        """Make lessons from groups of answers, ``[N, G, T]`` and ``[N, G]``."""
        return Lesson(
            groups.prompts.repeat_interleave(groups.tokens.shape[1], 0),
            groups.tokens.flatten(0, 1),
            groups.log_probs.flatten(0, 1),
            reference_log_probs.flatten(0, 1),
            advantages.flatten(),
        )

    def parts(self, count: int, generator: torch.Generator) -> list[Lesson]:
        """``count`` lessons with these answers, shuffled; their sizes differ by one at most."""
        order = torch.randperm(len(self.advantages), generator=generator)
        return [Lesson(*(field[index] for field in _fields(self))) for index in order.tensor_split(count)]


def _fields(lesson: Lesson) -> tuple[Tensor, ...]:
    return (
        lesson.prompts,
        lesson.tokens,
        lesson.old_log_probs,
        lesson.reference_log_probs,
        lesson.advantages,
    )


def group_advantages(rewards: Tensor, epsilon: float = 1e-4) -> Tensor:
    """The advantage of each answer over its group, in standard deviations of the group: ``[N, G]`` to ``[N, G]``.

    If all answers of a group have the same reward, the advantages are 0.
    """
    centred = rewards - rewards.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True).sqrt() + epsilon)


def teaches(rewards: Tensor) -> Tensor:
    """The groups ``[N]`` whose answers have different rewards ``[N, G]``: others have no gradient."""
    return rewards.amax(-1) > rewards.amin(-1)


def divergence(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """An estimate of the divergence from the reference at each token; 0 where both agree, positive elsewhere."""
    log_ratio = reference_log_probs - log_probs
    return log_ratio.exp() - log_ratio - 1.0


def token_losses(
    log_probs: Tensor,
    old_log_probs: Tensor,
    reference_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip: float,
    kl_weight: float,
) -> Tensor:
    """The loss ``[B, T]`` at each token, from log-probabilities ``[B, T]`` and advantages ``[B]``.

    If the policy has already changed a token's probability by more than ``clip`` in the direction of its
    advantage, the token has no gradient.
    """
    ratio = (log_probs - old_log_probs).exp()
    each = advantages.unsqueeze(-1)
    gain = (ratio * each).minimum(ratio.clamp(1.0 - clip, 1.0 + clip) * each)
    return kl_weight * divergence(log_probs, reference_log_probs) - gain


def answer_means(values: Tensor, mask: Tensor) -> Tensor:
    """The mean ``[B]`` of ``values`` ``[B, T]`` over the tokens of each answer, where ``mask`` ``[B, T]`` is 1."""
    return (values * mask).sum(-1) / mask.sum(-1)
