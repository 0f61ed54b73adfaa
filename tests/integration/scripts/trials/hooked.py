"""PPO in which the actor generates as a copy in another layout on the same workers, and the reference follows the actor.

In the second step and later, each worker checks what the hooks have done: the copy has the parameters of the actor, to
the bit, and the reference is a moving average of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from experiments.ppo import PPO, Actor
from experiments.sums import llama, questions
from msgspec.structs import replace as changed

from unirun.experiments import (
    Allocation,
    ExperimentConfig,
    MFCDef,
    Model,
    ModelBackendAbstraction,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    ParamReallocHook,
    SequenceSample,
    model_workers,
    register_experiment,
    register_interface,
    topology,
)
from unirun.weights.tensors import is_dtensor

ACTOR, COPY, REF = ModelName("actor"), ModelName("actor", 1), ModelName("ref")
ETA = 0.25

_seen: dict[str, dict[str, torch.Tensor]] = {}
"""The parameters of this process's models when they were last used, by the names of the models."""


def whole(model: Model) -> dict[str, torch.Tensor]:
    """All parameters, whole. Every rank of the model calls it."""
    found = {}
    for name, tensor in model.running().tensors().items():
        full: Any = tensor
        found[name] = (full.full_tensor() if is_dtensor(tensor) else tensor).clone()
    return found


class Watching(Actor):
    """An actor that looks at parameters before and after it uses them."""

    reductions: ClassVar[Mapping[str, str]] = {"samples": "sum", "last": "max"}

    def generate(self, model: Model, *args: Any) -> Any:
        """The copy has what the actor has."""
        mine = whole(model)
        if "actor@0" in _seen:
            assert all(torch.equal(mine[name], tensor) for name, tensor in _seen["actor@0"].items())
        return super().generate(model, *args)

    def inference(self, model: Model, *args: Any) -> Any:
        """The reference has moved towards what the actor had become."""
        mine = whole(model)
        if "ref@0" in _seen:
            for name, before in _seen["ref@0"].items():
                expected = before.lerp(_seen["actor@0"][name], ETA)
                torch.testing.assert_close(mine[name], expected, rtol=0.0, atol=0.0)
        _seen["ref@0"] = mine
        return super().inference(model, *args)

    def train_step(self, model: Model, sample: SequenceSample, *args: Any) -> Any:
        """Train, and keep the parameters, with which the copy and the reference are compared."""
        found = super().train_step(model, sample, *args)
        _seen["actor@0"] = whole(model)
        figures = {"samples": len(sample), "last": model.place.data, "each": model.place.data}
        return {**found, **figures, "compared": float("ref@0" in _seen)}


@dataclass
class Hooked(PPO):
    """Two workers with all models. There are two datasets."""

    samples: int = 32
    batch: int = 8
    epochs: int = 1

    def initial_setup(self) -> ExperimentConfig:
        """The actor is trained by two data-parallel ranks, and generates as two tensor-parallel ones."""
        config = super().initial_setup()
        first = config.model_worker[0]
        backends = {shard.id.model_name: shard.backend for shard in first.shards}
        models = {
            shard.id.model_name: Allocation(shard.model, shard.backend, topology(data=2))
            for shard in first.shards
        }
        models[COPY] = Allocation(llama(), ModelBackendAbstraction("inference"), topology(tensor=2))
        assert backends[ACTOR].type_ == "ddp"
        two = [questions(self.samples // 2), questions(self.samples // 2)]
        config.model_worker = model_workers(models, tokenizer="characters", datasets=two)
        watching = ModelInterfaceAbstraction("watching", {"minibatches": 2})
        calls = []
        for call in config.model_rpcs:
            if call.interface_impl.type_ == "ppo_actor":
                call = changed(call, interface_impl=watching)
            if call.name == "actorGen":
                call = changed(call, model_name=COPY)
            if call.name == "actorTrain":
                call = call.hooked(post=ParamReallocHook(target=REF, eta=ETA))
                call = changed(call, log_return_value=True)
            calls.append(call)
        evaluates = ModelInterfaceType.EVALUATE
        calls.append(MFCDef("actorEval", self.batch, evaluates, watching, ACTOR, ("packed_prompts",)))
        config.model_rpcs = calls
        config.exp_ctrl = replace(config.exp_ctrl, eval_freq_steps=None)
        return config


register_interface("watching", Watching)
register_experiment("hooked", Hooked)
