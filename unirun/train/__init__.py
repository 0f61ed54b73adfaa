"""Jobs from Python: described with a builder, checked at once, submitted as a process of its own; or a function on many
ranks, with `Trainer`.

Names are imported when they are used: builders need no torch, nor does a program that starts a `Trainer`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unirun.train.acceleration import (
        accelerate,
        backward,
        device,
        enable_reproducibility,
        prepare_data_loader,
        prepare_model,
        prepare_optimizer,
        unwrap,
    )
    from unirun.train.builder import DLJobBuilder, JobBuilder, RLJobBuilder
    from unirun.train.callbacks import (
        CsvLoggerCallback,
        JsonLoggerCallback,
        MLflowCallback,
        ProgressCallback,
        TensorBoardCallback,
        TrainingCallback,
        WandbCallback,
    )
    from unirun.train.checkpoints import CheckpointStrategy
    from unirun.train.data import Files
    from unirun.train.data.loader import Loader, Shard
    from unirun.train.data.sources import kfold, to_cv
    from unirun.train.functions import (
        checkpoint_files,
        config,
        get_dataset_shard,
        in_worker,
        load_checkpoint,
        local_rank,
        report,
        save_checkpoint,
        should_stop,
        world_rank,
        world_size,
    )
    from unirun.train.job import Job, JobHandle, attach
    from unirun.train.running import TrainingIterator
    from unirun.train.setup import Backend, NoBackend, TorchConfig
    from unirun.train.task import Result
    from unirun.train.trainer import Trainable, Trainer

__all__ = [
    "Backend",
    "CheckpointStrategy",
    "CsvLoggerCallback",
    "DLJobBuilder",
    "Files",
    "Job",
    "JobBuilder",
    "JobHandle",
    "JsonLoggerCallback",
    "Loader",
    "MLflowCallback",
    "NoBackend",
    "ProgressCallback",
    "RLJobBuilder",
    "Result",
    "Shard",
    "TensorBoardCallback",
    "TorchConfig",
    "Trainable",
    "Trainer",
    "TrainingCallback",
    "TrainingIterator",
    "WandbCallback",
    "accelerate",
    "attach",
    "backward",
    "checkpoint_files",
    "config",
    "device",
    "enable_reproducibility",
    "get_dataset_shard",
    "in_worker",
    "kfold",
    "load_checkpoint",
    "local_rank",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
    "report",
    "save_checkpoint",
    "should_stop",
    "to_cv",
    "unwrap",
    "world_rank",
    "world_size",
]

_HOMES = {
    "acceleration": (
        "accelerate",
        "backward",
        "device",
        "enable_reproducibility",
        "prepare_data_loader",
        "prepare_model",
        "prepare_optimizer",
        "unwrap",
    ),
    "builder": ("DLJobBuilder", "JobBuilder", "RLJobBuilder"),
    "callbacks": (
        "CsvLoggerCallback",
        "JsonLoggerCallback",
        "MLflowCallback",
        "ProgressCallback",
        "TensorBoardCallback",
        "TrainingCallback",
        "WandbCallback",
    ),
    "checkpoints": ("CheckpointStrategy",),
    "data.files": ("Files",),
    "data.loader": ("Loader", "Shard"),
    "data.sources": ("kfold", "to_cv"),
    "functions": (
        "checkpoint_files",
        "config",
        "get_dataset_shard",
        "in_worker",
        "load_checkpoint",
        "local_rank",
        "report",
        "save_checkpoint",
        "should_stop",
        "world_rank",
        "world_size",
    ),
    "job": ("Job", "JobHandle", "attach"),
    "running": ("TrainingIterator",),
    "setup": ("Backend", "NoBackend", "TorchConfig"),
    "task": ("Result",),
    "trainer": ("Trainable", "Trainer"),
}

_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from unirun.train.familiar import FUNCTIONS, elsewhere

        message = elsewhere("module 'unirun.train'", name, FUNCTIONS)
        # Of an AttributeError ``from unirun.train import …`` would drop the message.
        raise ImportError(message) if name in FUNCTIONS else AttributeError(message)
    found = getattr(importlib.import_module(f"unirun.train.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
