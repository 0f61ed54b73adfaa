"""DPO: a model learns from pairs of answers, held near to a reference (Rafailov et al. 2023, arXiv:2305.18290).

unirun experiment start -e dpo -f first weights=… --mode local
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from experiments import preferences
from experiments.policy import TOKENS
from experiments.sums import llama
from unirun.experiments import (
    Allocation,
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
from unirun.experiments.algorithms import logprobs_of


class DPOInterface(ModelInterface):
    """The reference computes the log-probability of each answer, and the actor learns to prefer the better ones."""

    def __init__(self, beta: float = 0.1) -> None:
        self._beta = beta

    def inference(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> SequenceSample | None:
        """`ref_logprobs` of the answers: one number each."""
        logits = model.running().forward(sample, TOKENS, spec)
        if logits is None:
            return None
        lengths = [[1] * len(each) for each in sample.seqlens[TOKENS]]
        data = {"ref_logprobs": answer_logprobs(logits, sample)}
        return SequenceSample.packed(data, {"ref_logprobs": lengths}, sample.ids)

    def train_step(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> dict[str, float]:
        """Train one step."""

        def loss(logits: torch.Tensor, part: SequenceSample) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            apart = answer_logprobs(logits, part) - part["ref_logprobs"]
            margin = self._beta * (apart[0::2] - apart[1::2])
            return -logsigmoid(margin).sum(), {"accuracy": (margin > 0).sum()}

        return model.running().train_batch(sample, TOKENS, spec, loss, preferences.number_of_pairs)

    def evaluate(self, model: Model, sample: SequenceSample) -> dict[str, float]:
        """The number of pairs in which the better answer is the likelier one."""
        logits = model.running().forward(sample, TOKENS, MicroBatchSpec())
        if logits is None:
            return {}
        found = answer_logprobs(logits, sample)
        return {"accuracy": float((found[0::2] > found[1::2]).sum()), "count": len(found) / 2}


def answer_logprobs(logits: torch.Tensor, sample: SequenceSample) -> torch.Tensor:
    """The logarithms of the probabilities of whole answers."""
    each = logprobs_of(logits, sample).split(sample.lengths(TOKENS))
    counts = [len(sequences) for sequences in sample.seqlens[TOKENS]]
    prompts = [
        length
        for length, count in zip(sample["prompt_lens"].tolist(), counts, strict=True)
        for _ in range(count)
    ]
    return torch.stack([tokens[prompt:].sum() for tokens, prompt in zip(each, prompts, strict=True)])


register_interface("dpo", DPOInterface)


@dataclass
class DPO(Experiment):
    """The settings of the experiment. `weights` is the model that ``sft`` has saved."""

    weights: str = ""
    samples: int = 3000
    batch: int = 60
    epochs: int = 8
    lr: float = 3e-4
    beta: float = 0.3
    seed: int = 1
    steps: int = 0

    def scheduling_setup(self) -> ExperimentScheduling:
        """Two workers."""
        return ExperimentScheduling(TasksGroup(2, Scheduling.model_worker_default(gpu=0)))

    def initial_setup(self) -> ExperimentConfig:
        """Two models, two calls."""
        actor, ref = ModelName("actor"), ModelName("ref")
        interface = ModelInterfaceAbstraction("dpo", {"beta": self.beta})
        kind, keys = ModelInterfaceType, (TOKENS, "prompt_lens")
        calls = [
            MFCDef("refInf", self.batch, kind.INFERENCE, interface, ref, keys, ("ref_logprobs",)),
            MFCDef(
                "actorTrain",
                self.batch,
                kind.TRAIN_STEP,
                interface,
                actor,
                (*keys, "ref_logprobs"),
                log_return_value=True,
            ),
        ]
        trained = ModelBackendAbstraction("ddp", {"lr": self.lr, "schedule": "cosine", "warmup": 0.05})
        network, two = llama(weights=self.weights), topology(data=2)
        held_out = preferences.dataset(200, near=True, held_out=True)
        models = {
            actor: Allocation(network, trained, two, 0, held_out),
            ref: Allocation(network, ModelBackendAbstraction("inference"), two),
        }
        return ExperimentConfig(
            exp_ctrl=ExperimentSaveEvalControl(
                total_train_epochs=self.epochs,
                ckpt_freq_epochs=1,
                eval_freq_epochs=1,
                benchmark_steps=self.steps or None,
            ),
            model_rpcs=calls,
            model_worker=model_workers(
                models,
                seed=self.seed,
                tokenizer="characters",
                datasets=[preferences.dataset(self.samples, near=True)],
            ),
        )


register_experiment("dpo", DPO)
