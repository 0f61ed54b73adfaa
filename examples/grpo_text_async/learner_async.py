"""The learner: a pool keeps the engines busy with questions, and each batch of finished groups is a step of GRPO.

What `../grpo_text` has, this uses: the network, the sums with their verifier, the warm-up and the recipe. Here nothing
waits: while a batch is trained on, the engines answer the questions of the next ones, and go on with new weights in the
middle of an answer.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import unirun
from unirun.experiments.algorithms import decoupled_ppo_loss, group_advantages
from unirun.rollout import EngineCompleter, Group, Pool, Recorder

sys.path.insert(0, str(Path(__file__).parents[1] / "grpo_text"))
from grpo import answer_means
from llama import answer_log_probs, make_model, sample
from progress import Progress, plot
from recipe import Recipe, learning_rate
from tasks import Task, Tasks
from tokenizer import PAD, answer_mask, decode, encode, pad_left, pad_right
from warmup import supervised_losses

ETA = 2
"""No group is trained on more than so many versions after its first token was made."""

OPEN = 256
"""Groups that are made at the same time."""

START_TIMEOUT = 300.0
"""Seconds in which the engines have to begin with the weights of the learner."""


class Learner:
    """The policy, and its steps."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.model = recipe, make_model(recipe.seed)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        self._shuffle = torch.Generator().manual_seed(recipe.seed)

    def warm_up(self, tasks: Iterator[Task]) -> None:
        """Supervised steps on solved sums: without them no answer is ever right."""
        for step in range(self.recipe.warmup_steps):
            some = [*itertools.islice(tasks, self.recipe.warmup_batch)]
            prompts = pad_left([task.prompt for task in some])
            answers = pad_right([task.answer for task in some], self.recipe.room)
            rate = learning_rate(step, self.recipe.warmup_steps, self.recipe.warmup_rate)
            self._step(supervised_losses(self.model, prompts, answers).mean(), rate)

    def learn(self, groups: Sequence[Group], step: int) -> float:
        """A step of GRPO, in a few steps of the optimizer. Returns the mean reward.

        The ratio is clipped around the policy as it is now, and the weight of each token is the ratio of that one
        to the policy that has made it: the decoupled loss of AReaL.
        """
        rewards = torch.tensor([reward for group in groups for reward in group.rewards])
        gains = group_advantages(rewards, [len(group.rewards) for group in groups])
        prompts, tokens, behaviour = answers_of(groups)
        with torch.no_grad():
            proximal = answer_log_probs(self.model, prompts, tokens)
        rate = learning_rate(step, self.recipe.steps, self.recipe.rate)
        order = torch.randperm(len(tokens), generator=self._shuffle)
        for part in order.tensor_split(self.recipe.minibatches):
            now = answer_log_probs(self.model, prompts[part], tokens[part])
            each = decoupled_ppo_loss(
                now, proximal[part], behaviour[part], gains[part, None], self.recipe.clip
            )
            self._step(answer_means(each, answer_mask(tokens[part])).mean(), rate)
        return rewards.mean().item()

    def _step(self, loss: Tensor, rate: float) -> None:
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.gradient_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def accuracy(self, tasks: Tasks, held_out: Sequence[Task]) -> float:
        """The fraction of held-out questions whose likeliest answer is right."""
        found, _ = sample(self.model, pad_left([task.prompt for task in held_out]), self.recipe.room, None)
        answers = zip(held_out, found.tolist(), strict=True)
        return sum(tasks.score(task, decode(each)) == 1.0 for task, each in answers) / len(held_out)


def answers_of(groups: Sequence[Group]) -> tuple[Tensor, Tensor, Tensor]:
    """The prompts ``[B, P]`` of all answers, the answers ``[B, T]``, and the log-probabilities with which they were
    drawn."""
    asked, tokens, log_probs = [], [], []
    for group in groups:
        for each in group.trajectories:
            begin = len(group.data["input_ids"])
            asked.append(str(group.data["id"]))
            tokens.append(torch.tensor(each.token_ids[begin:]))
            log_probs.append(torch.tensor(each.logprobs[begin:]))
    return pad_left(asked), pad_sequence(tokens, True, PAD), pad_sequence(log_probs, True)


def prompts_of(tasks: Iterator[Task]) -> Iterator[dict[str, Any]]:
    """The questions of a pool."""
    for task in tasks:
        yield {"id": task.prompt, "input_ids": encode(task.prompt), "task": task}


def solver(tasks: Tasks) -> Callable[[Mapping[str, Any], Recorder], Any]:
    """The agent: one answer, and the score of the verifier."""

    async def solve(data: Mapping[str, Any], client: Recorder) -> float:
        answer = await client.complete(data["input_ids"])
        return tasks.score(data["task"], decode(answer.token_ids))

    return solve


async def all_have(client: unirun.EngineClient, version: int) -> None:
    """Wait until all engines answer with this version."""
    while True:
        found = await asyncio.gather(*(client.generate(encode("1+1="), max_tokens=1) for _ in range(16)))
        if {answer.version for answer in found} == {str(version)}:
            return
        await asyncio.sleep(0.1)


async def train(learner: Learner, tasks: Tasks) -> Progress:
    """Run the steps, while the engines generate."""
    recipe, channel = learner.recipe, unirun.WeightsChannel("policy")
    held_out = tasks.held_out(recipe.held_out)
    progress = Progress(warm=learner.accuracy(tasks, held_out))
    print(progress.line(), flush=True)
    channel.publish(learner.model, 0)
    async with unirun.EngineClient("engine") as client:
        async with asyncio.timeout(START_TIMEOUT):
            await all_have(client, 0)
        pool = Pool(
            EngineCompleter(client),
            solver(tasks),
            group_size=recipe.group,
            batch=recipe.prompts,
            max_head_offpolicyness=ETA,
            max_concurrent_rollouts=OPEN,
            should_accept=lambda group: len({*group.rewards}) > 1,
            sampling={"temperature": 1.0, "max_tokens": recipe.room},
        )
        batch: list[Group] = []
        async for group in pool.run(prompts_of(tasks.training(recipe.seed + 1))):
            batch.append(group)
            if len(batch) < recipe.prompts:
                continue
            step, ages = len(progress.rewards), [pool.version - each.version for each in batch]
            # In a thread, so that episodes go on meanwhile.
            progress.rewards.append(await asyncio.to_thread(learner.learn, batch, step))
            channel.publish(learner.model, step + 1)
            pool.advance(step + 1)
            if (step + 1) % recipe.evaluate_every == 0 or step + 1 == recipe.steps:
                found = await asyncio.to_thread(learner.accuracy, tasks, held_out)
                progress.accuracy.append((step + 1, found))
                print(f"{progress.line()}  ages {min(ages)} to {max(ages)}", flush=True)
            if step + 1 == recipe.steps:
                return progress
            batch = []
    raise AssertionError("there are always more questions")


def main() -> None:
    """Warm up, train; exit with status 1 if the gain in accuracy is below the bar."""
    recipe, began = Recipe(**unirun.init().config), time.monotonic()
    torch.set_num_threads(1)  # the model is tiny, and the engines share the cores
    tasks, learner = Tasks(recipe.min_terms, recipe.max_terms), Learner(recipe)
    learner.warm_up(tasks.training(recipe.seed))
    progress = asyncio.run(train(learner, tasks))
    print(f"{progress.conclusion()}, {time.monotonic() - began:.0f} s; see {recipe.out}", flush=True)
    plot(progress, recipe.held_out, Path(recipe.out))
    if progress.gain < recipe.bar:
        sys.exit(f"the gain is below the bar of {recipe.bar:g} points")


if __name__ == "__main__":
    main()
