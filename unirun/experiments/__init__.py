"""Experiments: an algorithm as a graph of model function calls, each model in its own layout on its own devices.

The names are those of ReaLHF and AReaL. `Experiment` and `register_experiment` are where to begin; ``unirun experiment
start`` runs what is registered.

Names are imported when they are used: trials are listed and stopped without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unirun.experiments.agents import BundledGenerationOutputs, CollectingAgent, RolloutAgent
    from unirun.experiments.config import (
        AgentAbstraction,
        Allocation,
        AutomaticEvaluator,
        DatasetAbstraction,
        EnvServiceAbstraction,
        ExperimentSaveEvalControl,
        ExperimentScheduling,
        ExpStatus,
        GenerationServer,
        GserverManager,
        MasterWorker,
        ModelAbstraction,
        ModelBackendAbstraction,
        ModelWorker,
        Resolved,
        RolloutWorker,
        Scheduling,
        StandaloneModelShardAbstraction,
        TasksGroup,
        TensorBoardConfig,
        WandBConfig,
        WorkerInformation,
        model_workers,
        register_agent,
        register_backend,
        register_dataset,
        register_environment,
        register_interface,
        register_model,
    )
    from unirun.experiments.datasets import (
        DatasetUtility,
        PairedDataset,
        PromptAnswerDataset,
        PromptDataset,
        register_tokenizer,
    )
    from unirun.experiments.experiment import (
        Experiment,
        ExperimentConfig,
        make_experiment,
        register_experiment,
    )
    from unirun.experiments.graph import (
        Graph,
        MFCDef,
        MicroBatchSpec,
        ModelInterfaceAbstraction,
        ModelInterfaceType,
        ModelName,
        ModelShardID,
        OffloadHook,
        ParamReallocHook,
        ProcessTopology,
        build_graph,
        topology,
    )
    from unirun.experiments.models.api import (
        FinetuneSpec,
        Generated,
        GenerationConfig,
        Model,
        ModelBackend,
        ModelInterface,
        PipelinableEngine,
        Place,
    )
    from unirun.experiments.recovery import RecoverInfo
    from unirun.experiments.sample import NamedArray, SequenceSample
    from unirun.experiments.starting import trial_status

__all__ = [
    "AgentAbstraction",
    "Allocation",
    "AutomaticEvaluator",
    "BundledGenerationOutputs",
    "CollectingAgent",
    "DatasetAbstraction",
    "DatasetUtility",
    "EnvServiceAbstraction",
    "ExpStatus",
    "Experiment",
    "ExperimentConfig",
    "ExperimentSaveEvalControl",
    "ExperimentScheduling",
    "FinetuneSpec",
    "Generated",
    "GenerationConfig",
    "GenerationServer",
    "Graph",
    "GserverManager",
    "MFCDef",
    "MasterWorker",
    "MicroBatchSpec",
    "Model",
    "ModelAbstraction",
    "ModelBackend",
    "ModelBackendAbstraction",
    "ModelInterface",
    "ModelInterfaceAbstraction",
    "ModelInterfaceType",
    "ModelName",
    "ModelShardID",
    "ModelWorker",
    "NamedArray",
    "OffloadHook",
    "PairedDataset",
    "ParamReallocHook",
    "PipelinableEngine",
    "Place",
    "ProcessTopology",
    "PromptAnswerDataset",
    "PromptDataset",
    "RecoverInfo",
    "Resolved",
    "RolloutAgent",
    "RolloutWorker",
    "Scheduling",
    "SequenceSample",
    "StandaloneModelShardAbstraction",
    "TasksGroup",
    "TensorBoardConfig",
    "WandBConfig",
    "WorkerInformation",
    "build_graph",
    "make_experiment",
    "model_workers",
    "register_agent",
    "register_backend",
    "register_dataset",
    "register_environment",
    "register_experiment",
    "register_interface",
    "register_model",
    "register_tokenizer",
    "topology",
    "trial_status",
]

_HOMES = (
    "graph",
    "config",
    "experiment",
    "starting",
    "recovery",
    "sample",
    "models.api",
    "datasets",
    "agents",
)
"""The modules that have these names. Those that import torch, from `sample` on, come after the others."""


def __getattr__(name: str) -> Any:
    for home in _HOMES if name in __all__ else ():
        module = importlib.import_module(f"unirun.experiments.{home}")
        if hasattr(module, name):
            found = globals()[name] = getattr(module, name)
            return found
    raise AttributeError(f"module 'unirun.experiments' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
