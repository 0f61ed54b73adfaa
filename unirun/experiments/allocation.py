"""`model_workers` makes the list of model workers from an `Allocation` for each model, instead of shard by shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unirun.experiments.config import (
    DatasetAbstraction,
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelWorker,
    StandaloneModelShardAbstraction,
)
from unirun.experiments.layout import ModelName, ModelShardID, ProcessTopology


@dataclass(frozen=True)
class Allocation:
    """A model in its layout, from the worker `first` on: rank `r` is in worker ``first + r``. `eval_dataset` is what
    the model is evaluated on while it is trained."""

    model: ModelAbstraction
    backend: ModelBackendAbstraction
    topo: ProcessTopology
    first: int = 0
    eval_dataset: DatasetAbstraction | None = None


def model_workers(
    models: Mapping[ModelName, Allocation],
    *,
    seed: int = 1,
    tokenizer: str = "",
    datasets: Sequence[DatasetAbstraction] = (),
    shuffle: bool = True,
) -> list[ModelWorker]:
    """As many workers as the models need, each with its shards. All of them have the datasets."""
    count = max((a.first + a.topo.world_size() for a in models.values()), default=0)
    return [
        ModelWorker(
            base_seed=seed,
            shards=[
                StandaloneModelShardAbstraction(
                    ModelShardID(name, a.topo, index - a.first), a.model, a.backend, a.eval_dataset
                )
                for name, a in models.items()
                if 0 <= index - a.first < a.topo.world_size()
            ],
            tokenizer_name_or_path=tokenizer,
            datasets=list(datasets),
            shuffle_dataset=shuffle,
        )
        for index in range(count)
    ]
