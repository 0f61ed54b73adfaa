"""The job: four roles that serve, and the trainer that calls them.

Weights go from the actors to rollouts and reference through a channel. A rollout that was started again gets
them there, a reference keeps its own with the job, an actor gets what it lost from the other ones. So any one of
them may die: it is started again, the call that it was in is made again, and the training goes on.
"""

from __future__ import annotations

import io
import itertools
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from grpo import Groups, Lesson, group_advantages, teaches
from llama import answer_log_probs, make_model, sample
from policy import Policy
from progress import Progress, plot
from recipe import learning_rate, recipe_of
from tasks import Task, Tasks
from tokenizer import decode, pad_left, pad_right
from torch import Tensor

import unirun
from unirun import BaseTrainer, BaseWorkload, WeightsChannel, trainer_invocation


def weights_channel() -> WeightsChannel:
    """The policy after each update, numbered by its gradient steps."""
    return WeightsChannel("policy", publisher="actor", receivers=["rollout", "reference"])


class Actor(BaseWorkload):
    """The learner. All ranks have the same policy and take the same steps, each with its part of the answers."""

    def setup(self) -> None:
        torch.set_num_threads(1)  # the model is tiny, and ranks share the cores
        self.recipe = recipe_of(self.config)
        self.shuffle = torch.Generator().manual_seed(self.recipe.seed + self.rank)
        self.policy = Policy(make_model(self.recipe.seed), self.recipe.gradient_norm, self._add_up)
        self.channel = weights_channel()
        if self.world_size > 1:
            dist.init_process_group("gloo")

    def on_generation(self, generation: int) -> None:
        """A rank that was started again copies the state of the rank with the most steps."""
        if self.world_size == 1:
            return
        updates: list[int] = [0] * self.world_size
        dist.all_gather_object(updates, self.policy.updates)
        best = updates.index(max(updates))
        state = [self.policy.state()]
        dist.broadcast_object_list(state, src=best)
        self.policy.load(state[0])
        self.publish()

    @trainer_invocation(idempotent=True)
    def warm_up(self, tasks: list[Task], rate: float) -> float:
        """Take one supervised step on this rank's part of some solved tasks. Returns the loss over all ranks."""
        prompts, answers = pad_left([t.prompt for t in tasks]), [t.answer for t in tasks]
        return self.policy.warm_up(prompts, pad_right(answers, self.recipe.room), rate)

    @trainer_invocation(idempotent=True)
    def update(self, groups: Groups, reference_log_probs: Tensor, advantages: Tensor, rate: float) -> float:
        """GRPO on this rank's share of a batch, in a few gradient steps; the mean of their losses.

        Should the call be made twice, the batch is learnt from twice: the clip sees to it that this changes little.
        """
        recipe, lesson = self.recipe, Lesson.of(groups, reference_log_probs, advantages)
        losses = [
            self.policy.improve(part, rate, clip=recipe.clip, kl_weight=recipe.kl_weight)
            for part in lesson.parts(recipe.minibatches, self.shuffle)
        ]
        return sum(losses) / len(losses)

    @trainer_invocation(idempotent=True)
    def publish(self) -> int:
        """Publish the current policy. Returns the number of this version."""
        if self.channel.version != self.policy.updates:
            self.channel.publish(self.policy.model, self.policy.updates)
        return self.policy.updates

    def _add_up(self, vector: Tensor) -> None:
        if self.world_size > 1:
            dist.all_reduce(vector)


class Rollout(BaseWorkload):
    """Answers questions with the latest weights; each rank has a part of them."""

    def setup(self) -> None:
        torch.set_num_threads(1)
        self.recipe = recipe_of(self.config)
        self.model = make_model(self.recipe.seed)
        self.channel = weights_channel()
        self.generator = torch.Generator().manual_seed(self.recipe.seed * 1000 + self.rank)

    @trainer_invocation(idempotent=True)
    def generate(self, prompts: Tensor, version: int) -> Groups:
        """A group of answers to each of ``prompts`` ``[N, P]``, drawn from this version of the policy."""
        self._become(version)
        each = prompts.repeat_interleave(self.recipe.group, 0)
        tokens, log_probs = sample(self.model, each, self.recipe.room, self.generator)
        shape = (len(prompts), self.recipe.group, self.recipe.room)
        return Groups(prompts, tokens.reshape(shape), log_probs.reshape(shape))

    @trainer_invocation(idempotent=True)
    def best_answers(self, prompts: Tensor, version: int) -> Tensor:
        """The likeliest answer ``[N, 1, T]`` to each of ``prompts`` ``[N, P]``, token by token."""
        self._become(version)
        tokens, _ = sample(self.model, prompts, self.recipe.room, None)
        return tokens.unsqueeze(1)

    def _become(self, version: int) -> None:
        if self.channel.version != version:
            self.channel.receive(into=self.model, min_version=version)


class Reference(BaseWorkload):
    """The policy after the warm-up."""

    def setup(self) -> None:
        torch.set_num_threads(1)
        self.model = make_model(recipe_of(self.config).seed)
        self.channel = weights_channel()
        kept = self.master_handle.load_state()
        if kept is not None:
            self.model.load_state_dict(torch.load(io.BytesIO(kept), weights_only=True))

    @trainer_invocation(idempotent=True)
    def keep(self, version: int) -> None:
        """Use this version of the policy from now on, also after a restart of this worker."""
        self.channel.receive(into=self.model, min_version=version)
        file = io.BytesIO()
        torch.save(self.model.state_dict(), file)
        self.master_handle.save_state(file.getvalue())

    @trainer_invocation(idempotent=True)
    @torch.no_grad()
    def log_probs(self, groups: Groups) -> Tensor:
        """The log-probability of each token of the answers, ``[N, G, T]``."""
        prompts = groups.prompts.repeat_interleave(groups.tokens.shape[1], 0)
        return answer_log_probs(self.model, prompts, groups.tokens.flatten(0, 1)).view_as(groups.log_probs)


class Reward(BaseWorkload):
    """Scores answers with the verifier."""

    def setup(self) -> None:
        recipe = recipe_of(self.config)
        self.tasks = Tasks(recipe.min_terms, recipe.max_terms)

    @trainer_invocation(idempotent=True)
    def score(self, tasks: list[Task], tokens: Tensor) -> Tensor:
        """The score ``[N, G]``, from 0 to 1, of each answer ``[N, G, T]`` to the N tasks."""
        rows = zip(tasks, tokens.tolist(), strict=True)
        scores = [[self.tasks.score(task, decode(answer)) for answer in group] for task, group in rows]
        return torch.tensor(scores).reshape(tokens.shape[:2])


class GRPOTrainer(BaseTrainer):
    """Runs the warm-up, then in each step generates answers, scores them and trains."""

    def init(self) -> None:
        """The tasks to train on and those that are held out."""
        self.recipe = recipe_of(self.config)
        tasks = Tasks(self.recipe.min_terms, self.recipe.max_terms)
        self.stream = tasks.training(self.recipe.seed)
        self.held_out = tasks.held_out(self.recipe.held_out)

    def fit(self) -> dict[str, float]:
        """Train; exit with status 1 if the gain in accuracy is below the bar."""
        started = time.monotonic()
        version = self.warm_up()
        self.RG_REFERENCE.keep(version)
        progress = Progress(warm=self.accuracy(version))
        print(f"warm-up of {self.recipe.warmup_steps} steps, {time.monotonic() - started:.0f} s")
        print(progress.line())
        for step in range(self.recipe.steps):
            progress.rewards.append(self.step(step, version))
            version = self.published()
            if (step + 1) % self.recipe.evaluate_every == 0 or step + 1 == self.recipe.steps:
                progress.accuracy.append((step + 1, self.accuracy(version)))
                print(progress.line())
            self.master_handle.report({"reward": progress.rewards[-1], "accuracy": progress.final})
        print(f"{progress.conclusion()}, {time.monotonic() - started:.0f} s; see {self.recipe.out}")
        plot(progress, len(self.held_out), Path(self.recipe.out))
        if progress.gain < self.recipe.bar:
            sys.exit(f"the gain is below the bar of {self.recipe.bar:g} points")
        return {"warm": progress.warm, "final": progress.final}

    def warm_up(self) -> int:
        """Train the policy on some right answers. Returns its version after that."""
        recipe = self.recipe
        for step in range(recipe.warmup_steps):
            rate = learning_rate(step, recipe.warmup_steps, recipe.warmup_rate)
            self.RG_ACTOR.warm_up(unirun.shard(self.next_tasks(recipe.warmup_batch)), rate)
        return self.published()

    def published(self) -> int:
        """Let the actors publish the current policy. Returns the number of this version, the same in all of them."""
        version: int = max(self.RG_ACTOR.publish())
        return version

    def step(self, step: int, version: int) -> float:
        """Take one step of GRPO from this version of the policy. Returns the mean reward of its answers."""
        tasks = self.next_tasks(self.recipe.prompts)
        prompts = pad_left([task.prompt for task in tasks])
        groups = Groups.joined(self.RG_ROLLOUT.generate(unirun.shard(prompts), version))
        rewards = self.score(tasks, groups.tokens)
        useful = teaches(rewards)
        if useful.any():
            groups, advantages = groups[useful], group_advantages(rewards[useful])
            reference = torch.cat(self.RG_REFERENCE.log_probs(unirun.shard(groups)))
            rate = learning_rate(step, self.recipe.steps, self.recipe.rate)
            self.RG_ACTOR.update(
                unirun.shard(groups), unirun.shard(reference), unirun.shard(advantages), rate
            )
        return rewards.mean().item()

    def accuracy(self, version: int) -> float:
        """The share of held-out questions whose likeliest answer is right."""
        prompts = pad_left([task.prompt for task in self.held_out])
        tokens = torch.cat(self.RG_ROLLOUT.best_answers(unirun.shard(prompts), version))
        return (self.score(self.held_out, tokens) == 1.0).float().mean().item()

    def score(self, tasks: list[Task], tokens: Tensor) -> Tensor:
        """Rewards ``[N, G]`` of answers ``[N, G, T]`` to N tasks."""
        return torch.cat(self.RG_REWARD.score(unirun.shard(tasks), unirun.shard(tokens)))

    def next_tasks(self, count: int) -> list[Task]:
        """The next tasks to train on."""
        return list(itertools.islice(self.stream, count))
