"""Checks of generation servers, of what sends requests to them, and of what makes trajectories."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unirun.errors import Fault
from unirun.experiments import derive
from unirun.experiments.registry import DATASETS

if TYPE_CHECKING:
    from unirun.experiments.config import ExperimentConfig


BACKENDS = ("sglang", "torch", "vllm")
"""Backends of a generation server."""

POLICIES = ("round_robin", "least_requests", "least_token_usage")
"""Policies by which a manager chooses the server of a request."""


def serving_faults(config: ExperimentConfig) -> list[Fault]:
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
        if server.backend_type not in BACKENDS:
            there = ", ".join(BACKENDS)
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
