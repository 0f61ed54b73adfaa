"""Checks of the graph, the placement and the names of a configuration; all errors are reported together."""

from __future__ import annotations

import math
from collections import Counter

from unirun.collocation.graph import show_ranks
from unirun.errors import Fault, UsageError
from unirun.experiments import config as derive
from unirun.experiments.checks_of_arguments import argument_faults
from unirun.experiments.config import Every, ExperimentDescription
from unirun.experiments.graph import (
    AXES,
    PART_RULE,
    MFCDef,
    ModelInterfaceType,
    ModelName,
    ParamReallocHook,
    ProcessTopology,
    graph_faults,
    is_part,
)
from unirun.experiments.models.api import ModelInterface
from unirun.experiments.orders import check_reductions
from unirun.experiments.registry import BACKENDS, DATASETS, INTERFACES, MODELS, Registry

# Checks of what calls ask of their models and interfaces; `graph` checks which data they need and make.


def malformed_faults(config: ExperimentDescription) -> list[Fault]:
    """Values of which nothing else can be checked: they have the wrong type, or are no layouts."""
    found = [
        Fault(f"models.{name}", f"its topology has the axes {topo.axes!r} and sizes {topo.dims!r}", _LAYOUT)
        for name, topo in derive.topologies(config).items()
        if not _is_layout(topo)
    ]
    kinds = ", ".join(f"ModelInterfaceType.{kind.name}" for kind in ModelInterfaceType)
    for call in config.model_rpcs:
        where = f"model_rpcs.{call.name}"
        if not isinstance(call.model_name, ModelName):
            problem = f"model_name is {call.model_name!r}, which is no ModelName"
            found.append(Fault(where, problem, f"write ModelName({str(call.model_name)!r})"))
        if not isinstance(call.interface_type, ModelInterfaceType):
            problem = f"interface_type is {call.interface_type!r}, which is no ModelInterfaceType"
            found.append(Fault(where, problem, f"it is one of {kinds}"))
    return found


_LAYOUT = f"make it with topology(): it has {', '.join(AXES)}, each of 1 or more ranks"


def _is_layout(topo: ProcessTopology) -> bool:
    return (
        sorted(topo.axes) == sorted(AXES)
        and len(topo.dims) == len(AXES)
        and all(isinstance(size, int) and size >= 1 for size in topo.dims)
    )


def call_faults(config: ExperimentDescription) -> list[Fault]:
    """Names of calls and roles, methods that interfaces lack, and what a model without a network cannot do."""
    roles = {
        name.role: None for name in (*derive.model_names(config), *(c.model_name for c in config.model_rpcs))
    }
    found = [
        Fault("models", f"{role!r} is no name for a role", PART_RULE) for role in roles if not is_part(role)
    ]
    for call in config.model_rpcs:
        where = f"model_rpcs.{call.name}"
        if not is_part(call.name):
            found.append(Fault("model_rpcs", f"{call.name!r} is no name for a call", PART_RULE))
        if call.output_keys and call.interface_type in (
            ModelInterfaceType.TRAIN_STEP,
            ModelInterfaceType.EVALUATE,
        ):
            problem = f"it has output_keys, and {call.interface_type.value} makes no data"
            found.append(Fault(where, problem, "leave them out, or use inference"))
        if _lacks_method(call):
            problem = f"interface {call.interface_impl.type_!r} does not define {call.interface_type.value}()"
            found.append(Fault(where, problem, "define it, or correct interface_type or interface_impl"))
        try:
            check_reductions(getattr(INTERFACES.at_hand(call.interface_impl.type_), "reductions", {}))
        except UsageError as error:
            found.append(Fault(where, error.problem, error.remedy))
    return found + _hook_faults(config)


def _lacks_method(call: MFCDef) -> bool:
    """Return True if the interface has only the methods that `ModelInterface` defines. False if it is no
    class of this kind, or not imported yet."""
    cls = INTERFACES.at_hand(call.interface_impl.type_)
    if not isinstance(cls, type) or not issubclass(cls, ModelInterface):
        return False
    method = call.interface_type.value
    return getattr(cls, method) is getattr(ModelInterface, method)


def _hook_faults(config: ExperimentDescription) -> list[Fault]:
    """Hooks, also those that are added, of models without parameters."""
    empty = {name for name, (_, backend) in derive.model_types(config).items() if backend == "null"}
    found = []
    for call in derive.calls_with_hooks(config):
        for hook in (*call.pre_hooks, *call.post_hooks):
            others = (hook.source, hook.target) if isinstance(hook, ParamReallocHook) else ()
            found += [
                Fault(
                    f"model_rpcs.{call.name}",
                    f"its {type(hook).__name__} needs parameters of {name}, whose backend 'null' has none",
                    "leave the hook out; a role with this backend that is trained has one replica",
                )
                for name in sorted(empty)
                if name in (call.model_name, *others)
            ]
    return found


# Checks of generation servers, of what sends requests to them, and of what makes trajectories.

SERVER_BACKENDS = ("sglang", "torch", "vllm")
"""Backends of a generation server."""

POLICIES = ("round_robin", "least_requests", "least_token_usage")
"""Policies by which a manager chooses the server of a request."""


def serving_faults(config: ExperimentDescription) -> list[Fault]:
    """Generation servers, their manager, and rollout workers."""
    found = []
    servers, managers, rollouts = config.generation_server, config.gserver_manager, config.rollout_worker
    roles = {name.role for name in derive.model_names(config)}
    if managers and not servers:
        found.append(Fault("gserver_manager", "there are no generation servers to manage", "add them"))
    if (servers or managers) and len(managers) != 1:
        found.append(
            Fault("gserver_manager", f"there are {len(managers)}", "generation servers have one manager")
        )
    if rollouts and not managers:
        found.append(
            Fault("rollout_worker", "there is no gserver_manager to ask", "add one, and its servers")
        )
    for index, server in enumerate(servers):
        where = f"generation_server.{index}"
        if server.tp_size < 1:
            found.append(Fault(f"{where}.tp_size", f"{server.tp_size}", "it is 1 or more"))
        if server.backend_type not in SERVER_BACKENDS:
            there = ", ".join(SERVER_BACKENDS)
            found.append(Fault(f"{where}.backend_type", f"{server.backend_type!r}", f"it is one of {there}"))
        if not server.model_path:
            found.append(
                Fault(f"{where}.model_path", "it is empty", "give a path, or a name of Hugging Face's")
            )
    alike = {(server.backend_type, server.model_path, server.tp_size) for server in servers}
    if len(alike) > 1:
        problem = "they differ in backend_type, model_path or tp_size"
        found.append(Fault("generation_server", problem, "give all servers the same"))
    for manager in managers:
        if manager.n_servers != len(servers):
            problem = f"n_servers is {manager.n_servers}, and there are {len(servers)} generation servers"
            found.append(Fault("gserver_manager", problem, "make both the same"))
        if manager.model_name.role not in roles:
            problem = f"it serves {manager.model_name}, which no worker has"
            found.append(Fault("gserver_manager", problem, f"there are: {', '.join(sorted(roles))}"))
        found += [
            Fault(f"gserver_manager.{name}", f"{getattr(manager, name)}", "it is 1 or more")
            for name in ("train_batch_size", "flush_request_timeout", "max_concurrent_rollouts")
            if getattr(manager, name) < 1
        ]
        if manager.schedule_policy not in POLICIES:
            there = ", ".join(POLICIES)
            found.append(
                Fault(
                    "gserver_manager.schedule_policy", f"{manager.schedule_policy!r}", f"it is one of {there}"
                )
            )
        sizes = {call.n_seqs for call in config.model_rpcs}
        if manager.train_batch_size >= 1 and manager.train_batch_size not in sizes:
            problem = f"it is {manager.train_batch_size}, and calls have n_seqs {', '.join(map(str, sorted(sizes)))}"
            found.append(Fault("gserver_manager.train_batch_size", problem, "make both the same"))
        if manager.max_head_offpolicyness < 0:
            found.append(Fault("gserver_manager.max_head_offpolicyness", "it is negative", "0: on policy"))
    for index, rollout in enumerate(rollouts):
        where = f"rollout_worker.{index}"
        if managers and rollout.model_name != managers[0].model_name:
            found.append(
                Fault(where, f"it asks for {rollout.model_name}", f"{managers[0].model_name} is served")
            )
        if not rollout.datasets:
            found.append(Fault(where, "it has no datasets", "give it at least one"))
        if not rollout.tokenizer_path:
            found.append(Fault(f"{where}.tokenizer_path", "it is empty", "give the tokenizer of the model"))
        found += [
            Fault(
                where,
                f"no dataset is registered as {each.type_!r}",
                f"there are: {', '.join(DATASETS.names())}",
            )
            for each in rollout.datasets
            if each.type_ not in DATASETS
        ]
        found += [
            Fault(f"{where}.{name}", f"{getattr(rollout, name)}", "it is 1 or more")
            for name in ("new_tokens_per_chunk", "rollout_request_timeout")
            if getattr(rollout, name) < 1
        ]
    return found


def dataset_keys(config: ExperimentDescription) -> frozenset[str]:
    """The keys that the datasets of an experiment have."""
    return frozenset().union(*_keys_of_datasets(config).values())


def _keys_of_datasets(config: ExperimentDescription) -> dict[str, frozenset[str]]:
    """The keys of each type of dataset that is in use."""
    types = {each.type_ for worker in config.model_worker for each in worker.datasets}
    return {type_: frozenset(DATASETS.find(type_).keys) for type_ in sorted(types) if type_ in DATASETS}


def faults(config: ExperimentDescription) -> list[Fault]:
    """All errors that can be found without making models or datasets, with hints. Empty if there are none."""
    found = [*config.exp_ctrl.faults()]
    if (
        isinstance(config.call_timeout, bool)
        or not isinstance(config.call_timeout, int | float)
        or not (0 < config.call_timeout < math.inf)
    ):
        found.append(Fault("call_timeout", f"{config.call_timeout!r} is not a number of seconds above 0"))
    if not config.model_worker:
        return [*found, Fault("model_worker", "there are no model workers", "one at least has shards")]
    if malformed := malformed_faults(config):
        return [*found, *malformed]
    found += _worker_faults(config)
    found += _registry_faults(config)
    found += argument_faults(config)
    found += graph_faults(config.model_rpcs, dataset_keys(config))
    found += call_faults(config)
    found += _model_faults(config)
    found += _network_faults(config)
    found += _role_faults(config)
    found += _data_faults(config)
    found += serving_faults(config)
    found += _held_out_faults(config)
    found += _evaluator_faults(config)
    return found


def _held_out_faults(config: ExperimentDescription) -> list[Fault]:
    held_out = any(shard.eval_dataset for worker in config.model_worker for shard in worker.shards)
    if held_out or config.exp_ctrl.every("eval") == Every():
        return []
    problem = "an eval_freq_… is set, and no shard has an eval_dataset"
    return [Fault("exp_ctrl", problem, "give Allocation(…, eval_dataset=…), or leave eval_freq_… out")]


def _evaluator_faults(config: ExperimentDescription) -> list[Fault]:
    if not config.auto_eval:
        return []
    found = []
    dataset, role = config.evaluator.dataset, config.evaluator.role
    if dataset is None or dataset.type_ not in DATASETS:
        found.append(Fault("evaluator.dataset", "there is none to evaluate on", "give a registered dataset"))
    if not any(getattr(config.exp_ctrl, f"save_freq_{unit}") for unit in ("epochs", "steps", "secs")):
        found.append(Fault("evaluator", "models are saved at the end only", "give exp_ctrl a save_freq_…"))
    trained = [c.role for c in config.model_rpcs if c.interface_type is ModelInterfaceType.TRAIN_STEP]
    if (role and role not in trained) or (not role and len(trained) != 1):
        there = ", ".join(trained) or "none"
        found.append(Fault("evaluator.role", f"it is {role!r}, and trained are: {there}", "name one of them"))
    return found


def _worker_faults(config: ExperimentDescription) -> list[Fault]:
    found = []
    for index, worker in enumerate(config.model_worker):
        counts = Counter(shard.id.model_name for shard in worker.shards)
        found += [
            Fault(
                f"model_worker.{index}", f"it has {count} shards of {name}", "a worker has one of each model"
            )
            for name, count in counts.items()
            if count > 1
        ]
    if len({worker.base_seed for worker in config.model_worker}) > 1:
        found.append(Fault("model_worker", "the workers have different base_seeds", "give all of them one"))
    if len(config.master_worker) != 1:
        found.append(
            Fault("master_worker", f"there are {len(config.master_worker)}", "leave it out: one is made")
        )
    return found


def _registry_faults(config: ExperimentDescription) -> list[Fault]:
    wanted: dict[tuple[str, str], tuple[str, Registry[object]]] = {}
    for call in config.model_rpcs:
        wanted["interface", call.interface_impl.type_] = f"model_rpcs.{call.name}", INTERFACES
    for index, worker in enumerate(config.model_worker):
        where = f"model_worker.{index}"
        for shard in worker.shards:
            wanted["model", shard.model.type_] = where, MODELS
            wanted["backend", shard.backend.type_] = where, BACKENDS
            if shard.eval_dataset is not None:
                wanted["dataset", shard.eval_dataset.type_] = where, DATASETS
        for dataset in worker.datasets:
            wanted["dataset", dataset.type_] = where, DATASETS
    return [
        Fault(
            where,
            f"no {kind} is registered as {type_!r}",
            f"there are: {', '.join(registry.names()) or 'none'}",
        )
        for (kind, type_), (where, registry) in wanted.items()
        if type_ not in registry
    ]


def _model_faults(config: ExperimentDescription) -> list[Fault]:
    found = []
    names = derive.model_names(config)
    replicas: dict[str, list[int]] = {}
    for name in names:
        replicas.setdefault(name.role, []).append(name.replica_id)
    for role, ids in replicas.items():
        if ids != list(range(len(ids))):
            found.append(
                Fault(f"models.{role}", f"its replicas are {ids}", "number the replicas of a role 0, 1, 2, …")
            )
    for name in names:
        found += _shard_faults(config, name)
    for call in config.model_rpcs:
        if call.model_name not in names:
            there = ", ".join(map(str, names)) or "none"
            found.append(
                Fault(
                    f"model_rpcs.{call.name}",
                    f"no worker has a shard of {call.model_name}",
                    f"there are: {there}",
                )
            )
    topologies = derive.topologies(config)
    for call in config.model_rpcs:
        ranks = topologies[call.model_name].get_dim("data") if call.model_name in names else 1
        if call.n_seqs < ranks:
            found.append(
                Fault(
                    f"model_rpcs.{call.name}",
                    f"n_seqs is {call.n_seqs}, and {call.model_name} has {ranks} data-parallel ranks",
                    "make n_seqs larger, or have fewer of them",
                )
            )
    called = {call.model_name for call in config.model_rpcs}
    hooked = {other for call in config.model_rpcs for other in (*call.reads, *call.writes)}
    found += [
        Fault(f"models.{name}", "no call uses it", "leave its shards out")
        for name in names
        if name not in called | hooked
    ]
    return found


def _network_faults(config: ExperimentDescription) -> list[Fault]:
    """Backends that cannot have their model. Nothing is known of models and backends that are not built in."""
    found = []
    for name, (model, backend) in sorted(derive.model_types(config).items()):
        if backend == "null" and model == "causal_lm":
            remedy = "use 'ddp', 'fsdp2' or 'inference'"
            found.append(
                Fault(f"models.{name}", f"its backend 'null' cannot run its model {model!r}", remedy)
            )
        elif model == "null" and backend in ("ddp", "fsdp2", "inference"):
            problem = f"its model 'null' has no network for its backend {backend!r}"
            found.append(Fault(f"models.{name}", problem, "use the backend 'null'"))
    return found


def _shard_faults(config: ExperimentDescription, name: ModelName) -> list[Fault]:
    where = f"models.{name}"
    mine = [shard for worker in config.model_worker for shard in worker.shards if shard.id.model_name == name]
    topos = list(dict.fromkeys(shard.id.topo for shard in mine))
    if len(topos) > 1:
        shown = "; ".join(map(str, topos))
        return [Fault(where, f"its shards have different topologies: {shown}", "give all of them one")]
    found = []
    topo, size = topos[0], topos[0].world_size()
    ranks = Counter(shard.id.parallelism_rank for shard in mine)
    missing = [rank for rank in range(size) if rank not in ranks]
    if missing:
        found.append(
            Fault(
                where,
                f"its topology {topo} has {size} ranks, and no worker has rank{'s' * (len(missing) > 1)} "
                f"{show_ranks(missing)}",
                "give each rank to a worker, or make the topology smaller",
            )
        )
    twice = [rank for rank, count in sorted(ranks.items()) if count > 1]
    if twice:
        found.append(Fault(where, f"several workers have rank {show_ranks(twice)}", "give each rank to one"))
    strange = [rank for rank in sorted(ranks) if not 0 <= rank < size]
    if strange:
        found.append(
            Fault(
                where,
                f"rank {show_ranks(strange)} is not in its topology {topo}",
                f"ranks are 0 to {size - 1}",
            )
        )
    found += [
        Fault(where, f"its shards differ in {what}", "give all of them the same")
        for what in ("model", "backend", "eval_dataset")
        if len({repr(getattr(shard, what)) for shard in mine}) > 1
    ]
    return found


def _role_faults(config: ExperimentDescription) -> list[Fault]:
    found = []
    trainers: dict[str, list[MFCDef]] = {}
    only_run = {
        shard.id.model_name
        for worker in config.model_worker
        for shard in worker.shards
        if shard.backend.type_ == "inference"
    }
    for call in config.model_rpcs:
        if call.interface_type is ModelInterfaceType.TRAIN_STEP:
            trainers.setdefault(call.role, []).append(call)
            if call.model_name in only_run:
                found.append(
                    Fault(
                        f"model_rpcs.{call.name}",
                        f"it trains {call.model_name}, whose backend is 'inference'",
                        "use 'ddp' or 'fsdp2'",
                    )
                )
    for role, calls in trainers.items():
        if len(calls) > 1:
            found.append(
                Fault(
                    f"models.{role}",
                    f"{' and '.join(call.name for call in calls)} both train it",
                    "a role has one train_step; use two roles, or one interface that does both",
                )
            )
    known = derive.topologies(config)
    for source, target in derive.sync_param_pairs(derive.calls_with_hooks(config)):
        absent = [name for name in (source, target) if name not in known]
        if absent:
            found.append(
                Fault("model_rpcs", f"a ParamReallocHook names {absent[0]}, of which there are no shards")
            )
        elif _no_multiples(known[source], known[target]):
            sizes = known[source].get_dim("tensor"), known[target].get_dim("tensor")
            found.append(
                Fault(
                    "model_rpcs",
                    f"{source} and {target} exchange parameters, and their tensor sizes are {sizes[0]} and {sizes[1]}",
                    "one has to be a multiple of the other",
                )
            )
    return found


def _no_multiples(one: ProcessTopology, other: ProcessTopology) -> bool:
    sizes = sorted((one.get_dim("tensor"), other.get_dim("tensor")))
    return sizes[1] % sizes[0] != 0


def _data_faults(config: ExperimentDescription) -> list[Fault]:
    """The datasets are in the workers of the model that is called first, and are the same in all of them. All of them
    have the same keys."""
    made = {key for call in config.model_rpcs for key in call.output_keys}
    first = next((c for c in config.model_rpcs if not any(key in made for key in c.input_keys)), None)
    if first is None:
        return []
    found = []
    wanted = {
        index
        for index, worker in enumerate(config.model_worker)
        if any(shard.id.model_name == first.model_name for shard in worker.shards)
    }
    there = {index for index, worker in enumerate(config.model_worker) if worker.datasets}
    if wanted - there:
        found.append(
            Fault(
                "model_worker",
                f"{first.name} begins with data, and the workers {show_ranks(sorted(wanted - there))} of "
                f"{first.model_name} have no datasets",
                "give the same datasets to all workers of that model",
            )
        )
    if len({repr(config.model_worker[index].datasets) for index in wanted & there}) > 1:
        found.append(
            Fault(
                "model_worker",
                f"the workers of {first.model_name} have different datasets",
                "give all the same",
            )
        )
    keys = _keys_of_datasets(config)
    if len(set(keys.values())) > 1:
        each = "; ".join(f"{type_}: {', '.join(sorted(some))}" for type_, some in keys.items())
        found.append(Fault("model_worker", f"datasets have different keys: {each}", "use those of one kind"))
    return found
