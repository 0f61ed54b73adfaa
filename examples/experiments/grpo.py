"""GRPO: several answers to each question, each worth more or less than the mean of its group. There is no critic.

unirun experiment start -e grpo -f first weights=… --mode local
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from experiments.policy import TOKENS, clipped
from experiments.ppo import Actor, in_parts
from experiments.sums import llama, questions
from unirun.experiments import (
    Allocation,
    Experiment,
    ExperimentConfig,
    ExperimentSaveEvalControl,
    ExperimentScheduling,
    MFCDef,
    MicroBatchSpec,
    Model,
    ModelAbstraction,
    ModelBackendAbstraction,
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


class GroupActor(Actor):
    """Generates answers, and learns from the advantage of each in its group (Shao et al. 2024, arXiv:2402.03300)."""

    def __init__(self, n: int = 8, clip: float = 0.2, kl: float = 0.02, minibatches: int = 2) -> None:
        super().__init__(clip, n, minibatches)
        self._kl = kl

    def train_step(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> dict[str, float]:
        """Train some steps, each on a part of the questions."""
        gains = torch.cat([standard(each) for each in sample["rewards"].split(sample.sizes("rewards"))])
        sample = sample.update(
            SequenceSample.packed({"gains": gains}, {"gains": sample.seqlens["rewards"]}, sample.ids)
        )

        def loss(logits: torch.Tensor, part: SequenceSample) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mask = ~part["prompt_mask"]
            now = logprobs_of(logits, part)
            lengths = torch.tensor(part.lengths(TOKENS), device=now.device)
            each = clipped(now, part["packed_logprobs"], part["gains"].repeat_interleave(lengths), self._clip)
            # An estimate of the divergence that is never negative (Schulman 2020).
            apart = part["packed_ref_logprobs"] - now
            divergence = apart.exp() - apart - 1.0
            return (each + self._kl * divergence)[mask].sum(), {"kl": divergence[mask].sum()}

        return in_parts(model, sample, spec, loss, self._minibatches)


def standard(rewards: torch.Tensor) -> torch.Tensor:
    """The rewards of a group with mean 0 and standard deviation 1; all 0 if they are equal."""
    return (rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-4)


register_interface("grpo_actor", GroupActor)


@dataclass
class GRPO(Experiment):
    """The settings of the experiment. `weights` is the model that ``sft`` has saved; without it the actor is new."""

    preload = ("reasoning_gym",)
    weights: str = ""
    samples: int = 3000
    batch: int = 125
    group: int = 8
    epochs: int = 8
    updates: int = 4
    lr: float = 6e-4
    kl: float = 0.02
    seed: int = 1
    ckpt_freq_steps: int = 5
    steps: int = 0

    def scheduling_setup(self) -> ExperimentScheduling:
        """Two workers."""
        return ExperimentScheduling(TasksGroup(2, Scheduling.model_worker_default(gpu=0)))

    def initial_setup(self) -> ExperimentConfig:
        """Three models, four calls."""
        actor, ref, reward = ModelName("actor"), ModelName("ref"), ModelName("reward")
        kind, n = ModelInterfaceType, self.batch
        policy = ModelInterfaceAbstraction(
            "grpo_actor", {"n": self.group, "kl": self.kl, "minibatches": self.updates}
        )
        verifier = ModelInterfaceAbstraction("sums_verifier")
        made = (TOKENS, "prompt_mask", "packed_logprobs")
        calls = [
            MFCDef("actorGen", n, kind.GENERATE, policy, actor, ("packed_prompts",), made),
            MFCDef("rewInf", n, kind.INFERENCE, verifier, reward, made[:2], ("rewards",)),
            MFCDef(
                "refInf",
                n,
                kind.INFERENCE,
                policy,
                ref,
                (TOKENS,),
                ("packed_ref_logprobs",),
                output_key_remap={"packed_logprobs": "packed_ref_logprobs"},
            ),
            MFCDef(
                "actorTrain",
                n,
                kind.TRAIN_STEP,
                policy,
                actor,
                (*made, "rewards", "packed_ref_logprobs"),
                log_return_value=True,
            ),
        ]
        held_out = questions(200, held_out=True)
        network, two = llama(weights=self.weights), topology(data=2)
        schedule = {"schedule": "linear", "warmup": 0.05, "updates": self.updates}
        trained = ModelBackendAbstraction("ddp", {"lr": self.lr, **schedule})
        models = {
            actor: Allocation(network, trained, two, 0, held_out),
            ref: Allocation(network, ModelBackendAbstraction("inference"), two),
            reward: Allocation(ModelAbstraction("null"), ModelBackendAbstraction("null"), two),
        }
        return ExperimentConfig(
            exp_ctrl=ExperimentSaveEvalControl(
                total_train_epochs=self.epochs,
                ckpt_freq_steps=self.ckpt_freq_steps,
                eval_freq_steps=10,
                benchmark_steps=self.steps or None,
            ),
            model_rpcs=calls,
            model_worker=model_workers(
                models,
                seed=self.seed,
                tokenizer="characters",
                datasets=[questions(self.samples)],
            ),
        )


register_experiment("grpo", GRPO)
