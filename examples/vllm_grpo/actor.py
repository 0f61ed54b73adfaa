"""The actor: each rank asks the engines for answers to questions of its own, and all take the same steps (FSDP2)."""

import asyncio
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from additions import END, questions, text_of, tokens_of
from learning import advantages, grpo, log_probs, mean
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaForCausalLM

import unirun

PROMPTS, GROUP, EVERY = 32, 8, 10
"""Questions of a rank in a step, answers to each of them, and the steps from one measurement to the next."""


async def answers(asked: list[str], **sampling: Any) -> tuple[Tensor, Tensor, Tensor, set[str | None]]:
    """Answers of the engines: their tokens ``[B, T]``, the log-probabilities of these when they were drawn, the rewards
    ``[B]``, and the versions of the weights."""
    async with unirun.EngineClient("engine") as engine, unirun.EngineClient("verifier") as verifier:
        requests = (engine.generate(tokens_of(each), max_tokens=4, logprobs=0, **sampling) for each in asked)
        found = await asyncio.gather(*requests)
        choices = [choice for answer in found for choice in answer.choices]
        texts = [text_of(choice["token_ids"]) for choice in choices]
        asked = [each for each, answer in zip(asked, found, strict=True) for _ in answer.choices]
        scored = await verifier.post("/score", {"questions": asked, "answers": texts})
    tokens = [torch.tensor(choice["token_ids"]) for choice in choices]
    old = [torch.tensor([each["logprob"] for each in choice["logprobs"]["content"]]) for choice in choices]
    rewards = torch.tensor(scored.body["rewards"])
    return pad_sequence(tokens, True, END), pad_sequence(old, True), rewards, {each.version for each in found}


def accuracy(asked: list[str], version: int) -> float:
    """The fraction of held-out questions to which this version's likeliest answer is right."""
    versions: set[str | None] = set()
    while versions != {str(version)}:  # until both engines have it
        _, _, rewards, versions = asyncio.run(answers(asked, temperature=0.0))
    total = rewards.mean() / dist.get_world_size()
    dist.all_reduce(total)
    return total.item()


config, began = unirun.init().config, time.monotonic()
dist.init_process_group("gloo")
training, held_out = (part[dist.get_rank() :: dist.get_world_size()] for part in questions())
draw = random.Random(config["seed"])
model = LlamaForCausalLM.from_pretrained(config["model"])
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.0)
channel = unirun.WeightsChannel("policy")
for step in range(config["steps"] + 1):
    channel.publish(model, step)
    if step % EVERY == 0:
        found = accuracy(held_out, step)
        if dist.get_rank() == 0:
            print(
                f"step {step:3}  held-out accuracy {found:.1%}  {time.monotonic() - began:.0f} s", flush=True
            )
    if step == config["steps"]:
        break
    asked = draw.sample(training, PROMPTS)
    tokens, old, rewards, _ = asyncio.run(answers(asked, n=GROUP, temperature=1.0))
    repeated = [each for each in asked for _ in range(GROUP)]
    gain = advantages(rewards.view(PROMPTS, GROUP)).flatten()
    loss = mean(grpo(log_probs(model, repeated, tokens), old, gain), tokens)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
dist.destroy_process_group()
