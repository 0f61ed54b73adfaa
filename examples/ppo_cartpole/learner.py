"""The learning half of PPO on one actor rank, data-parallel over the ranks of its role."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from ppo import ActorCritic, Trajectories, gae, minibatches, ppo_loss
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam
from torch.optim.lr_scheduler import LinearLR

EPOCHS = 10  # passes over the experience per update
MINIBATCHES = 4  # gradient steps per pass
LEARNING_RATE = 1e-3  # of Adam, at the first update
GAMMA = 0.99  # discount per step
LAMBDA = 0.95  # of the advantage estimate
CLIP = 0.2  # how far the probability ratio may leave 1 and still be rewarded for it
VALUE_WEIGHT = 0.5
ENTROPY_WEIGHT = 0.01
GRADIENT_NORM = 0.5  # at most, over all parameters


class Learner:
    """Improves a model in place; DDP keeps it equal on all actor ranks.

    Every rank takes the same number of gradient steps. DDP's mean counts each rank once, so where the shares
    are unequal (3 actors on 16 environments), a step in a smaller share weighs a little more.
    """

    def __init__(self, model: ActorCritic, updates: int, generator: torch.Generator) -> None:
        """The learning rate falls linearly to zero over ``updates``; ``generator`` shuffles minibatches."""
        self._model = model
        self._ddp = DistributedDataParallel(model)
        self._generator = generator
        self._optimizer = Adam(model.parameters(), lr=LEARNING_RATE, eps=1e-5)
        self._schedule = LinearLR(self._optimizer, 1.0, 0.0, total_iters=updates)

    def learn(self, experience: Trajectories) -> None:
        """One PPO update from this rank's share of the experience, ``[T, E]`` with E of its own."""
        with torch.no_grad():
            _, values = self._model(experience.obs)
            _, next_values = self._model(experience.next_obs)
        raw_advantages = gae(
            experience.rewards,
            values,
            next_values,
            experience.terminated,
            experience.done,
            gamma=GAMMA,
            lam=LAMBDA,
        )
        obs = experience.obs.flatten(0, 1)
        actions = experience.actions.flatten()
        old_log_probs = experience.log_probs.flatten()
        advantages = _standardise(raw_advantages).flatten()
        targets = (raw_advantages + values).flatten()
        for _ in range(EPOCHS):
            for batch in minibatches(len(actions), MINIBATCHES, self._generator):
                logits, new_values = self._ddp(obs[batch])
                loss = ppo_loss(
                    logits,
                    new_values,
                    actions[batch],
                    old_log_probs[batch],
                    advantages[batch],
                    targets[batch],
                    clip=CLIP,
                    value_weight=VALUE_WEIGHT,
                    entropy_weight=ENTROPY_WEIGHT,
                )
                self._optimizer.zero_grad()
                loss.backward()
                clip_grad_norm_(self._model.parameters(), GRADIENT_NORM)
                self._optimizer.step()
        self._schedule.step()


def _standardise(advantages: Tensor) -> Tensor:
    """Scale to mean 0 and standard deviation 1 over the advantages of all actor ranks together."""
    moments = torch.tensor([advantages.numel(), advantages.sum(), advantages.square().sum()])
    dist.all_reduce(moments)  # over the default group, which is this role's own
    count, total, square_total = moments.tolist()
    mean: float = total / count
    variance = square_total / count - mean**2
    return (advantages - mean) / math.sqrt(max(variance, 1e-8))
