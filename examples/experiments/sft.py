"""Supervised fine-tuning: a model learns the answers of a dataset.

unirun experiment start -e sft -f first --mode local
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch.nn.functional import cross_entropy

from experiments.sums import LLAMA, answered, llama
from unirun.experiments import (
    Allocation,
    AutomaticEvaluator,
    DatasetAbstraction,
    Experiment,
    ExperimentConfig,
    ExperimentSaveEvalControl,
    ExperimentScheduling,
    MFCDef,
    MicroBatchSpec,
    Model,
    ModelBackendAbstraction,
    ModelInterface,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    Scheduling,
    SequenceSample,
    TasksGroup,
    model_workers,
    register_experiment,
    register_interface,
    topology,
)


class SFTInterface(ModelInterface):
    """Trains on the tokens of answers."""

    def train_step(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> dict[str, float]:
        """Train one step."""
        return model.running().train_batch(sample, "packed_input_ids", spec, answer_loss, answer_tokens)

    def evaluate(self, model: Model, sample: SequenceSample) -> dict[str, float]:
        """The fraction of answers whose tokens are all right, each predicted from the right ones before it."""
        logits = model.running().forward(sample, "packed_input_ids", MicroBatchSpec())
        if logits is None:
            return {}
        right = sum(
            bool(((out[:-1].argmax(-1) == tokens[1:]) | prompt[1:]).all())
            for out, tokens, prompt in _parts(logits, sample)
        )
        return {"right": float(right), "count": float(len(sample))}


def _parts(logits: torch.Tensor, sample: SequenceSample) -> list[tuple[torch.Tensor, ...]]:
    lengths = sample.lengths("packed_input_ids")
    masks, tokens = sample.sequences("prompt_mask"), sample.sequences("packed_input_ids")
    return list(zip(logits.split(lengths), tokens, masks, strict=True))


def answer_loss(logits: torch.Tensor, sample: SequenceSample) -> tuple[torch.Tensor, dict[str, float]]:
    """The cross entropy of the answers, summed over their tokens."""
    outs, wanted = [], []
    for out, tokens, prompt in _parts(logits, sample):
        outs.append(out[:-1][~prompt[1:]])
        wanted.append(tokens[1:][~prompt[1:]])
    return cross_entropy(torch.cat(outs), torch.cat(wanted), reduction="sum"), {}


def answer_tokens(sample: SequenceSample) -> float:
    """The number of tokens that are trained on."""
    return float((~sample["prompt_mask"]).sum())


register_interface("sft", SFTInterface)


@dataclass
class SFT(Experiment):
    """The settings of the experiment."""

    network: ClassVar[Path] = LLAMA
    tokenizer: ClassVar[str] = "characters"
    samples: int = 2000
    batch: int = 64
    epochs: int = 6
    lr: float = 2e-3
    seed: int = 1
    pipe: int = 1
    data: int = 2
    tensor: int = 1
    backend: str = "ddp"
    ckpt_freq_steps: int = 10
    auto_eval: bool = False

    def scheduling_setup(self) -> ExperimentScheduling:
        """As many model workers as the layout has."""
        count = self.pipe * self.data * self.tensor
        return ExperimentScheduling(TasksGroup(count, Scheduling.model_worker_default(gpu=0)))

    def answered(self, count: int, *, held_out: bool = False) -> DatasetAbstraction:
        """This number of prompts and their answers."""
        return answered(count, held_out=held_out)

    def initial_setup(self) -> ExperimentConfig:
        """One model, one call."""
        actor = ModelName("default")
        train = MFCDef(
            name="trainDefault",
            n_seqs=self.batch,
            interface_type=ModelInterfaceType.TRAIN_STEP,
            interface_impl=ModelInterfaceAbstraction("sft"),
            model_name=actor,
            input_keys=("packed_input_ids", "prompt_mask"),
            log_return_value=True,
        )
        layout = topology(pipe=self.pipe, data=self.data, tensor=self.tensor)
        backend = ModelBackendAbstraction(self.backend, {"lr": self.lr, "schedule": "cosine", "warmup": 0.05})
        held_out = self.answered(200, held_out=True)
        return ExperimentConfig(
            exp_ctrl=ExperimentSaveEvalControl(
                total_train_epochs=self.epochs,
                ckpt_freq_steps=self.ckpt_freq_steps,
                eval_freq_epochs=1,
                save_freq_epochs=2 if self.auto_eval else None,
            ),
            model_rpcs=[train],
            model_worker=model_workers(
                {actor: Allocation(llama(folder=self.network), backend, layout, eval_dataset=held_out)},
                seed=self.seed,
                tokenizer=self.tokenizer,
                datasets=[self.answered(self.samples)],
            ),
            auto_eval=self.auto_eval,
            evaluator=AutomaticEvaluator(held_out),
        )


register_experiment("sft", SFT)
