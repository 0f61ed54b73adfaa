"""The trainer: a script for torchrun. Each rank has a part of every batch, and rank 0 publishes the versions."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from policy import ANSWERS, SIZE, row, save
from torch.nn.parallel import DistributedDataParallel
from web import ask


def loss_of(model: torch.nn.Module, groups: list[dict[str, Any]]) -> torch.Tensor:
    """REINFORCE, with the mean reward of each group as its baseline."""
    rows = torch.tensor([row(group["prompt"]) for group in groups])
    answers = torch.tensor([[int(answer) for answer in group["answers"]] for group in groups])
    rewards = torch.tensor([group["rewards"] for group in groups])
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    chosen = torch.log_softmax(model(rows), dim=1).gather(1, answers)
    return -(advantages * chosen).mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--orchestrator")
    parser.add_argument("--weights", type=Path, help="a folder that all nodes share")
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    folder = options.weights / os.environ["UNIRUN_JOB"]
    dist.init_process_group()
    rank, count = dist.get_rank(), dist.get_world_size()
    table = torch.nn.Embedding(SIZE, ANSWERS)
    torch.nn.init.zeros_(table.weight)
    model = DistributedDataParallel(table)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(options.steps):
        groups = ask(options.orchestrator, "/batch", {"step": step, "rank": rank, "count": count})
        optimizer.zero_grad()
        loss_of(model, groups).backward()
        optimizer.step()
        if rank == 0:
            save(folder, step + 1, table.weight.tolist())
            ask(options.orchestrator, "/published", {"version": step + 1})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
