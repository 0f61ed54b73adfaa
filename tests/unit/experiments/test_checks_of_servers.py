"""Faults of generation servers, of what sends requests to them, and of what makes trajectories."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from tests.unit.experiments.sample_configs import (
    ACTOR,
    COPY,
    GENERATE,
    PROMPTS,
    TRAIN,
    at,
    call,
    config_of,
    faults_of,
    texts_of,
)
from unirun.experiments.config import (
    AgentAbstraction,
    DatasetAbstraction,
    EnvServiceAbstraction,
    GenerationServer,
    GserverManager,
    RolloutWorker,
    model_workers,
    register_agent,
)
from unirun.experiments.experiment import ExperimentConfig
from unirun.experiments.graph import ModelInterfaceAbstraction, ModelName, topology


class Silent:
    """An agent that no test runs."""

    def __init__(self, *, turns: int = 1) -> None: ...


register_agent("tests-agent", Silent)


def only(config: ExperimentConfig) -> str:
    """The only fault."""
    (fault,) = texts_of(faults_of(config))
    return fault


def manager(**changes: Any) -> GserverManager:
    return replace(GserverManager(ACTOR, 1, "round_robin", 0, 8, 10, 4), **changes)


def rollout(**changes: Any) -> RolloutWorker:
    env, agent = EnvServiceAbstraction("null"), AgentAbstraction("tests-agent")
    return replace(RolloutWorker(1, ACTOR, "letters", 8, 10, env, agent, [PROMPTS]), **changes)


def with_servers(
    servers: int = 1,
    managers: list[GserverManager] | None = None,
    rollouts: list[RolloutWorker] | None = None,
    tp_size: int = 1,
) -> ExperimentConfig:
    # With a manager the data are those of trajectories.
    key = "prompt" if managers == [] else "rewards"
    config = config_of([call("train", [key], kind=TRAIN)], {ACTOR: at()})
    config.generation_server = [GenerationServer(1, "builtin", {}, "model", tp_size)] * servers
    config.gserver_manager = [manager()] if managers is None else managers
    config.rollout_worker = [rollout()] if rollouts is None else rollouts
    return config


def test_a_server_a_manager_and_a_worker_are_right() -> None:
    assert [*faults_of(with_servers())] == []


def test_a_text_is_the_name_of_the_first_replica() -> None:
    config = with_servers(managers=[manager(model_name="actor")], rollouts=[rollout(model_name="actor")])
    assert [*faults_of(config)] == []


def test_more_parts_of_a_step_than_groups_and_held_out_data_that_nothing_scores() -> None:
    config = with_servers()
    policy = ModelInterfaceAbstraction("decoupled_grpo", {"minibatches": 5})
    config.model_rpcs = [structs.replace(config.model_rpcs[0], interface_impl=policy)]
    config.model_worker = model_workers(
        {ACTOR: replace(at(topology(data=2)), eval_dataset=PROMPTS)}, tokenizer="letters"
    )
    assert texts_of(faults_of(config)) == [
        "model_rpcs.train: minibatches is 5, and 8 ids may leave none of 2 data-parallel ranks with more than 4",
        "model_rpcs.train: actor@0 has an eval_dataset, and nothing scores its answers",
    ]


@pytest.mark.parametrize(("count", "ranks"), [(8, 1), (8, 2), (8, 3), (7, 2), (3, 3)])
def test_a_step_has_as_many_parts_as_the_rank_with_the_most_groups(count: int, ranks: int) -> None:
    config = with_servers(managers=[manager(train_batch_size=count)])
    config.model_worker = model_workers({ACTOR: at(topology(data=ranks))}, tokenizer="letters")
    most = -(-count // ranks)
    found = []
    for parts in (most, most + 1):
        policy = ModelInterfaceAbstraction("decoupled_grpo", {"minibatches": parts})
        config.model_rpcs = [structs.replace(config.model_rpcs[0], interface_impl=policy, n_seqs=count)]
        found.append(["minibatches" in each for each in texts_of(faults_of(config))])
    assert found == [[], [True]]


def test_model_workers_whose_datasets_are_ignored_need_no_tokenizer() -> None:
    config = with_servers()
    prompts = DatasetAbstraction("prompt", {"rows": [{"prompt": "a"}]})
    config.model_worker = model_workers({ACTOR: at()}, datasets=[prompts])
    assert [*faults_of(config)] == []


def test_a_tokenizer_that_is_not_there() -> None:
    config = with_servers(rollouts=[rollout(tokenizer_path="./none")])
    assert only(config) == "rollout_worker.0.tokenizer_path: there is no none"


def test_servers_without_a_manager() -> None:
    assert only(with_servers(managers=[], rollouts=[])) == "gserver_manager: there are 0"


def test_workers_without_servers() -> None:
    config = with_servers(servers=0, managers=[])
    assert only(config) == "rollout_worker: there is no gserver_manager to ask"


def test_another_number_of_servers_than_the_manager_has() -> None:
    config = with_servers(servers=2)
    assert only(config) == "gserver_manager: n_servers is 1, and there are 2 generation servers"


def test_a_model_that_no_worker_has() -> None:
    nobody = ModelName("nobody")
    config = with_servers(managers=[manager(model_name=nobody)], rollouts=[rollout(model_name=nobody)])
    assert only(config) == "gserver_manager: it serves nobody@0, whose role is not trained"


def test_a_worker_that_asks_for_another_model() -> None:
    config = with_servers(rollouts=[rollout(model_name=COPY)])
    assert only(config) == "rollout_worker.0: it asks for actor@1"


def test_agents_and_environments_are_registered_and_take_their_arguments() -> None:
    config = with_servers(
        rollouts=[rollout(env=EnvServiceAbstraction("tests-missing"), agent=AgentAbstraction("tests-nobody"))]
    )
    assert texts_of(faults_of(config)) == [
        "rollout_worker.0: no agent is registered as 'tests-nobody'",
        "rollout_worker.0: no environment is registered as 'tests-missing'",
    ]
    config = with_servers(rollouts=[rollout(agent=AgentAbstraction("tests-agent", {"rounds": 2}))])
    assert "rounds" in only(config)


def test_numbers_that_are_none_are_told_at_once() -> None:
    config = with_servers(
        managers=[manager(train_batch_size=0, max_head_offpolicyness=-1)],
        rollouts=[rollout(new_tokens_per_chunk=0, datasets=[DatasetAbstraction("tests-missing")])],
        tp_size=0,
    )
    assert texts_of(faults_of(config)) == [
        "generation_server.0.tp_size: 0",
        "gserver_manager.train_batch_size: 0",
        "gserver_manager.max_head_offpolicyness: it is negative",
        "rollout_worker.0: no dataset is registered as 'tests-missing'",
        "rollout_worker.0.new_tokens_per_chunk: 0",
    ]


def test_what_servers_managers_and_workers_lack_is_told_at_once() -> None:
    config = with_servers(
        managers=[manager(schedule_policy="fair", train_batch_size=4)],
        rollouts=[rollout(datasets=[], tokenizer_path="")],
    )
    config.generation_server = [GenerationServer(1, "engine", {}, "", 1)]
    assert texts_of(faults_of(config)) == [
        "generation_server.0.backend_type: 'engine'",
        "generation_server.0.model_path: it is empty",
        "gserver_manager.schedule_policy: 'fair'",
        "gserver_manager.train_batch_size: it is 4, and calls have n_seqs 8",
        "rollout_worker.0: it has no datasets",
        "rollout_worker.0.tokenizer_path: it is empty",
    ]


def test_a_built_in_server_has_one_device_and_options_are_a_dict() -> None:
    config = with_servers(tp_size=2)
    assert only(config) == "generation_server.0.tp_size: a built-in server has one device"
    config.generation_server = [GenerationServer(1, "vllm", ["--seed"], "model", 2)]
    assert only(config) == "generation_server.0.backend_args: it is a list"
    config.generation_server = [GenerationServer(1, "vllm", {"clear_cache": "no"}, "model", 2)]
    assert only(config) == "generation_server.0.backend_args: clear_cache is no bool"


def test_servers_of_one_model_that_differ() -> None:
    config = with_servers(servers=2, managers=[manager(n_servers=2)])
    config.generation_server[1] = replace(config.generation_server[0], model_path="other")
    assert only(config) == "generation_server: they differ in backend_type, model_path or tp_size"


def test_a_manager_without_servers_is_right_and_without_rollout_workers_it_is_not() -> None:
    assert [*faults_of(with_servers(servers=0, managers=[manager(n_servers=0)]))] == []
    config = with_servers(rollouts=[])
    assert only(config) == "rollout_worker: there are none, and a gserver_manager"


def test_a_call_that_generates_and_a_key_that_trajectories_do_not_have() -> None:
    config = with_servers()
    config.model_rpcs = [
        call("gen", ["rewards"], ["tokens"], kind=GENERATE),
        call("train", ["tokens", "prompt"], kind=TRAIN),
    ]
    assert texts_of(faults_of(config)) == [
        "model_rpcs.train: nothing makes 'prompt': neither a call nor the dataset",
        "model_rpcs.gen: it generates, and there is a gserver_manager",
    ]
