"""`async-grpo` whose rewards are computed in processes of their own. The file NOTED gets a line for each time that
trajectories are accepted, and for each part of a step that was trained."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.async_grpo import AsyncGRPO
from experiments.ppo import ROOM
from grading import grade

from unirun.experiments import (
    MicroBatchSpec,
    Model,
    ModelInterfaceAbstraction,
    SequenceSample,
    async_worker,
    register_agent,
    register_experiment,
    register_interface,
)
from unirun.experiments.algorithms import DecoupledGRPO
from unirun.experiments.buffer import Buffer
from unirun.rollout import Recorder
from unirun.rollout.rewards import Rewards


def note(**line: Any) -> None:
    """Write a line in one piece."""
    with open(os.environ["NOTED"], "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


class NotedBuffer(Buffer):
    """A buffer that notes what it has accepted."""

    def add(self, some: Sequence[tuple[SequenceSample, int]]) -> None:
        """The same."""
        super().add(some)
        note(accepted=[sample.ids[0] for sample, _ in some])


class NotedGRPO(DecoupledGRPO):
    """An interface that notes what it has trained on."""

    def train_step(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> dict[str, float]:
        """The same."""
        step = model.version
        found = super().train_step(model, sample, spec)
        note(step=step, rank=model.place.rank, ids=sample.ids)
        return found


class Graded:
    """One answer, and its grade."""

    def __init__(self, n: int) -> None:
        self.group_size = n
        self.sampling = {"temperature": 1.0, "max_tokens": ROOM}
        self._grade = Rewards(grade, processes=2)

    async def run(self, data: Mapping[str, Any], client: Recorder) -> float:
        """The reward of the answer."""
        answer = await client.complete(data["input_ids"])
        return float(await self._grade(client.tokenizer.decode(answer.token_ids)))


setattr(async_worker, "Buffer", NotedBuffer)  # noqa: B010 - it is not one of its names
register_interface("noted_grpo", NotedGRPO)
register_agent("graded", Graded)


@dataclass
class Noted(AsyncGRPO):
    """The settings of `async-grpo`."""

    agent = "graded"

    def interface(self, name: str) -> ModelInterfaceAbstraction:
        """The one that notes."""
        return super().interface("noted_grpo")


register_experiment("noted-grpo", Noted)
