"""Configurations for tests. Their datasets, models and interfaces are registered here, under names of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unirun.errors import Fault, SpecError
from unirun.experiments.config import (
    Allocation,
    DatasetAbstraction,
    ExperimentSaveEvalControl,
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelWorker,
    model_workers,
    register_backend,
    register_dataset,
    register_interface,
    register_model,
)
from unirun.experiments.experiment import ExperimentConfig
from unirun.experiments.graph import (
    MFCDef,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    ParamReallocHook,
    ProcessTopology,
    topology,
)
from unirun.experiments.models.api import ModelBackend, ModelInterface

GENERATE, INFERENCE, TRAIN, EVALUATE = ModelInterfaceType


class Prompts:
    """A dataset, of which the configuration needs the keys and the arguments only."""

    keys: tuple[str, ...] = ("prompt",)

    def __init__(self, util: object, *, rows: object = ()) -> None: ...


class Answers(Prompts):
    """One with one more key."""

    keys = ("prompt", "answer")


class Backend(ModelBackend):
    """A backend with some arguments."""

    def __init__(self, *, lr: float = 0.1, schedule: str = "constant", warmup: float = 0.0) -> None: ...


def network(place: object, *, layers: int = 2) -> None:
    """A model, which no test of a configuration makes."""


class AnyInterface(ModelInterface):
    """An interface for each type of call, which no test of a configuration makes."""

    def generate(self, *args: Any) -> None:
        """Nothing."""

    def inference(self, *args: Any) -> None:
        """Nothing."""

    def train_step(self, *args: Any) -> dict[str, float]:
        """Nothing."""
        return {}

    def evaluate(self, *args: Any) -> dict[str, float]:
        """Nothing."""
        return {}


register_dataset("tests-prompts", Prompts)
register_dataset("tests-answers", Answers)
register_model("tests-network", network)
register_backend("tests-backend", Backend)
register_interface("tests-interface", AnyInterface)

PROMPTS = DatasetAbstraction("tests-prompts")
NETWORK, BACKEND = ModelAbstraction("tests-network"), ModelBackendAbstraction("tests-backend")
INTERFACE = ModelInterfaceAbstraction("tests-interface")
ACTOR, COPY = ModelName("actor"), ModelName("actor", 1)
CRITIC, REF, REWARD = ModelName("critic"), ModelName("ref"), ModelName("reward")


def call(
    name: str,
    needs: Sequence[str] = (),
    makes: Sequence[str] = (),
    model: ModelName = ACTOR,
    kind: ModelInterfaceType = INFERENCE,
    n_seqs: int = 8,
    **more: Any,
) -> MFCDef:
    """A call that needs and makes these keys."""
    return MFCDef(name, n_seqs, kind, INTERFACE, model, tuple(needs), tuple(makes), **more)


def at(topo: ProcessTopology | None = None, first: int = 0) -> Allocation:
    """A model in this layout, from this worker on."""
    return Allocation(NETWORK, BACKEND, topo or topology(), first)


def config_of(
    calls: Sequence[MFCDef],
    models: Mapping[ModelName, Allocation],
    datasets: Sequence[DatasetAbstraction] = (PROMPTS,),
    control: ExperimentSaveEvalControl | None = None,
) -> ExperimentConfig:
    """An experiment whose workers are those that its models need."""
    return config_with(calls, model_workers(models, datasets=datasets), control)


def config_with(
    calls: Sequence[MFCDef],
    workers: Sequence[ModelWorker],
    control: ExperimentSaveEvalControl | None = None,
) -> ExperimentConfig:
    """An experiment with these workers."""
    return ExperimentConfig(control or ExperimentSaveEvalControl(), list(calls), list(workers))


def faults_of(config: ExperimentConfig) -> tuple[Fault, ...]:
    """All that is wrong with it; nothing if it is right."""
    try:
        config.lazy_init()
    except SpecError as error:
        return tuple(error.faults)
    return ()


def texts_of(faults: Sequence[Fault]) -> list[str]:
    """The place and the problem of each fault, without its hint."""
    return [f"{fault.where}: {fault.problem}" for fault in faults]


def ppo(*, separate: bool) -> ExperimentConfig:
    """Four models and six calls: in one layout on two workers, or each in its own on eight, where another replica of
    the actor generates."""
    generates = COPY if separate else ACTOR
    tokens = ("tokens", "mask", "logprobs")
    calls = [
        call("actorGen", ["prompt"], tokens, generates, GENERATE),
        call("rewInf", ["tokens", "mask"], ["rewards"], REWARD),
        call("refInf", ["tokens"], ["ref_logprobs"], REF, output_key_remap={"logprobs": "ref_logprobs"}),
        call("criticInf", [*tokens, "ref_logprobs", "rewards"], ["advantages", "returns"], CRITIC),
        call("actorTrain", [*tokens, "advantages"], (), ACTOR, TRAIN),
        call("criticTrain", ["tokens", "mask", "returns"], (), CRITIC, TRAIN),
    ]
    two = topology(data=2)
    if not separate:
        return config_of(calls, dict.fromkeys((ACTOR, CRITIC, REF, REWARD), at(two)))
    return config_of(
        calls,
        {
            ACTOR: at(topology(data=2, tensor=2)),
            COPY: at(two, 4),
            CRITIC: at(topology(pipe=2), 4),
            REF: at(first=6),
            REWARD: at(first=7),
        },
    )


def realloc(source: ModelName, eta: float = 1.0) -> ParamReallocHook:
    """A hook that takes the parameters of `source`."""
    return ParamReallocHook(source=source, eta=eta)
