"""The names that Ray Train and RaySGD have, and unirun has not: errors say how the same is written here.

It imports nothing that is slow, as an attribute that a package does not have must not cost the import of torch.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

FUNCTIONS = {
    "Checkpoint": "train.save_checkpoint(files=directory) saves files, and trainer.latest_checkpoint is a path",
    "CheckpointConfig": "train.CheckpointStrategy(num_to_keep=…), for trainer.run(checkpoint_strategy=…)",
    "DataConfig": "trainer.run(f, dataset=…), which each rank has a part of: train.get_dataset_shard()",
    "DataParallelTrainer": "train.Trainer(num_workers=…).run(f, config)",
    "FailureConfig": "train.Trainer(max_failures=…)",
    "RunConfig": "train.Trainer(logdir=…, max_failures=…)",
    "ScalingConfig": "train.Trainer(num_workers=…, use_gpu=…, resources_per_worker=…)",
    "SyncConfig": "train.Trainer(logdir=…), a path or a URL",
    "TorchTrainer": "train.Trainer(num_workers=…).run(f, config)",
    "get_checkpoint": "train.load_checkpoint(into=…)",
    "get_context": "train.world_rank(), train.local_rank(), train.world_size()",
    "get_dataset": "train.get_dataset_shard(), this rank's part of the dataset",
    "get_datasets": "train.get_dataset_shard(name) for each name of trainer.run(dataset={name: …})",
    "torch": "train.prepare_model, train.prepare_data_loader, train.device",
}

TRAINERS = {
    "as_trainable": "to_trainable(train_func)",
    "fit": "run(train_func, config)",
    "hyperparameter_search": "to_trainable(train_func), for Optuna or Ray Tune",
    "latest_checkpoint_dir": "latest_checkpoint",
    "map": "run(train_func, dataset=…), or execute(f)",
    "restore": "run(train_func, checkpoint=path)",
    "to_tune_trainable": "to_trainable(train_func)",
}

SHARDS = {
    "get_shard": "the shard itself: it is this rank's part already",
    "get_split": "the shard itself: it is this rank's part already",
    "iter_batches": "to_torch(batch_size)",
    "iter_torch_batches": "to_torch(batch_size)",
    "to_tf": "to_torch(batch_size)",
}

TRAINER_ARGUMENTS = {
    "datasets": "dataset= of run",
    "gpu_per_worker": "gpus_per_worker=",
    "resume_from_checkpoint": "checkpoint= of run",
    "run_config": "logdir=, max_failures=",
    "scaling_config": "num_workers=, use_gpu=, resources_per_worker=",
    "torch_config": "backend_args=",
    "train_loop_config": "config= of run",
    "train_loop_per_worker": "run(train_func)",
    "workers": "num_workers=",
}


def elsewhere(owner: str, name: str, known: Mapping[str, str]) -> str:
    """The message of an attribute that `owner` does not have; it names ours, if it is `known` from elsewhere."""
    return f"{owner} has no {name!r}" + (f"; use {known[name]}" if name in known else "")


def refuse_arguments(owner: type, given: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that `owner` does not have, as Python does; it names the one that was meant."""
    for name in given:
        near = difflib.get_close_matches(name, inspect.signature(owner).parameters, n=1, cutoff=0.8)
        known = {f"{name}=": f"{near[0]}="} if near else {}
        known |= {f"{key}=": each for key, each in TRAINER_ARGUMENTS.items()}
        raise TypeError(elsewhere(owner.__name__, f"{name}=", known))
