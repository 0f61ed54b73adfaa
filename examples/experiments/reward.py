"""A reward model: one value for an answer, higher for the better one of two.

unirun experiment start -e reward -f first --mode local
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


class RewardInterface(ModelInterface):
    """Trains on pairs (Bradley and Terry 1952); the value of an answer is that after its last token."""

    def train_step(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> dict[str, float]:
        """Train one step."""
        return model.running().train_batch(sample, TOKENS, spec, loss, preferences.number_of_pairs)

    def evaluate(self, model: Model, sample: SequenceSample) -> dict[str, float]:
        """The number of pairs in which the better answer has the higher value."""
        values = model.running().forward(sample, TOKENS, MicroBatchSpec())
        if values is None:
            return {}
        better, worse = last_values(values, sample)
        return {"accuracy": float((better > worse).sum()), "count": float(len(better))}


def last_values(values: torch.Tensor, sample: SequenceSample) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of the better and of the worse answers."""
    ends = torch.tensor(sample.lengths(TOKENS)).cumsum(0) - 1
    both = values.float()[ends]
    return both[0::2], both[1::2]


def loss(values: torch.Tensor, sample: SequenceSample) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The sum over pairs."""
    better, worse = last_values(values, sample)
    return -logsigmoid(better - worse).sum(), {"accuracy": (better > worse).sum()}


register_interface("paired_rw", RewardInterface)


@dataclass
class Reward(Experiment):
    """The settings of the experiment. `weights` is the model that ``sft`` has saved."""

    weights: str = ""
    samples: int = 2000
    batch: int = 50
    epochs: int = 15
    lr: float = 1e-3
    seed: int = 1
    steps: int = 0

    def scheduling_setup(self) -> ExperimentScheduling:
        """Two workers."""
        return ExperimentScheduling(TasksGroup(2, Scheduling.model_worker_default(gpu=0)))

    def initial_setup(self) -> ExperimentConfig:
        """One model, one call."""
        name = ModelName("default")
        call = MFCDef(
            "trainRw",
            self.batch,
            ModelInterfaceType.TRAIN_STEP,
            ModelInterfaceAbstraction("paired_rw"),
            name,
            (TOKENS,),
            log_return_value=True,
        )
        backend = ModelBackendAbstraction("ddp", {"lr": self.lr, "schedule": "cosine", "warmup": 0.05})
        model = llama(critic=True, weights=self.weights)
        held_out = preferences.dataset(200, held_out=True)
        return ExperimentConfig(
            exp_ctrl=ExperimentSaveEvalControl(
                total_train_epochs=self.epochs,
                ckpt_freq_epochs=1,
                eval_freq_epochs=1,
                benchmark_steps=self.steps or None,
            ),
            model_rpcs=[call],
            model_worker=model_workers(
                {name: Allocation(model, backend, topology(data=2), eval_dataset=held_out)},
                seed=self.seed,
                tokenizer="characters",
                datasets=[preferences.dataset(self.samples)],
            ),
        )


register_experiment("reward", Reward)
