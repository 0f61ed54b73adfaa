"""PPO on CartPole-v1 as one program: a trainer that calls actors, rollouts and critics.

    cd examples/ppo_cartpole
    unirun --config job.yaml config.seeds=[0,1,2]

The trainer below is the whole algorithm in the order in which it happens. The actors have the policy and the
critics the value function, each role data-parallel over its own process group; the rollouts play.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from envs import Collector, greedy_returns
from exchange import share
from learner import (
    CLIP,
    ENTROPY_WEIGHT,
    EPOCHS,
    GAMMA,
    GRADIENT_NORM,
    LAMBDA,
    LEARNING_RATE,
    MINIBATCHES,
    VALUE_WEIGHT,
)
from ppo import ActorCritic, Trajectories, gae, minibatches, policy_loss, value_loss
from replica import Replica
from report import LiveLine, SeedResult, conclude, reward_line, seed_line
from setting import ENVS, EPISODES, SOLVED, STEPS, UPDATES, Purpose, episode_seeds
from torch import Tensor

import unirun


def joined(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The tuples that the ranks of a role returned, as one tuple of longer tensors."""
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


class Learner(unirun.Workload):
    """The common part of actors and critics: a `Replica` of one of the two networks of an `ActorCritic`."""

    def setup(self) -> None:
        """Form the process group of the role."""
        torch.set_num_threads(1)  # the networks are tiny, and ranks share the cores
        dist.init_process_group("gloo")
        network = ActorCritic()
        self.model = network.policy if self.is_actor_role() else network.value
        self.replica = Replica(
            self.model,
            lr=LEARNING_RATE,
            updates=UPDATES,
            save=self.master_handle.save_state,
            saved=self.master_handle.load_state(),
        )

    def on_generation(self, generation: int) -> None:
        """A rank that was started again gets the weights from the others."""
        self.replica.agree()

    @unirun.trainer_invocation(idempotent=True)
    def begin(self, run: int, seed: int) -> None:
        """Start the ``run``-th training with the networks that ``seed`` gives, the same on all ranks."""
        torch.manual_seed(seed)
        network = ActorCritic()
        self.model.load_state_dict((network.policy if self.is_actor_role() else network.value).state_dict())
        self.replica.begin(run)

    def _batches(self, size: int, run: int, update: int) -> list[Tensor]:
        """The minibatches of an update from ``size`` samples: indices, of this rank's own shuffling."""
        (word,) = np.random.SeedSequence([run, update, self.rank]).generate_state(1)
        generator = torch.Generator().manual_seed(int(word))
        return [batch for _ in range(EPOCHS) for batch in minibatches(size, MINIBATCHES, generator)]


def weights_channel() -> unirun.WeightsChannel:
    """The policy, numbered by run and update."""
    return unirun.WeightsChannel("policy", publisher="actor", receivers=["rollout"])


class Actor(Learner):
    """The learner of the policy."""

    def setup(self) -> None:
        """Form the process group of the role, and open the channel."""
        super().setup()
        self.channel = weights_channel()

    def on_generation(self, generation: int) -> None:
        """A rank that was started again publishes the same version as the others."""
        super().on_generation(generation)
        self.publish()

    @unirun.trainer_invocation(idempotent=True)
    def publish(self) -> int:
        """Publish the current policy to the rollouts. Returns the number of this version."""
        run, update = self.replica.done
        version = run * (UPDATES + 1) + update
        if self.channel.version != version:
            self.channel.publish(self.model, version)
        return version

    @unirun.trainer_invocation(blocking=False, idempotent=True)
    def learn(self, run: int, update: int, steps: dict[str, Tensor]) -> None:
        """One PPO update of the policy from this rank's share of the steps, tensors ``[B, …]``."""
        if not self.replica.is_due((run, update)):
            return
        for batch in self._batches(len(steps["actions"]), run, update):
            loss = policy_loss(
                self.model(steps["obs"][batch]),
                steps["actions"][batch],
                steps["log_probs"][batch],
                steps["advantages"][batch],
                clip=CLIP,
                entropy_weight=ENTROPY_WEIGHT,
            )
            self.replica.step(loss, GRADIENT_NORM)
        self.replica.complete((run, update))


class Critic(Learner):
    """The learner of the value function, which also computes advantages."""

    @unirun.trainer_invocation(idempotent=True, post_func=joined)
    @torch.no_grad()
    def judge(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and value targets, both ``[E, T]``, of trajectories ``[E, T, WIDTH]``."""
        played = Trajectories(data.transpose(0, 1))
        values = self.model(played.obs).squeeze(-1)
        advantages = gae(
            played.rewards,
            values,
            self.model(played.next_obs).squeeze(-1),
            played.terminated,
            played.done,
            gamma=GAMMA,
            lam=LAMBDA,
        )
        return advantages.T.contiguous(), (advantages + values).T.contiguous()

    @unirun.trainer_invocation(blocking=False, idempotent=True)
    def learn(self, run: int, update: int, steps: dict[str, Tensor]) -> None:
        """Fit the values to this rank's share of the targets."""
        if not self.replica.is_due((run, update)):
            return
        for batch in self._batches(len(steps["targets"]), run, update):
            values = self.model(steps["obs"][batch]).squeeze(-1)
            self.replica.step(VALUE_WEIGHT * value_loss(values, steps["targets"][batch]), GRADIENT_NORM)
        self.replica.complete((run, update))


class Rollout(unirun.Workload):
    """Plays a contiguous share of the environments with the latest weights."""

    def setup(self) -> None:
        """Make the environments. Rollouts need no process group."""
        torch.set_num_threads(1)
        self.network = ActorCritic()
        self.channel = weights_channel()
        self.run, self.collector = 0, self._environments(seed=0)

    @unirun.trainer_invocation(idempotent=True, post_func=joined)
    def collect(self, run: int, seed: int, version: int) -> tuple[Tensor, Tensor]:
        """Play STEPS steps: trajectories ``[E, STEPS, WIDTH]``, and the latest return of each environment."""
        if run != self.run:
            self.run, self.collector = run, self._environments(seed)
        self._become(version)
        played = self.collector.collect(self.network, STEPS)
        return played.data.transpose(0, 1).contiguous(), self.collector.latest_returns()

    def _environments(self, seed: int) -> Collector:
        """This rank's share of the environments, at the start of their first episodes."""
        seeds = episode_seeds(seed, Purpose.TRAINING, ENVS)
        mine = share(ENVS, self.world_size, self.rank)
        generator = torch.Generator().manual_seed(seed * ENVS + self.rank)
        return Collector([seeds[env] for env in mine], generator)

    @unirun.trainer_invocation(idempotent=True, post_func=torch.cat)
    def play(self, version: int, seeds: list[int]) -> Tensor:
        """The returns of the greedy policy on this rank's share of the episodes."""
        self._become(version)
        return greedy_returns(self.network, seeds)

    def _become(self, version: int) -> None:
        if self.channel.version == version:
            return
        try:
            self.channel.receive(into=self.network.policy, min_version=version)
        except unirun.PeerLost:
            # An actor has died meanwhile. This waits for its successor, which publishes the version again.
            self.channel.receive(into=self.network.policy, min_version=version)


class PPOTrainer(unirun.BaseTrainer):
    """Trains each seed in turn. The job fails when one of them misses the bar."""

    def init(self) -> None:
        """Read the job's ``config:``."""
        self.seeds = [int(seed) for seed in self.config.get("seeds", [0])]
        self.solved = float(self.config.get("solved", SOLVED))
        self.bar = float(self.config.get("bar", 400.0))
        self.out = Path(self.config.get("out", "reward.png"))

    def fit(self) -> dict[int, float]:
        """Returns the mean return of each seed's final policy."""
        results = [self.train(run, seed) for run, seed in enumerate(self.seeds, 1)]
        conclude(results, self.bar, self.out)
        return {result.seed: result.final for result in results}

    def train(self, run: int, seed: int) -> SeedResult:
        """Run PPO: play, compute advantages, learn, until the greedy policy is good enough."""
        started, live = time.monotonic(), LiveLine()
        env_steps: list[int] = []
        mean_returns: list[float] = []
        self.RG_ACTOR.begin(run, seed)
        self.RG_CRITIC.begin(run, seed)
        for update in range(1, UPDATES + 1):
            version = self.published()
            data, returns = self.RG_ROLLOUT.collect(run, seed, version)
            mean_return = returns.mean().item()
            env_steps.append(update * STEPS * ENVS)
            mean_returns.append(mean_return)
            self.master_handle.report({"seed": seed, "update": update, "return": mean_return})
            live.show(reward_line(seed, update, env_steps[-1], mean_return))
            if self._is_solved(seed, mean_return, version):
                break
            advantages, targets = self.RG_CRITIC.judge(unirun.shard(data))
            steps = self._samples(data, advantages)
            # Two networks, so two roles can learn at the same time.
            learning = [
                self.RG_ACTOR.learn(run, update, unirun.shard(steps)),
                self.RG_CRITIC.learn(
                    run, update, unirun.shard({"obs": steps["obs"], "targets": targets.flatten()})
                ),
            ]
            for ref in learning:
                ref.result()
        final = self.evaluate(seed, Purpose.FINAL, self.published())
        live.close()
        print(seed_line(seed, final, EPISODES, time.monotonic() - started), flush=True)
        return SeedResult(seed, env_steps, mean_returns, final)

    def published(self) -> int:
        """Let the actors publish the current policy. Returns the number of this version."""
        version: int = max(self.RG_ACTOR.publish())
        return version

    def evaluate(self, seed: int, purpose: Purpose, version: int) -> float:
        """Mean return of EPISODES episodes of the greedy policy, shared out among the rollouts."""
        episodes = unirun.shard(episode_seeds(seed, purpose, EPISODES))
        returns: Tensor = self.RG_ROLLOUT.play(version, episodes)
        return returns.mean().item()

    def _is_solved(self, seed: int, mean_return: float, version: int) -> bool:
        """Return True if a seed may stop: the policy does well while it explores, and also when it does not."""
        enough = self.solved
        return mean_return >= enough and self.evaluate(seed, Purpose.VALIDATION, version) >= enough

    @staticmethod
    def _samples(data: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        """The samples that the policy learns from, flat: one row for each step of each environment."""
        played = Trajectories(data.flatten(0, 1))
        standard = (advantages - advantages.mean()) / advantages.std().clamp(min=1e-4)
        return {
            "obs": played.obs,
            "actions": played.actions,
            "log_probs": played.log_probs,
            "advantages": standard.flatten(),
        }
