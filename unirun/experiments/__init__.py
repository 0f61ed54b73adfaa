"""Experiments: an algorithm as a graph of model function calls, each model in its own layout on its own devices.

The names are those of ReaLHF and AReaL. `Experiment` and `register_experiment` are where to begin; ``unirun experiment
start`` runs what is registered.

Names are imported when they are used: trials are listed and stopped without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unirun.experiments.config import (
        AgentAbstraction,
        Allocation,
        AutomaticEvaluator,
        DatasetAbstraction,
        EnvServiceAbstraction,
        ExperimentSaveEvalControl,
        ExperimentScheduling,
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
        WorkerInformation,
        model_workers,
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
        Engine,
        FinetuneSpec,
        Generated,
        GenerationConfig,
        Model,
        ModelBackend,
        ModelInterface,
        Place,
    )
    from unirun.experiments.recovery import RecoverInfo
    from unirun.experiments.registry import (
        register_backend,
        register_dataset,
        register_interface,
        register_model,
    )
    from unirun.experiments.sample import NamedArray, SequenceSample

__all__ = [
    "AgentAbstraction",
    "Allocation",
    "AutomaticEvaluator",
    "DatasetAbstraction",
    "DatasetUtility",
    "Engine",
    "EnvServiceAbstraction",
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
    "Place",
    "ProcessTopology",
    "PromptAnswerDataset",
    "PromptDataset",
    "RecoverInfo",
    "Resolved",
    "RolloutWorker",
    "Scheduling",
    "SequenceSample",
    "StandaloneModelShardAbstraction",
    "TasksGroup",
    "WorkerInformation",
    "build_graph",
    "make_experiment",
    "model_workers",
    "register_backend",
    "register_dataset",
    "register_experiment",
    "register_interface",
    "register_model",
    "register_tokenizer",
    "topology",
]

_HOMES = {
    "config": (
        "ExperimentSaveEvalControl",
        "Allocation",
        "model_workers",
        "AgentAbstraction",
        "AutomaticEvaluator",
        "DatasetAbstraction",
        "EnvServiceAbstraction",
        "ExperimentScheduling",
        "GenerationServer",
        "GserverManager",
        "MasterWorker",
        "ModelAbstraction",
        "ModelBackendAbstraction",
        "ModelWorker",
        "Resolved",
        "RolloutWorker",
        "Scheduling",
        "StandaloneModelShardAbstraction",
        "TasksGroup",
        "WorkerInformation",
    ),
    "datasets": (
        "DatasetUtility",
        "PairedDataset",
        "PromptAnswerDataset",
        "PromptDataset",
        "register_tokenizer",
    ),
    "sample": (
        "NamedArray",
        "SequenceSample",
    ),
    "experiment": (
        "ExperimentConfig",
        "Experiment",
        "make_experiment",
        "register_experiment",
    ),
    "graph": (
        "ModelName",
        "ModelShardID",
        "ProcessTopology",
        "topology",
        "Graph",
        "MFCDef",
        "MicroBatchSpec",
        "ModelInterfaceAbstraction",
        "ModelInterfaceType",
        "OffloadHook",
        "ParamReallocHook",
        "build_graph",
    ),
    "models.api": (
        "Engine",
        "FinetuneSpec",
        "Generated",
        "GenerationConfig",
        "Model",
        "ModelBackend",
        "ModelInterface",
        "Place",
    ),
    "recovery": ("RecoverInfo",),
    "registry": (
        "register_backend",
        "register_dataset",
        "register_interface",
        "register_model",
    ),
}

_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unirun.experiments' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"unirun.experiments.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
