"""Checks of a configuration, whose errors are reported together: of its calls, workers and models, of the arguments
of what is registered, of files and of networks.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import math
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from unirun.errors import Fault, SpecError, UsageError
from unirun.experiments.config import (
    AGENTS,
    BACKENDS,
    DATASETS,
    ENVIRONMENTS,
    INTERFACES,
    MODELS,
    ExperimentDescription,
    GenerationServer,
    GserverManager,
    Registry,
    RolloutWorker,
    calls_with_hooks,
    sync_param_pairs,
)
from unirun.experiments.datasets import OF_TEXT, TOKENIZERS, is_of_rows, read_rows
from unirun.experiments.graph import (
    AXES,
    PART_RULE,
    Abstraction,
    MFCDef,
    ModelInterfaceType,
    ModelName,
    ProcessTopology,
    graph_faults,
    is_part,
)
from unirun.experiments.models.api import FILE, ModelInterface
from unirun.experiments.orders import check_reductions
from unirun.experiments.tracking import tracker_faults
from unirun.observe.jobdir import unirun_home
from unirun.values import show_ranks
from unirun.wire.reporting import report

Faults = Iterator[Fault]

TRAJECTORY_KEYS = frozenset({"packed_input_ids", "prompt_mask", "packed_logprobs", "versions", "rewards"})
"""The keys that trajectories have in an asynchronous experiment. Rewards are one for each sequence, all else is one for
each token; logarithms of probabilities and versions are those with which rollouts were made."""


def faults(config: ExperimentDescription) -> list[Fault]:
    """All errors that can be found without making models or datasets, with hints. Empty if there are none."""
    found, timeout = config.exp_ctrl.faults(), config.call_timeout
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        found.append(Fault("call_timeout", f"{timeout!r} is not a number of seconds above 0"))
    if not config.model_worker:
        return [*found, Fault("model_worker", "there are no model workers", "one at least has shards")]
    if malformed := [*_malformed_faults(config)]:
        return [*found, *malformed]
    found += _worker_faults(config)
    found += _registry_faults(config)
    found += _argument_faults(config)
    found += graph_faults(config.model_rpcs, dataset_keys(config))
    found += _call_faults(config)
    found += _hook_faults(config)
    found += _model_faults(config)
    found += _backend_faults(config)
    found += _role_faults(config)
    found += _data_faults(config)
    found += _tokenizer_faults(config)
    found += _serving_faults(config)
    found += _evaluation_faults(config)
    return found


def _malformed_faults(config: ExperimentDescription) -> Faults:
    """Values of which nothing else can be checked: they have the wrong type, or are no layouts."""
    for name, shard in config.models().items():
        axes, dims = shard.id.topo.axes, shard.id.topo.dims
        whole = all(isinstance(size, int) and size >= 1 for size in dims)
        if sorted(axes) != sorted(AXES) or len(dims) != len(AXES) or not whole:
            remedy = f"make it with topology(): it has {', '.join(AXES)}, each of 1 or more ranks"
            yield Fault(f"models.{name}", f"its topology has the axes {axes!r} and sizes {dims!r}", remedy)
    kinds = ", ".join(f"ModelInterfaceType.{kind.name}" for kind in ModelInterfaceType)
    for call in config.model_rpcs:
        where, name, kind = f"model_rpcs.{call.name}", call.model_name, call.interface_type
        if not isinstance(name, ModelName):
            yield Fault(where, f"model_name is {name!r}, which is no ModelName", "write ModelName('actor')")
        if not isinstance(kind, ModelInterfaceType):
            problem = f"interface_type is {kind!r}, which is no ModelInterfaceType"
            yield Fault(where, problem, f"it is one of {kinds}")


# Checks of workers, and of what calls ask of their models and interfaces; `graph` checks which data they need and make.


def _worker_faults(config: ExperimentDescription) -> Faults:
    for index, worker in enumerate(config.model_worker):
        for name, count in Counter(shard.id.model_name for shard in worker.shards).items():
            if count > 1:
                problem = f"it has {count} shards of {name}"
                yield Fault(f"model_worker.{index}", problem, "a worker has one of each model")
    if len({worker.base_seed for worker in config.model_worker}) > 1:
        yield Fault("model_worker", "the workers have different base_seeds", "give all of them one")
    if len(config.master_worker) != 1:
        yield Fault("master_worker", f"there are {len(config.master_worker)}", "leave it out: one is made")


def _call_faults(config: ExperimentDescription) -> Faults:
    """Names of calls and roles, methods that interfaces lack, and data that a call cannot make."""
    names = [*config.models(), *(call.model_name for call in config.model_rpcs)]
    for role in dict.fromkeys(name.role for name in names):
        if not is_part(role):
            yield Fault("models", f"{role!r} is no name for a role", PART_RULE)
    for call in config.model_rpcs:
        where, method = f"model_rpcs.{call.name}", call.interface_type.value
        if not is_part(call.name):
            yield Fault("model_rpcs", f"{call.name!r} is no name for a call", PART_RULE)
        if call.output_keys and (call.trains or call.interface_type is ModelInterfaceType.EVALUATE):
            problem = f"it has output_keys, and {method} makes no data"
            yield Fault(where, problem, "leave them out, or use inference")
        cls = INTERFACES.at_hand(call.interface_impl.type_)
        of_ours = isinstance(cls, type) and issubclass(cls, ModelInterface)
        if of_ours and getattr(cls, method) is getattr(ModelInterface, method):
            problem = f"interface {call.interface_impl.type_!r} does not define {method}()"
            yield Fault(where, problem, "define it, or correct interface_type or interface_impl")
        elif of_ours:
            yield from _method_faults(where, call, getattr(cls, method))
        yield from _minibatch_faults(config, call)
        try:
            check_reductions(getattr(cls, "reductions", {}))
        except UsageError as error:
            yield Fault(where, error.problem, error.remedy)


def _method_faults(where: str, call: MFCDef, method: Any) -> Faults:
    """A method of an interface that cannot be called as workers call it."""
    given = (
        ("model", "sample")
        if call.interface_type is ModelInterfaceType.EVALUATE
        else ("model", "sample", "spec")
    )
    try:
        inspect.signature(method).bind(None, *given)
    except TypeError as error:
        name = f"{call.interface_impl.type_!r}: {method.__name__}()"
        remedy = f"write def {method.__name__}(self, {', '.join(given)})"
        yield Fault(where, f"interface {name} is called with {', '.join(given)}: {error}", remedy)


def _minibatch_faults(config: ExperimentDescription, call: MFCDef) -> Faults:
    """More parts of a step than the rank with the most groups has: a part without any would step the optimizer. Other
    ranks may have fewer, as ranks get equally many tokens: a part has groups of some ranks then."""
    parts, shard = call.interface_impl.args.get("minibatches"), config.models().get(call.model_name)
    if not call.trains or not isinstance(parts, int) or shard is None:
        return
    ranks = shard.id.topo.get_dim("data")
    most = -(-call.n_seqs // ranks)
    if parts > most:
        problem = (
            f"minibatches is {parts}, and {call.n_seqs} ids may leave none of {ranks} data-parallel ranks with more "
            f"than {most}"
        )
        yield Fault(f"model_rpcs.{call.name}", problem, "make it smaller, or n_seqs larger")


def _hook_faults(config: ExperimentDescription) -> Faults:
    """Hooks, also those that are added, of models without parameters."""
    empty = [name for name, shard in config.models().items() if shard.backend.type_ == "null"]
    for call in calls_with_hooks(config):
        for hook in call.hooks:
            others = (call.model_name, getattr(hook, "source", None), getattr(hook, "target", None))
            for name in empty:
                if name in others:
                    yield Fault(
                        f"model_rpcs.{call.name}",
                        f"its {type(hook).__name__} needs parameters of {name}, whose backend 'null' has none",
                        "leave the hook out; a role with this backend that is trained has one replica",
                    )


def _model_faults(config: ExperimentDescription) -> Faults:
    models = config.models()
    replicas: dict[str, list[int]] = {}
    for name in models:
        replicas.setdefault(name.role, []).append(name.replica_id)
    for role, ids in replicas.items():
        if ids != [*range(len(ids))]:
            problem = f"its replicas are {ids}"
            yield Fault(f"models.{role}", problem, "number the replicas of a role 0, 1, 2, …")
    for name in models:
        yield from _shard_faults(config, name)
    for call in config.model_rpcs:
        if call.model_name not in models:
            problem = f"no worker has a shard of {call.model_name}"
            yield Fault(f"model_rpcs.{call.name}", problem, f"there are: {_listed(map(str, models))}")
    for call in config.model_rpcs:
        ranks = models[call.model_name].id.topo.get_dim("data") if call.model_name in models else 1
        passes, least = call.mb_spec.n_mbs, call.min_n_seqs_per_pass
        if call.n_seqs < ranks:
            problem = f"n_seqs is {call.n_seqs}, and {call.model_name} has {ranks} data-parallel ranks"
            yield Fault(f"model_rpcs.{call.name}", problem, "make n_seqs larger, or have fewer of them")
        elif call.n_seqs < ranks * passes * least:
            problem = (
                f"n_seqs is {call.n_seqs}, and {ranks} data-parallel ranks with {passes} micro-batches of "
                f"{least:g} at least (min_n_seqs_per_pass) need {ranks * passes * least:g}"
            )
            yield Fault(f"model_rpcs.{call.name}", problem, "make n_seqs larger, or one of these smaller")
    used = {other for call in config.model_rpcs for other in (*call.reads, *call.writes)}
    for name in models:
        if name not in used:
            yield Fault(f"models.{name}", "no call uses it", "leave its shards out")


def _shard_faults(config: ExperimentDescription, name: ModelName) -> Faults:
    where = f"models.{name}"
    mine = [shard for worker in config.model_worker for shard in worker.shards if shard.id.model_name == name]
    topos = list(dict.fromkeys(shard.id.topo for shard in mine))
    if len(topos) > 1:
        problem = f"its shards have different topologies: {'; '.join(map(str, topos))}"
        yield Fault(where, problem, "give all of them one")
        return
    topo, size = topos[0], topos[0].world_size()
    ranks = Counter(shard.id.parallelism_rank for shard in mine)
    if missing := [rank for rank in range(size) if rank not in ranks]:
        shown = f"rank{'s' * (len(missing) > 1)} {show_ranks(missing)}"
        problem = f"its topology {topo} has {size} ranks, and no worker has {shown}"
        yield Fault(where, problem, "give each rank to a worker, or make the topology smaller")
    if twice := [rank for rank, count in sorted(ranks.items()) if count > 1]:
        yield Fault(where, f"several workers have rank {show_ranks(twice)}", "give each rank to one")
    if strange := [rank for rank in sorted(ranks) if not 0 <= rank < size]:
        problem = f"rank {show_ranks(strange)} is not in its topology {topo}"
        yield Fault(where, problem, f"ranks are 0 to {size - 1}")
    for what in ("model", "backend", "eval_dataset"):
        if len({repr(getattr(shard, what)) for shard in mine}) > 1:
            yield Fault(where, f"its shards differ in {what}", "give all of them the same")


def _backend_faults(config: ExperimentDescription) -> Faults:
    """Backends that cannot have their model. Nothing is known of models and backends that are not built in."""
    for name, shard in config.models().items():
        model, backend = shard.model.type_, shard.backend.type_
        if backend == "null" and model == "causal_lm":
            problem = f"its backend 'null' cannot run its model {model!r}"
            yield Fault(f"models.{name}", problem, "use 'ddp', 'fsdp2' or 'inference'")
        elif model == "null" and backend in ("ddp", "fsdp2", "inference"):
            problem = f"its model 'null' has no network for its backend {backend!r}"
            yield Fault(f"models.{name}", problem, "use the backend 'null'")


def _role_faults(config: ExperimentDescription) -> Faults:
    models = config.models()
    trainers: dict[str, list[str]] = {}
    for call in config.model_rpcs:
        if call.trains:
            trainers.setdefault(call.role, []).append(call.name)
            if call.model_name in models and models[call.model_name].backend.type_ == "inference":
                problem = f"it trains {call.model_name}, whose backend is 'inference'"
                yield Fault(f"model_rpcs.{call.name}", problem, "use 'ddp' or 'fsdp2'")
    for role, names in trainers.items():
        if len(names) > 1:
            remedy = "a role has one train_step; use two roles, or one interface that does both"
            yield Fault(f"models.{role}", f"{' and '.join(names)} both train it", remedy)
    for pair in sync_param_pairs(calls_with_hooks(config)):
        if absent := [name for name in pair if name not in models]:
            yield Fault("model_rpcs", f"a ParamReallocHook names {absent[0]}, of which there are no shards")
            continue
        sizes = [models[name].id.topo.get_dim("tensor") for name in pair]
        if max(sizes) % min(sizes):
            problem = f"exchange parameters, and their tensor sizes are {sizes[0]} and {sizes[1]}"
            remedy = "one has to be a multiple of the other"
            yield Fault("model_rpcs", f"{pair[0]} and {pair[1]} {problem}", remedy)


def dataset_keys(config: ExperimentDescription) -> frozenset[str]:
    """The keys that the datasets of an experiment have, or the trajectories of an asynchronous one."""
    if config.gserver_manager:
        return TRAJECTORY_KEYS
    return frozenset().union(*_keys_of_datasets(config).values())


def _keys_of_datasets(config: ExperimentDescription) -> dict[str, frozenset[str]]:
    """The keys of each type of dataset that is in use."""
    types = {each.type_ for worker in config.model_worker for each in worker.datasets}
    return {type_: frozenset(DATASETS.find(type_).keys) for type_ in sorted(types) if type_ in DATASETS}


def _data_faults(config: ExperimentDescription) -> Faults:
    """The datasets are in the workers of the model that is called first, and are the same in all of them. All of them
    have the same keys."""
    if config.gserver_manager:
        return
    made = {key for call in config.model_rpcs for key in call.output_keys}
    first = next((c for c in config.model_rpcs if not any(key in made for key in c.input_keys)), None)
    if first is None:
        return
    model, workers = first.model_name, config.model_worker
    wanted = {n for n, each in enumerate(workers) if any(s.id.model_name == model for s in each.shards)}
    there = {index for index, worker in enumerate(workers) if worker.datasets}
    if wanted - there:
        lacking = f"the workers {show_ranks(sorted(wanted - there))} of {model} have no datasets"
        remedy = "give the same datasets to all workers of that model"
        yield Fault("model_worker", f"{first.name} begins with data, and {lacking}", remedy)
    if len({repr(workers[index].datasets) for index in wanted & there}) > 1:
        yield Fault("model_worker", f"the workers of {model} have different datasets", "give all the same")
    keys = _keys_of_datasets(config)
    if len(set(keys.values())) > 1:
        each = "; ".join(f"{type_}: {', '.join(sorted(some))}" for type_, some in keys.items())
        yield Fault("model_worker", f"datasets have different keys: {each}", "use those of one kind")


def _tokenizer_faults(config: ExperimentDescription) -> Faults:
    """Built-in datasets of model workers that have no tokenizer. Those of rollout workers have another one."""
    if config.model_worker[0].tokenizer_name_or_path:
        return
    for where, dataset in _datasets(config):
        unread = config.gserver_manager and where.startswith("datasets.")
        if DATASETS.at_hand(dataset.type_) in OF_TEXT and not unread:
            problem = (
                f"dataset {dataset.type_!r} makes tokens of text, and there is no tokenizer_name_or_path"
            )
            yield Fault(where, problem, "give model workers the tokenizer of the model")


def _evaluation_faults(config: ExperimentDescription) -> Faults:
    control, evaluator = config.exp_ctrl, config.evaluator
    if control.every("eval") and not any(s.eval_dataset for w in config.model_worker for s in w.shards):
        problem = "an eval_freq_… is set, and no shard has an eval_dataset"
        yield Fault("exp_ctrl", problem, "give Allocation(…, eval_dataset=…), or leave eval_freq_… out")
    evaluated = {name for name, shard in config.models().items() if shard.eval_dataset is not None}
    for call in config.model_rpcs:
        chosen, scored = call.interface_impl, call.trains and call.model_name in evaluated
        if scored and chosen.type_ == "decoupled_grpo" and not chosen.args.get("reward"):
            problem = f"{call.model_name} has an eval_dataset, and nothing scores its answers"
            remedy = "give the interface reward='package.module:function'"
            yield Fault(f"model_rpcs.{call.name}", problem, remedy)
    if not config.auto_eval:
        return
    if evaluator.dataset is None or evaluator.dataset.type_ not in DATASETS:
        yield Fault("evaluator.dataset", "there is none to evaluate on", "give a registered dataset")
    if not control.every("save"):
        yield Fault("evaluator", "models are saved at the end only", "give exp_ctrl a save_freq_…")
    trained, role = [call.role for call in config.model_rpcs if call.trains], evaluator.role
    if (role and role not in trained) or (not role and len(trained) != 1):
        problem = f"it is {role!r}, and trained are: {_listed(trained)}"
        yield Fault("evaluator.role", problem, "name one of them")


def _listed(names: Any) -> str:
    return ", ".join(names) or "none"


# Checks of generation servers, of what sends requests to them, and of what makes trajectories.

SERVER_BACKENDS = ("builtin", "vllm")
"""Backends of a generation server: the kinds of engines that take weights."""

POLICIES = ("round_robin", "least_requests", "least_token_usage")
"""Policies by which a manager chooses the server of a request."""


def _serving_faults(config: ExperimentDescription) -> Faults:
    """Generation servers, their manager, and rollout workers."""
    servers, managers, rollouts = config.generation_server, config.gserver_manager, config.rollout_worker
    if (servers or managers) and len(managers) != 1:
        yield Fault("gserver_manager", f"there are {len(managers)}", "generation servers have one manager")
    if managers and not rollouts:
        yield Fault("rollout_worker", "there are none, and a gserver_manager", "add rollout workers")
    for call in config.model_rpcs if managers else ():
        if call.interface_type is ModelInterfaceType.GENERATE:
            problem = "it generates, and there is a gserver_manager"
            yield Fault(
                f"model_rpcs.{call.name}", problem, "leave it out: trajectories come from rollout workers"
            )
    if rollouts and not managers:
        yield Fault("rollout_worker", "there is no gserver_manager to ask", "add one, and its servers")
    for index, server in enumerate(servers):
        yield from _server_faults(f"generation_server.{index}", server)
    if len({(server.backend_type, server.model_path, server.tp_size) for server in servers}) > 1:
        problem = "they differ in backend_type, model_path or tp_size"
        yield Fault("generation_server", problem, "give all servers the same")
    for manager in managers:
        yield from _manager_faults(config, manager)
    for index, rollout in enumerate(rollouts):
        yield from _rollout_faults(f"rollout_worker.{index}", rollout, managers)


def _server_faults(where: str, server: GenerationServer) -> Faults:
    yield from _too_small(where, server, "tp_size")
    yield from _not_among(f"{where}.backend_type", server.backend_type, SERVER_BACKENDS)
    if server.backend_type == "builtin" and server.tp_size > 1:
        yield Fault(f"{where}.tp_size", "a built-in server has one device", "1, or backend_type='vllm'")
    if not isinstance(server.backend_args, Mapping | None):
        problem = f"it is a {type(server.backend_args).__name__}"
        yield Fault(f"{where}.backend_args", problem, "give a dict of the server's options, by name")
    elif not isinstance((server.backend_args or {}).get("clear_cache", True), bool):
        yield Fault(f"{where}.backend_args", "clear_cache is no bool", "give True or False")
    if not server.model_path:
        yield Fault(f"{where}.model_path", "it is empty", "give a path, or a name of Hugging Face's")


def _manager_faults(config: ExperimentDescription, manager: GserverManager) -> Faults:
    where, servers, size = "gserver_manager", len(config.generation_server), manager.train_batch_size
    if manager.n_servers != servers:
        problem = f"n_servers is {manager.n_servers}, and there are {servers} generation servers"
        yield Fault(where, problem, "make both the same")
    roles = {call.role for call in config.model_rpcs if call.trains}
    if manager.model_name.role not in roles:
        problem = f"it serves {manager.model_name}, whose role is not trained"
        yield Fault(where, problem, f"trained are: {_listed(sorted(roles))}")
    yield from _too_small(
        where, manager, "train_batch_size", "flush_request_timeout", "max_concurrent_rollouts"
    )
    yield from _not_among(f"{where}.schedule_policy", manager.schedule_policy, POLICIES)
    sizes = sorted({call.n_seqs for call in config.model_rpcs})
    if size >= 1 and size not in sizes:
        problem = f"it is {size}, and calls have n_seqs {', '.join(map(str, sizes))}"
        yield Fault(f"{where}.train_batch_size", problem, "make both the same")
    if manager.max_head_offpolicyness < 0:
        yield Fault(f"{where}.max_head_offpolicyness", "it is negative", "0: on policy")


def _rollout_faults(where: str, rollout: RolloutWorker, managers: list[GserverManager]) -> Faults:
    if managers and rollout.model_name != managers[0].model_name:
        yield Fault(where, f"it asks for {rollout.model_name}", f"{managers[0].model_name} is served")
    if not rollout.datasets:
        yield Fault(where, "it has no datasets", "give it at least one")
    if not rollout.tokenizer_path:
        yield Fault(f"{where}.tokenizer_path", "it is empty", "give the tokenizer of the model")
    elif why := _unknown_tokenizer(rollout.tokenizer_path):
        yield Fault(f"{where}.tokenizer_path", why, TOKENIZER_RULE)
    for each in rollout.datasets:
        yield from _unregistered(where, DATASETS, each.type_)
    yield from _unregistered(where, AGENTS, rollout.agent.type_)
    yield from _unregistered(where, ENVIRONMENTS, rollout.env.type_)
    yield from _too_small(where, rollout, "new_tokens_per_chunk", "rollout_request_timeout")


def _too_small(where: str, value: Any, *names: str) -> Faults:
    for name in names:
        if getattr(value, name) < 1:
            yield Fault(f"{where}.{name}", f"{getattr(value, name)}", "it is 1 or more")


def _not_among(where: str, value: str, choices: Collection[str]) -> Faults:
    if value not in choices:
        yield Fault(where, f"{value!r}", f"it is one of {', '.join(choices)}")


def _unregistered(where: str, registry: Registry[Any], type_: str) -> Faults:
    if type_ not in registry:
        problem = f"no {registry.kind} is registered as {type_!r}"
        yield Fault(where, problem, f"there are: {_listed(registry.names())}")


# Checks of what is registered, and of its arguments.

BUILT_IN = ("ddp", "fsdp2", "inference", "null")
"""Backends that check the values of their arguments when they are made, which costs nothing."""


def _registry_faults(config: ExperimentDescription) -> Faults:
    wanted: dict[tuple[Registry[Any], str], str] = {}
    for call in config.model_rpcs:
        wanted[INTERFACES, call.interface_impl.type_] = f"model_rpcs.{call.name}"
    for index, worker in enumerate(config.model_worker):
        where = f"model_worker.{index}"
        for shard in worker.shards:
            wanted[MODELS, shard.model.type_] = wanted[BACKENDS, shard.backend.type_] = where
            if shard.eval_dataset is not None:
                wanted[DATASETS, shard.eval_dataset.type_] = where
        wanted |= dict.fromkeys(((DATASETS, dataset.type_) for dataset in worker.datasets), where)
    for (registry, type_), where in wanted.items():
        yield from _unregistered(where, registry, type_)


def _argument_faults(config: ExperimentDescription) -> Faults:
    """Faults of the arguments of registered classes and functions: unknown ones, and missing ones."""
    for where, registry, chosen in _named(config):
        if chosen.type_ not in registry:
            continue
        ours = chosen.type_ in {"backend": BUILT_IN, "model": ("causal_lm", "null")}.get(registry.kind, ())
        # Users' classes that are registered by a string are not imported here, as that may be slow.
        make = registry.find(chosen.type_) if ours else registry.at_hand(chosen.type_)
        if make is None:
            continue
        told = f"{registry.kind} {chosen.type_!r}"
        fault = _signature_fault(where, told, make, chosen, 1 if registry in (MODELS, DATASETS) else 0)
        if fault is None and registry is BACKENDS and ours:
            try:
                make(**chosen.args)
            except UsageError as error:
                fault = Fault(where, f"{told}: {error.problem}", error.remedy)
            except (TypeError, ValueError) as error:
                fault = Fault(where, f"{told}: {error}", "correct its arguments")
        if fault is not None:
            yield fault


def _named(config: ExperimentDescription) -> Iterator[tuple[str, Registry[Any], Abstraction]]:
    """Each named object once: its place in the configuration, its registry, and its name with the arguments."""
    for call in config.model_rpcs:
        yield f"model_rpcs.{call.name}", INTERFACES, call.interface_impl
    for name, shard in config.models().items():
        yield f"models.{name}", MODELS, shard.model
        yield f"models.{name}", BACKENDS, shard.backend
    for where, dataset in _datasets(config):
        yield where, DATASETS, dataset
    for index, rollout in enumerate(config.rollout_worker):
        where = f"rollout_worker.{index}"
        yield f"{where}.agent", AGENTS, rollout.agent
        yield f"{where}.env", ENVIRONMENTS, rollout.env
        for dataset in rollout.datasets:
            yield f"{where}.datasets", DATASETS, dataset


def _datasets(config: ExperimentDescription) -> Iterator[tuple[str, Abstraction]]:
    worker = next((worker for worker in config.model_worker if worker.datasets), None)
    for at, dataset in enumerate(worker.datasets if worker is not None else ()):
        yield f"datasets.{at}", dataset
    for name, shard in config.models().items():
        if shard.eval_dataset is not None:
            yield f"models.{name}.eval_dataset", shard.eval_dataset
    if config.auto_eval and config.evaluator.dataset is not None:
        yield "evaluator.dataset", config.evaluator.dataset


def _signature_fault(where: str, told: str, make: Any, chosen: Abstraction, first: int) -> Fault | None:
    """The error that calling `make` with these arguments, after `first` others, would raise."""
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        return None
    more = inspect.Parameter.VAR_KEYWORD
    takes = [name for name in [*signature.parameters][first:] if signature.parameters[name].kind != more]
    try:
        signature.bind(*[None] * first, **chosen.args)
        if is_of_rows(make):
            # Its other arguments say where the rows are.
            source = {name: value for name, value in chosen.args.items() if name not in takes}
            takes += [*_SOURCE.parameters][2:]
            _SOURCE.bind("", {}, **source)
    except TypeError as error:
        problem = f"{told} cannot be made with these arguments: {error}"
        return Fault(where, problem, f"it takes: {_listed(takes)}")
    return None


_SOURCE = inspect.signature(read_rows)


# Checks of the files of a trial on this host.


def file_faults(config: ExperimentDescription) -> list[Fault]:
    """Libraries of trackers, files and directories that a trial needs and that are not on this host, held-out data that
    is too small, and more new tokens than networks have positions."""
    return [*tracker_faults(config), *_file_faults(config), *_length_faults(config)]


def _file_faults(config: ExperimentDescription) -> Faults:
    tokenizer = config.model_worker[0].tokenizer_name_or_path
    if tokenizer and (why := _unknown_tokenizer(tokenizer)):
        yield Fault("tokenizer_name_or_path", why, TOKENIZER_RULE)
    for where, dataset in _datasets(config):
        if not _has_rows(dataset):
            continue
        given = [name for name in ("path", "hugging_face", "rows") if dataset.args.get(name)]
        if len(given) != 1:
            problem = f"it has {' and '.join(given) or 'none'} of path, hugging_face and rows"
            yield Fault(where, problem, "give one of them")
        elif given == ["path"]:
            yield from _unreadable(where, dataset.args["path"])
    for name, shard in config.models().items():
        if shard.model.type_ == "causal_lm":
            if (path := shard.model.args.get("path")) and (why := _absent(str(path))):
                yield Fault(f"models.{name}", why, "give a path, or a name of Hugging Face's hub")
            if weights := shard.model.args.get("weights"):
                is_directory = isinstance(weights, str) and os.path.isdir(weights)
                file = os.path.join(weights, FILE) if is_directory else weights
                yield from _unreadable(f"models.{name}", file)
        ranks = shard.id.topo.get_dim("data")
        count = _first_rows(shard.eval_dataset, ranks) if shard.eval_dataset is not None else None
        if count is not None and count < ranks:
            problem = f"it has {count} samples, and the model has {ranks} data-parallel ranks"
            yield Fault(f"models.{name}.eval_dataset", problem, "make it larger")


TOKENIZER_RULE = "give a path, a name of Hugging Face's, or a registered one"
"""The remedy for a wrong tokenizer."""


def _unknown_tokenizer(name: str) -> str:
    """The problem of a tokenizer that cannot be: empty for one that is registered, is there, or may be on the hub."""
    return "" if name in TOKENIZERS else _absent(name)


def _absent(name: str) -> str:
    """The problem of a path that does not exist; empty if it exists, or may be a name on Hugging Face's hub."""
    path = Path(name).expanduser()
    is_path = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
    return f"there is no {path}" if is_path and not path.exists() else ""


def _has_rows(dataset: Abstraction) -> bool:
    return dataset.type_ in DATASETS and is_of_rows(DATASETS.find(dataset.type_))


def _unreadable(where: str, name: Any) -> Faults:
    """A fault if the file cannot be read."""
    try:
        with Path(name).open("rb") as file:
            file.read(1)
    except (OSError, TypeError) as error:
        why = (error.strerror or "").lower() if isinstance(error, OSError) else str(error)
        shown = os.path.abspath(name) if isinstance(name, str) else repr(name)
        yield Fault(where, f"{shown} cannot be read: {why}")


def _first_rows(dataset: Abstraction, most: int) -> int | None:
    """The number of rows of a dataset, `most` at most; None when only making the dataset would tell."""
    if not _has_rows(dataset):
        return None
    if rows := dataset.args.get("rows"):
        return min(len(rows), most)
    try:
        with Path(dataset.args.get("path") or "").open("rb") as file:
            return len([*islice((line for line in file if line.strip()), most)])
    except (OSError, TypeError):
        return None


def _length_faults(config: ExperimentDescription) -> Faults:
    """Faults of calls that make more new tokens than their network has positions, whatever the prompt."""
    for call, _, new, positions in _lengths(config):
        if new > positions:
            has = f"and {call.model_name} has {positions} positions"
            problem = f"it makes up to {new} new tokens (max_new_tokens), {has}"
            remedy = "make max_new_tokens smaller, or give a network with more positions"
            yield Fault(f"model_rpcs.{call.name}", problem, remedy)


def length_warnings(config: ExperimentDescription) -> list[Fault]:
    """Warnings for sequences that may be longer than their network has positions. A dataset only cuts at its
    ``max_length``: all of its samples may be shorter."""
    found = []
    for call, prompt, new, positions in _lengths(config):
        if new <= positions < prompt + new:
            more = f" and {new} new ones (max_new_tokens)" if new else ""
            has = f"and {call.model_name} has {positions} positions"
            problem = f"sequences may have {prompt} tokens (max_length){more}, {has}"
            remedy = "make them shorter, or give a network with more positions"
            found.append(Fault(f"model_rpcs.{call.name}", problem, remedy))
    return found


def _lengths(config: ExperimentDescription) -> Iterator[tuple[MFCDef, int, int, int]]:
    """For each call whose network has a known number of positions: the longest prompt, the most new tokens
    (each 0 where the configuration does not say it), and that number."""
    models = config.models()
    datasets = [each for worker in config.model_worker for each in worker.datasets]
    for call in config.model_rpcs:
        shard = models.get(call.model_name)
        if shard is None or shard.model.type_ != "causal_lm":
            continue
        positions = _positions(shard.model.args)
        if positions is None:
            continue
        generates = call.interface_type is ModelInterfaceType.GENERATE
        new = (_new_tokens(call.interface_impl.args) or 0) if generates else 0
        yield call, max([0, *map(_max_length, [*datasets, *_held_out(config, call, shard)])]), new, positions


def _held_out(config: ExperimentDescription, call: MFCDef, shard: Any) -> Iterator[Abstraction]:
    """The data on which the model of a call that trains is evaluated."""
    evaluator = config.evaluator
    if call.trains and shard.eval_dataset is not None:
        yield shard.eval_dataset
    if (
        call.trains
        and config.auto_eval
        and evaluator.dataset is not None
        and evaluator.role in ("", call.role)
    ):
        yield evaluator.dataset


def _max_length(dataset: Abstraction) -> int:
    """The length at which a dataset cuts its samples, as far as its arguments say so; 0 otherwise."""
    found = dataset.args.get("max_length")
    ours = is_of_rows(DATASETS.at_hand(dataset.type_))
    return found if ours and isinstance(found, int) else 0


def _positions(args: Mapping[str, Any]) -> int | None:
    """The positions of a network, as far as its arguments or the files of its directory say so."""
    config: Any = args.get("config") or {}
    if path := args.get("path"):
        try:
            config = json.loads(Path(path, "config.json").read_bytes())
        except (OSError, ValueError):
            return None
    found = config.get("max_position_embeddings") if isinstance(config, Mapping) else None
    return found if isinstance(found, int) else None


def _new_tokens(args: Mapping[str, Any]) -> int | None:
    """``max_new_tokens`` among the arguments of an interface, or in a mapping or a `GenerationConfig` there."""
    for name, value in args.items():
        inner = (
            value
            if isinstance(value, Mapping)
            else {"max_new_tokens": getattr(value, "max_new_tokens", None)}
        )
        found = value if name == "max_new_tokens" else inner.get("max_new_tokens")
        if isinstance(found, int):
            return found
    return None


# Checks of networks of transformers against their layouts, which the command makes before a trial starts.
#
# They import transformers and run small networks, which takes seconds. So a network that was found to be right is
# noted, and is not tried again with the same versions. Workers make the same checks, as another host may have no note.


def network_faults(config: ExperimentDescription) -> tuple[list[Fault], list[Fault]]:
    """Faults of networks that cannot have their layout, and faults of networks that cannot be read on this
    host, as other hosts may have their files. Models that are not built in are not checked."""
    found: list[Fault] = []
    absent: list[Fault] = []
    for name, shard in config.models().items():
        if shard.model.type_ == "causal_lm":
            try:
                found += faults_of(f"models.{name}", shard.id.topo, shard.model.args)
            except SpecError as error:
                of_this_host = shard.model.args.get("path") or isinstance(error.__cause__, ImportError)
                (absent if of_this_host else found).extend(error.faults)
    return found, absent


def faults_of(where: str, topo: ProcessTopology, arguments: Mapping[str, Any]) -> list[Fault]:
    """The reasons why a `causal_lm` with these `arguments` cannot have this layout; nothing for one that was
    noted. Raises `SpecError` when its configuration cannot be read."""
    digest = _digest(arguments, topo)
    note = unirun_home() / "networks" / digest if digest else None
    if note is not None and note.exists():
        return []
    from unirun.experiments.models.stage import network_faults

    faults = network_faults(where, topo, arguments)
    if note is not None and not faults:
        try:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()
        except OSError as error:
            report(f"unirun: {note} cannot be written, so networks are tried at each start: {error}")
    return faults


def _digest(arguments: Mapping[str, Any], topo: ProcessTopology) -> str:
    """The same for equal networks, layouts and versions; empty when its configuration or transformers is not here."""
    path = arguments.get("path")
    own = Path(str(path), "config.json") if path else None
    try:
        about = own.read_text() if own is not None else json.dumps(arguments.get("config"), sort_keys=True)
        versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    except (OSError, TypeError, ValueError, importlib.metadata.PackageNotFoundError):
        return ""
    sources = [file.read_text() for file in sorted((Path(__file__).parent / "models").glob("*.py"))]
    sizes = [topo.get_dim("pipe"), topo.get_dim("tensor"), bool(arguments.get("critic"))]
    return hashlib.sha256(json.dumps([about, sizes, versions, sources]).encode()).hexdigest()
