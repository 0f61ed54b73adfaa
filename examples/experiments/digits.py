"""A task for measuring the price of staleness: the sum of the last two of some digits, modulo 7.

``2034=`` is answered with ``0``. The reward is the share of the two tokens, the digit and the end, that are right. The
network has learned a third of the answers before, from examples (`digits-sft`). There is an asynchronous experiment,
and a synchronous one with the same data, loss and steps, whose actor generates, then is trained:

unirun experiment start -e digits-sft -f first
unirun experiment start -e async-digits -f first eta=2 weights=…
unirun experiment start -e digits -f first weights=…

In the asynchronous one, a step trains when the queue is full. So its trajectories are as old as `eta` allows, on a
machine of any speed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from experiments.async_grpo import ACTOR, AsyncGRPO
from experiments.policy import TOKENS
from experiments.ppo import answer
from experiments.sft import SFT
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
    PromptAnswerDataset,
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
from unirun.experiments.algorithms import DecoupledGRPO
from unirun.rollout import Recorder

BASE, ASKED, TOLD = 7, 4, 2
"""The number of digits, those of a prompt, and the tokens of an answer."""

HELD_OUT = 500
"""The number of prompts that are not trained on."""

LETTERS = "=0123456"


class Digits:
    """A token for each digit and one for the end of the prompt; 0 fills up, 1 ends."""

    pad_token_id, eos_token_id = 0, 1

    def encode(self, text: str, /) -> list[int]:
        """Tokens."""
        return [2 + LETTERS.index(each) for each in text]

    def decode(self, tokens: Sequence[int], /) -> str:
        """Text without the tokens that fill up and end."""
        return "".join(LETTERS[each - 2] for each in tokens if each > 1)


def rows(count: int, *, held_out: bool) -> list[dict[str, Any]]:
    """So many prompts that are trained on, or all of those that are not."""
    texts = ["".join(each) for each in product(LETTERS[1:], repeat=ASKED)]
    random.Random(0).shuffle(texts)
    return [
        {"prompt": f"{text}=", "answer": str((int(text[-2]) + int(text[-1])) % BASE)}
        for text in (texts[:HELD_OUT] if held_out else texts[HELD_OUT : HELD_OUT + count])
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

    def __init__(self, util: DatasetUtility, count: int, *, held_out: bool = False) -> None:
        super().__init__(util, rows=rows(count, held_out=held_out))


class Answered(PromptAnswerDataset):
    """The same, with their answers."""

    def __init__(self, util: DatasetUtility, count: int, *, held_out: bool = False) -> None:
        super().__init__(util, rows=rows(count, held_out=held_out))


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


ACCEPTED = threading.Semaphore(0)
"""Groups of this process that were accepted, and that no step has waited for."""

FULL_TIMEOUT = 300.0
"""Seconds in which another group is accepted."""


class FullQueue(DecoupledGRPO):
    """A step trains when all groups were accepted that the gate lets in with its version of the weights. So its own
    groups, which were accepted `eta` steps before, are `eta` versions old. Only in the first steps they are younger.

    It counts what one process accepts from the beginning of a trial, so it is for a trial with one model worker, which
    does not go on after the loss of it."""

    def __init__(self, eta: int, batch: int, **how: Any) -> None:
        super().__init__(**how)
        self._eta, self._batch = eta, batch
        self._accepted, self._due = 0, (eta + 1) * batch

    def accepts(self, trajectories: SequenceSample) -> bool:
        """Those that are not too old for their step. A server may have made them before it had the new weights."""
        versions = trajectories["versions"]
        oldest = int(versions[versions >= 0].min())
        if self._accepted // self._batch - oldest > self._eta or not super().accepts(trajectories):
            return False
        self._accepted += 1
        ACCEPTED.release()
        return True

    def train_step(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> dict[str, float]:
        """Wait, then train."""
        self.wait()
        return super().train_step(model, sample, spec)

    def wait(self) -> None:
        """Wait until the queue is full. Raises `TimeoutError`."""
        while self._due:
            if not ACCEPTED.acquire(timeout=FULL_TIMEOUT):
                raise TimeoutError(f"no trajectory for {FULL_TIMEOUT:g} s, and the queue is not full")
            self._due -= 1
        # The next version lets in so many more.
        self._due = self._batch


register_tokenizer("digits", Digits)
register_dataset("digits", Prompts)
register_dataset("digits-answered", Answered)
register_agent("digits", Counter)
register_interface("digits", Answers)
register_interface("full_queue", FullQueue)


NETWORK = Path(__file__).parent / "small"


@dataclass
class Begin(SFT):
    """The settings of `sft`, with others for this task. It ends when a third of the answers are right."""

    network, tokenizer = NETWORK, "digits"
    samples: int = 1900
    batch: int = 128
    epochs: int = 5
    lr: float = 5e-3
    seed: int = 0
    data: int = 1
    ckpt_freq_steps: int = 1000

    def answered(self, count: int, *, held_out: bool = False) -> DatasetAbstraction:
        """Prompts of the task and their answers."""
        return DatasetAbstraction("digits-answered", {"count": count, "held_out": held_out})


@dataclass
class AsyncDigits(AsyncGRPO):
    """The settings of `async-grpo`, with others for this task. No group is dropped, so that all trials have the same
    number of steps."""

    preload = ()
    agent, tokenizer, score = "digits", "digits", "experiments.digits:score"
    network = NETWORK
    workers, ranks = 1, 1
    samples: int = 1536
    batch: int = 16
    epochs: int = 1
    drop_equal: bool = False
    lr: float = 1.5e-3
    servers: int = 1
    ckpt_freq_steps: int = 1000

    def data(self, count: int, *, held_out: bool = False) -> DatasetAbstraction:
        """Prompts of the task."""
        return DatasetAbstraction("digits", {"count": count, "held_out": held_out})

    def calls(self) -> list[MFCDef]:
        """Those of the policy, whose step waits for a full queue."""
        return self.policy_calls("full_queue")

    def interface(self, name: str) -> ModelInterfaceAbstraction:
        """An interface of the policy."""
        found = super().interface(name)
        more = {"eta": self.eta, "batch": self.batch} if name == "full_queue" else {}
        return ModelInterfaceAbstraction(name, {**found.args, **more})


@dataclass
class InTurn(AsyncDigits):
    """The same settings, of which `eta` and those of servers have no effect."""

    def calls(self) -> list[MFCDef]:
        """Those of the policy."""
        return self.policy_calls("decoupled_grpo")

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


register_experiment("digits-sft", Begin)
register_experiment("async-digits", AsyncDigits)
register_experiment("digits", InTurn)
