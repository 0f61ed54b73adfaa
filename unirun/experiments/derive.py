"""The values that are derived from a valid configuration of an experiment: pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from unirun.experiments.config import ExperimentDescription
from unirun.experiments.graph import (
    Graph,
    MFCDef,
    ModelInterfaceType,
    ModelName,
    ModelShardID,
    ParamReallocHook,
    ProcessTopology,
    with_hooks,
)

Pair = tuple[ModelName, ModelName]


def model_names(config: ExperimentDescription) -> list[ModelName]:
    """All models, sorted."""
    return sorted({shard.id.model_name for worker in config.model_worker for shard in worker.shards})


def topologies(config: ExperimentDescription) -> dict[ModelName, ProcessTopology]:
    """The topology of each model."""
    found = {shard.id.model_name: shard.id.topo for worker in config.model_worker for shard in worker.shards}
    return dict(sorted(found.items()))


def model_types(config: ExperimentDescription) -> dict[ModelName, tuple[str, str]]:
    """The registered names of the network and the backend of each model."""
    return {
        shard.id.model_name: (shard.model.type_, shard.backend.type_)
        for worker in config.model_worker
        for shard in worker.shards
    }


def shard_workers(config: ExperimentDescription) -> dict[ModelShardID, int]:
    """The model worker of each shard."""
    return {shard.id: index for index, worker in enumerate(config.model_worker) for shard in worker.shards}


def shared_models(config: ExperimentDescription) -> set[ModelName]:
    """The models that share a worker with another model."""
    return {
        shard.id.model_name
        for worker in config.model_worker
        if len(worker.shards) > 1
        for shard in worker.shards
    }


def calls_with_hooks(config: ExperimentDescription) -> list[MFCDef]:
    """The calls, with the hooks that follow from where their models are."""
    return with_hooks(config.model_rpcs, shared_models(config))


def data_transfer_pairs(graph: Graph) -> list[Pair]:
    """The pairs of models between which data goes, each once: producer and consumer of each edge of the graph; and the
    model of the first source call, whose workers read the dataset, with the model of each source call."""
    calls = graph.calls
    pairs = [(calls[producer].model_name, calls[name].model_name) for producer, name, _ in graph.edges]
    sources = [calls[name].model_name for name in graph.sources]
    return list(dict.fromkeys([*pairs, *((sources[0], other) for other in sources)]))


def sync_param_pairs(calls: Sequence[MFCDef]) -> list[Pair]:
    """The models between which parameters go, source first, each pair once, in the order of the calls."""
    found: list[Pair] = []
    for call in calls:
        for hook in (*call.pre_hooks, *call.post_hooks):
            if not isinstance(hook, ParamReallocHook):
                continue
            if hook.target is not None:
                found.append((call.model_name, hook.target))
            elif hook.source is not None:
                found.append((hook.source, call.model_name))
    return list(dict.fromkeys(found))


def instantiated(calls: Sequence[MFCDef]) -> frozenset[ModelName]:
    """The models that own parameters: the trained replica of each role that is trained, and all models of other roles.

    Replicas that are updated as a moving average (`eta`) own parameters too.
    """
    trained = {c.role: c.model_name for c in calls if c.interface_type is ModelInterfaceType.TRAIN_STEP}
    found = {call.model_name for call in calls if trained.get(call.role, call.model_name) == call.model_name}
    for call in calls:
        for hook in (*call.pre_hooks, *call.post_hooks):
            if isinstance(hook, ParamReallocHook) and hook.eta < 1.0:
                found.add(hook.target or call.model_name)
    return frozenset(found)
