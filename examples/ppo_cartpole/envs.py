"""CartPole-v1 environments: one collector of training experience, one evaluation of the greedy policy."""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from ppo import ActorCritic, Trajectories
from torch import Tensor


def make_envs(count: int) -> SyncVectorEnv:
    """``count`` CartPole-v1 environments, each of which restarts in the step that ends its episode."""
    return SyncVectorEnv([lambda: gym.make("CartPole-v1")] * count, autoreset_mode=AutoresetMode.SAME_STEP)


class Collector:
    """Environments that go on from one call of `collect` to the next, episodes across calls included."""

    def __init__(self, seeds: Sequence[int], generator: torch.Generator) -> None:
        """One environment per entry of ``seeds``; ``generator`` draws the actions."""
        self._envs = make_envs(len(seeds))
        self._generator = generator
        obs, _ = self._envs.reset(seed=[*seeds])
        self._obs = torch.from_numpy(obs)
        self._running = torch.zeros(len(seeds))
        self._latest = torch.full((len(seeds),), torch.nan)

    def latest_returns(self) -> Tensor:
        """The return of the last finished episode of each environment that has finished one, ``[<= E]``."""
        return self._latest[~self._latest.isnan()]

    @torch.no_grad()
    def collect(self, model: ActorCritic, steps: int) -> Trajectories:
        """Follow the policy, its actions sampled, for ``steps`` steps of every environment."""
        out = Trajectories.empty(steps, self._envs.num_envs)
        for t in range(steps):
            log_probs = model.policy(self._obs).log_softmax(-1)
            actions = torch.multinomial(log_probs.exp(), 1, generator=self._generator)
            obs, rewards, terminated, truncated, info = self._envs.step(actions.squeeze(-1).numpy())
            done = terminated | truncated
            successor = obs.copy()
            for env in np.flatnonzero(done):
                successor[env] = info["final_obs"][env]

            out.obs[t] = self._obs
            out.next_obs[t] = torch.from_numpy(successor)
            out.actions[t] = actions.squeeze(-1)
            out.log_probs[t] = log_probs.gather(-1, actions).squeeze(-1)
            out.rewards[t] = torch.from_numpy(rewards)
            out.terminated[t] = torch.from_numpy(terminated)
            out.done[t] = torch.from_numpy(done)

            self._obs = torch.from_numpy(obs)
            self._running += out.rewards[t]
            ended = torch.from_numpy(done)
            self._latest[ended] = self._running[ended]
            self._running[ended] = 0.0
        return out


@torch.no_grad()
def greedy_returns(model: ActorCritic, seeds: Sequence[int]) -> Tensor:
    """Returns ``[len(seeds)]`` of one episode per seed in which the likeliest action is taken throughout."""
    returns = torch.zeros(len(seeds))
    if not seeds:
        return returns
    envs = make_envs(len(seeds))
    obs, _ = envs.reset(seed=[*seeds])
    playing = torch.ones(len(seeds), dtype=torch.bool)
    while playing.any():
        actions = model.policy(torch.from_numpy(obs)).argmax(-1)
        obs, rewards, terminated, truncated, _ = envs.step(actions.numpy())
        returns += torch.from_numpy(rewards).float() * playing
        playing &= ~torch.from_numpy(terminated | truncated)
    return returns
