"""PPO whose generation does not wait for training: `async-grpo` with a critic, and a reference beside which it stays.

The advantage of each token is what the critic has learned to expect. The actor has two workers of its own, critic and
reference have a third one: while the actor of one step trains, they work for the next one.

unirun experiment start -e async-ppo -f first weights=… --mode local
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from experiments.async_grpo import AsyncGRPO
from experiments.policy import TOKENS, whitened
from experiments.sums import llama
from unirun.experiments import (
    Allocation,
    MFCDef,
    Model,
    ModelBackendAbstraction,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    SequenceSample,
    register_experiment,
    register_interface,
    topology,
)
from unirun.experiments.algorithms import DecoupledGRPO

CRITIC, REF = ModelName("critic"), ModelName("ref")


class DecoupledPPO(DecoupledGRPO):
    """The decoupled loss with the advantages that a critic has found."""

    def advantages(self, model: Model, sample: SequenceSample) -> torch.Tensor:
        """Those of all tokens that the model has made have mean 0 and variance 1."""
        return whitened(sample["advantages"], ~sample["prompt_mask"], model.place)


register_interface("decoupled_ppo", DecoupledPPO)


@dataclass
class AsyncPPO(AsyncGRPO):
    """The settings of `async-grpo`, and those of the critic. A group of one answer is worth a step, as the critic says
    what was expected."""

    workers = 3
    group: int = 1
    drop_equal: bool = False
    batch: int = 128
    critic_lr: float = 1e-3
    kl: float = 0.02

    def calls(self) -> list[MFCDef]:
        """Those of the policy, of the critic and of the reference."""
        kind, n = ModelInterfaceType, self.batch
        values = ModelInterfaceAbstraction("ppo_critic", {"kl": self.kl, "minibatches": self.updates})
        made, reference = (TOKENS, "prompt_mask", "packed_logprobs"), "packed_ref_logprobs"
        return [
            *self.policy_calls("decoupled_ppo", "advantages"),
            MFCDef(
                "refInf", n, kind.INFERENCE, self.interface("decoupled_ppo"), REF, (TOKENS,), (reference,),
                output_key_remap={"packed_logprobs": reference},
            ),
            MFCDef(
                "criticInf", n, kind.INFERENCE, values, CRITIC, (*made, reference, "rewards"),
                ("advantages", "returns"),
            ),
            MFCDef(
                "criticTrain", n, kind.TRAIN_STEP, values, CRITIC, (TOKENS, "prompt_mask", "returns"),
                log_return_value=True,
            ),
        ]  # fmt: skip

    def models(self) -> dict[ModelName, Allocation]:
        """The policy on two workers, the others on a third one."""
        network, expects = llama(weights=self.weights), llama(critic=True, weights=self.weights)
        one, kept = topology(), ModelBackendAbstraction("inference")
        return {
            **super().models(),
            CRITIC: Allocation(expects, self.trained(self.critic_lr), one, 2),
            REF: Allocation(network, kept, one, 2),
        }


register_experiment("async-ppo", AsyncPPO)
