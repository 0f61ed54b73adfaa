"""Proximal policy optimisation, as plain functions of tensors: no processes, no environments.

Sources: PPO is Schulman et al. 2017 (arXiv:1707.06347), "PPO eq." below; the advantage estimator is
Schulman et al. 2015 (arXiv:1506.02438), "GAE eq." below; an episode that ends at its time limit is
bootstrapped as in Pardo et al. 2017 (arXiv:1712.00378); the orthogonal initialisation and its gains
follow Andrychowicz et al. 2020 (arXiv:2006.05990).

Shapes: T time steps, E environments, B = a flat batch of steps, O = 4 numbers in an observation (cart
position in m and velocity in m/s, pole angle in rad and velocity in rad/s), A = 2 actions (push left,
push right).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

OBSERVATION = 4
ACTIONS = 2


class ActorCritic(nn.Module):
    """A policy and a value function, two separate tanh networks over the same observation."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.policy = _mlp(OBSERVATION, hidden, ACTIONS, gain=0.01)
        self.value = _mlp(OBSERVATION, hidden, 1, gain=1.0)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Action logits ``[..., A]`` and state values ``[...]`` of observations ``[..., O]``."""
        return self.policy(obs), self.value(obs).squeeze(-1)


def _mlp(inputs: int, hidden: int, outputs: int, gain: float) -> nn.Sequential:
    """Two tanh layers; the ``gain`` of the last one sets how large the first outputs are."""
    layers = [nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
    for layer, layer_gain in zip(layers, (math.sqrt(2), math.sqrt(2), gain), strict=True):
        nn.init.orthogonal_(layer.weight, layer_gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


@dataclass(frozen=True)
class Trajectories:
    """T steps of E environments in one float32 tensor, so that they travel as one message.

    ``data`` is ``[T, E, WIDTH]``; every property is a view of it, so writing to a property fills the
    buffer. ``next_obs`` is the state that the action led to, also where the episode ended there and
    the next row already starts a new episode.
    """

    data: Tensor

    WIDTH = 2 * OBSERVATION + 5

    @classmethod
    def empty(cls, steps: int, envs: int) -> Trajectories:
        """Room for ``steps`` steps of ``envs`` environments, all zero."""
        return cls(torch.zeros(steps, envs, cls.WIDTH))

    @property
    def obs(self) -> Tensor:
        """Observations before the action, ``[T, E, O]``."""
        return self.data[..., :OBSERVATION]

    @property
    def next_obs(self) -> Tensor:
        """Observations after the action, ``[T, E, O]``."""
        return self.data[..., OBSERVATION : 2 * OBSERVATION]

    @property
    def actions(self) -> Tensor:
        """Actions as floats 0.0 or 1.0, ``[T, E]``."""
        return self.data[..., -5]

    @property
    def log_probs(self) -> Tensor:
        """Log-probability (nats) of each action under the policy that took it, ``[T, E]``."""
        return self.data[..., -4]

    @property
    def rewards(self) -> Tensor:
        """Rewards, ``[T, E]``; CartPole pays 1.0 per step."""
        return self.data[..., -3]

    @property
    def terminated(self) -> Tensor:
        """1.0 where the pole fell or the cart left the track, so that nothing follows, ``[T, E]``."""
        return self.data[..., -2]

    @property
    def done(self) -> Tensor:
        """1.0 where the episode ended for either reason, failure or time limit, ``[T, E]``."""
        return self.data[..., -1]


def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    done: Tensor,
    *,
    gamma: float,
    lam: float,
) -> Tensor:
    """Generalised advantage estimates ``[T, E]`` from ``[T, E]`` inputs (GAE eq. 16, PPO eq. 11-12).

    The TD residual is ``r + gamma V(s') - V(s)``, without the bootstrap ``V(s')`` where the episode
    terminated; the sum of residuals discounted by ``gamma * lam`` stops where an episode is ``done``.
    An episode cut by its time limit is done but not terminated, so it keeps its bootstrap.
    """
    residuals = rewards + gamma * (1.0 - terminated) * next_values - values
    carry = gamma * lam * (1.0 - done)
    advantages = torch.empty_like(residuals)
    following = torch.zeros_like(residuals[0])
    for t in reversed(range(len(residuals))):
        following = residuals[t] + carry[t] * following
        advantages[t] = following
    return advantages


def policy_loss(
    logits: Tensor,
    actions: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip: float,
    entropy_weight: float,
) -> Tensor:
    """The loss of the policy: minus the clipped surrogate of PPO eq. 7 and the weighted entropy.

    ``logits`` is ``[B, A]``, all else ``[B]``: ``actions`` taken, ``old_log_probs`` of them when they were
    taken, and their ``advantages``.
    """
    all_log_probs = logits.log_softmax(-1)
    log_probs = all_log_probs.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)
    ratio = (log_probs - old_log_probs).exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages)
    entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
    return -(surrogate + entropy_weight * entropy).mean()


def value_loss(values: Tensor, targets: Tensor) -> Tensor:
    """The loss of the value function, from ``[B]`` inputs: half the mean squared error."""
    return 0.5 * (values - targets).square().mean()


def ppo_loss(
    logits: Tensor,
    values: Tensor,
    actions: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    targets: Tensor,
    *,
    clip: float,
    value_weight: float,
    entropy_weight: float,
) -> Tensor:
    """The scalar to minimise when one optimizer has both networks: minus PPO eq. 9.

    The arguments are those of `policy_loss` and of `value_loss`.
    """
    policy = policy_loss(logits, actions, old_log_probs, advantages, clip=clip, entropy_weight=entropy_weight)
    return policy + value_weight * value_loss(values, targets)


def minibatches(size: int, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Split the indices ``0..size-1``, shuffled, into ``count`` parts whose sizes differ by at most one."""
    yield from torch.randperm(size, generator=generator).tensor_split(count)
