"""A task that a network of 14 000 parameters learns in a minute: the last of some digits, one higher.

``2012=`` is answered with ``3``, and ``2013=`` with ``0``: digits are from 0 to 3. The reward is the share of the two
tokens, the digit and the end, that are right. There is an asynchronous experiment, and a synchronous one with the same
data, loss and steps, whose actor generates, then is trained:

unirun experiment start -e async-digits -f first eta=2 --mode local
unirun experiment start -e digits -f first --mode local
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from experiments.async_grpo import ACTOR, AsyncGRPO
from experiments.policy import TOKENS
from experiments.ppo import answer
from unirun.experiments import (
    DatasetAbstraction,
    DatasetUtility,
    ExperimentConfig,
    ExperimentScheduling,
    GenerationConfig,
    MFCDef,
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    PromptDataset,
    Scheduling,
    SequenceSample,
    TasksGroup,
    model_workers,
    register_agent,
    register_dataset,
    register_experiment,
    register_interface,
    register_tokenizer,
)
from unirun.rollout import Recorder

BASE, ASKED, TOLD = 4, 4, 2
"""The number of digits, those of a prompt, and the tokens of an answer."""


class Digits:
    """A token for each digit and one for the end of the prompt; 0 fills up, 1 ends."""

    pad_token_id, eos_token_id = 0, 1

    def encode(self, text: str, /) -> list[int]:
        """Tokens."""
        return [2 + "=0123".index(each) for each in text]

    def decode(self, tokens: Sequence[int], /) -> str:
        """Text without the tokens that fill up and end."""
        return "".join("=0123"[each - 2] for each in tokens if each > 1)


def rows(*, held_out: bool) -> list[dict[str, Any]]:
    """The prompts that are trained on, or those that are not, a quarter of all."""
    texts = map("".join, product("0123", repeat=ASKED))
    return [
        {"prompt": f"{text}=", "answer": str((int(text[-1]) + 1) % BASE)}
        for text in texts
        if (zlib.crc32(text.encode()) % 5 == 0) == held_out
    ]


def share(row: Mapping[str, Any], tokens: Sequence[int]) -> float:
    """The share of tokens that are right."""
    right = [*Digits().encode(row["answer"]), Digits.eos_token_id]
    return sum(a == b for a, b in zip(tokens, right, strict=False)) / len(right)


def score(row: Mapping[str, Any], text: str) -> float:
    """1 for the right digit."""
    return float(text == row["answer"])


class Prompts(PromptDataset):
    """Digits to be answered."""

    def __init__(self, util: DatasetUtility, *, held_out: bool = False) -> None:
        super().__init__(util, rows=rows(held_out=held_out))


class Counter:
    """Answers digits, `n` times."""

    def __init__(self, n: int = 8) -> None:
        self.group_size = n
        self.sampling = {"temperature": 1.0, "max_tokens": TOLD}

    async def run(self, data: Mapping[str, Any], client: Recorder) -> float:
        """The reward of one answer."""
        return share(data, (await client.complete(data["input_ids"])).token_ids)


class Answers(ModelInterface):
    """The same in a synchronous trial: `n` answers to each prompt, and their rewards."""

    def __init__(self, n: int = 8) -> None:
        self._how = GenerationConfig(n=n, max_new_tokens=TOLD)

    def generate(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> SequenceSample | None:
        """The answers, drawn at temperature 1."""
        made = answer(model, sample, spec, self._how)
        if made is None:
            return None
        each = zip(made.sequences(TOKENS), made.sequences("prompt_mask"), strict=True)
        rewards = [
            [
                torch.tensor(share(row, tokens[~mask].tolist()))
                for tokens, mask in (next(each) for _ in lengths)
            ]
            for row, lengths in zip(sample.metadata["row"], made.seqlens[TOKENS], strict=True)
        ]
        return made.update(SequenceSample.of({"rewards": rewards}, made.ids))


register_tokenizer("digits", Digits)
register_dataset("digits", Prompts)
register_agent("digits", Counter)
register_interface("digits", Answers)


@dataclass
class AsyncDigits(AsyncGRPO):
    """The settings of `async-grpo`, with others for this task. No group is dropped, so that all trials have the same
    number of steps on the same prompts."""

    preload = ()
    agent, tokenizer, score = "digits", "digits", "experiments.digits:score"
    network = Path(__file__).parent / "small"
    workers, ranks = 1, 1
    batch: int = 16
    epochs: int = 3
    drop_equal: bool = False
    lr: float = 3e-3
    servers: int = 1
    ckpt_freq_steps: int = 1000

    def data(self, count: int, *, held_out: bool = False) -> DatasetAbstraction:
        """All prompts."""
        return DatasetAbstraction("digits", {"held_out": held_out})


@dataclass
class InTurn(AsyncDigits):
    """The same settings, of which `eta` and those of servers have no effect."""

    def scheduling_setup(self) -> ExperimentScheduling:
        """A model worker."""
        return ExperimentScheduling(TasksGroup(self.workers, Scheduling.model_worker_default(gpu=0)))

    def initial_setup(self) -> ExperimentConfig:
        """One more call does what servers and agents do in the other."""
        draws = ModelInterfaceAbstraction("digits", {"n": self.group})
        made = (TOKENS, "prompt_mask", "packed_logprobs", "rewards")
        call = MFCDef(
            "actorGen", self.batch, ModelInterfaceType.GENERATE, draws, ACTOR, ("packed_prompts",), made
        )
        return ExperimentConfig(
            exp_ctrl=self.control(),
            model_rpcs=[call, *self.calls()],
            model_worker=model_workers(
                self.models(), seed=self.seed, tokenizer=self.tokenizer, datasets=[self.data(self.samples)]
            ),
        )


register_experiment("async-digits", AsyncDigits)
register_experiment("digits", InTurn)
