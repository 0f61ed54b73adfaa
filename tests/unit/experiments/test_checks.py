"""All that can be wrong with the workers, models and data of an experiment; `test_graph` has the faults of calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.unit.experiments.sample_configs import (
    ACTOR,
    BACKEND,
    COPY,
    CRITIC,
    GENERATE,
    NETWORK,
    PROMPTS,
    TRAIN,
    at,
    call,
    config_of,
    config_with,
    faults_of,
    ppo,
    realloc,
    texts_of,
)
from unirun.errors import SpecError
from unirun.experiments.checks import dataset_keys, faults
from unirun.experiments.config import (
    AutomaticEvaluator,
    DatasetAbstraction,
    ExperimentSaveEvalControl,
    MasterWorker,
    ModelAbstraction,
    ModelBackendAbstraction,
    StandaloneModelShardAbstraction,
    model_workers,
)
from unirun.experiments.experiment import ExperimentConfig
from unirun.experiments.graph import (
    MFCDef,
    ModelInterfaceAbstraction,
    ModelName,
    ModelShardID,
    ParamReallocHook,
    ProcessTopology,
    topology,
)


def sft(data: int = 1) -> ExperimentConfig:
    """One call that trains one model."""
    return config_of([call("train", ["prompt"], kind=TRAIN)], {ACTOR: at(topology(data=data))})


def shard(name: ModelName, topo: ProcessTopology, rank: int) -> StandaloneModelShardAbstraction:
    return StandaloneModelShardAbstraction(ModelShardID(name, topo, rank), NETWORK, BACKEND)


def only(config: ExperimentConfig) -> str:
    """The only fault."""
    (fault,) = texts_of(faults_of(config))
    return fault


@pytest.mark.parametrize("separate", [False, True])
def test_an_experiment_that_is_right_has_no_faults(separate: bool) -> None:
    assert faults(ppo(separate=separate)) == []


class TestWorkers:
    def test_no_model_workers_are_a_fault(self) -> None:
        assert only(config_with([call("a")], ())) == "model_worker: there are no model workers"

    def test_a_worker_has_two_shards_of_a_model(self) -> None:
        config = sft(data=2)
        config.model_worker[0].shards += config.model_worker.pop().shards
        assert "model_worker.0: it has 2 shards of actor@0" in texts_of(faults_of(config))

    def test_there_are_two_masters(self) -> None:
        config = sft()
        config.master_worker.append(MasterWorker(1, config.exp_ctrl, 1))
        assert only(config) == "master_worker: there are 2"

    def test_one_master_is_made(self) -> None:
        config = sft(data=3)
        assert config.master_worker == [MasterWorker(1, config.exp_ctrl, 3)]


class TestTopologies:
    def test_no_worker_has_some_of_the_ranks(self) -> None:
        config = sft(data=4)
        del config.model_worker[1:3]
        assert only(config) == (
            "models.actor@0: its topology pipe 1 × data 4 × tensor 1 has 4 ranks, and no worker has ranks 1-2"
        )

    def test_two_workers_have_one_rank(self) -> None:
        config = sft(data=2)
        config.model_worker.append(replace(config.model_worker[1]))
        assert only(config) == "models.actor@0: several workers have rank 1"

    @pytest.mark.parametrize("rank", [2, -1])
    def test_a_rank_is_outside_the_topology(self, rank: int) -> None:
        config, topo = sft(data=2), topology(data=2)
        config.model_worker.append(replace(config.model_worker[0], shards=[shard(ACTOR, topo, rank)]))
        assert only(config) == (
            f"models.actor@0: rank {rank} is not in its topology pipe 1 × data 2 × tensor 1"
        )

    def test_shards_have_different_topologies(self) -> None:
        config = sft(data=2)
        config.model_worker[1].shards = [shard(ACTOR, topology(tensor=2), 1)]
        assert only(config) == (
            "models.actor@0: its shards have different topologies: "
            "pipe 1 × data 2 × tensor 1; pipe 1 × data 1 × tensor 2"
        )

    def test_shards_are_of_different_models_or_backends(self) -> None:
        config = sft(data=2)
        config.model_worker[1].shards[0].model = ModelAbstraction(NETWORK.type_, {"layers": 3})
        config.model_worker[1].shards[0].backend = ModelBackendAbstraction(BACKEND.type_, {"lr": 1.0})
        assert texts_of(faults_of(config)) == [
            "models.actor@0: its shards differ in model",
            "models.actor@0: its shards differ in backend",
        ]

    def test_there_are_more_data_parallel_ranks_than_sequences(self) -> None:
        config = config_of([call("train", ["prompt"], kind=TRAIN, n_seqs=2)], {ACTOR: at(topology(data=3))})
        assert only(config) == "model_rpcs.train: n_seqs is 2, and actor@0 has 3 data-parallel ranks"

    def test_a_model_is_trained_whose_backend_only_runs_it(self) -> None:
        config = sft()
        config.model_worker[0].shards[0].backend = ModelBackendAbstraction("inference")
        assert only(config) == "model_rpcs.train: it trains actor@0, whose backend is 'inference'"

    def test_workers_draw_from_different_seeds(self) -> None:
        config = sft(data=2)
        config.model_worker[1].base_seed = 7
        assert only(config) == "model_worker: the workers have different base_seeds"


class TestModels:
    def test_replicas_are_not_numbered_from_0(self) -> None:
        config = config_of([call("a", ["prompt"], model=COPY)], {COPY: at()})
        assert only(config) == "models.actor: its replicas are [1]"

    def test_a_number_is_left_out(self) -> None:
        last = ModelName("actor", 2)
        calls = [call("a", ["prompt"]), call("b", ["prompt"], model=last)]
        assert only(config_of(calls, {ACTOR: at(), last: at()})) == "models.actor: its replicas are [0, 2]"

    def test_no_call_uses_a_model(self) -> None:
        config = config_of([call("a", ["prompt"])], {ACTOR: at(), CRITIC: at()})
        assert only(config) == "models.critic@0: no call uses it"

    def test_a_model_that_only_a_hook_names_is_used(self) -> None:
        calls = [call("a", ["prompt"], pre_hooks=(realloc(CRITIC),))]
        assert faults_of(config_of(calls, {ACTOR: at(), CRITIC: at()})) == ()

    def test_the_model_of_a_call_has_no_shards(self) -> None:
        config = config_of([call("a", ["prompt"]), call("b", ["prompt"], model=CRITIC)], {ACTOR: at()})
        (fault,) = faults_of(config)
        assert texts_of([fault]) == ["model_rpcs.b: no worker has a shard of critic@0"]
        assert fault.remedy == "there are: actor@0"

    def test_a_role_has_two_trainers(self) -> None:
        calls = [call("a", ["prompt"], kind=TRAIN), call("b", ["prompt"], kind=TRAIN)]
        assert only(config_of(calls, {ACTOR: at()})) == "models.actor: a and b both train it"


class TestParameters:
    @staticmethod
    def copying(trained: int, other: int) -> ExperimentConfig:
        calls = [
            call("generate", ["prompt"], ["x"], COPY, GENERATE),
            call("train", ["x"], kind=TRAIN),
        ]
        models = {ACTOR: at(topology(tensor=trained)), COPY: at(topology(tensor=other), trained)}
        return config_of(calls, models)

    @pytest.mark.parametrize(("trained", "other"), [(2, 3), (3, 2), (4, 6)])
    def test_of_two_tensor_sizes_neither_is_a_multiple_of_the_other(self, trained: int, other: int) -> None:
        assert only(self.copying(trained, other)) == (
            "model_rpcs: actor@0 and actor@1 exchange parameters, and their tensor sizes are "
            f"{trained} and {other}"
        )

    @pytest.mark.parametrize(("trained", "other"), [(1, 3), (4, 2), (2, 2), (2, 6)])
    def test_multiples_are_right(self, trained: int, other: int) -> None:
        assert faults_of(self.copying(trained, other)) == ()

    @pytest.mark.parametrize(
        "hook", [ParamReallocHook(source=CRITIC), ParamReallocHook(target=CRITIC)], ids=["source", "target"]
    )
    def test_a_hook_names_a_model_without_shards(self, hook: ParamReallocHook) -> None:
        config = config_of([call("a", ["prompt"], post_hooks=(hook,))], {ACTOR: at()})
        assert only(config) == "model_rpcs: a ParamReallocHook names critic@0, of which there are no shards"


class TestNames:
    def test_what_is_not_registered_is_told_with_what_is(self) -> None:
        config = sft()
        (worker,) = config.model_worker
        (only,) = worker.shards
        only.model, only.backend = ModelAbstraction("no-model"), ModelBackendAbstraction("no-backend")
        only.eval_dataset = DatasetAbstraction("no-held-out")
        worker.datasets[0] = DatasetAbstraction("no-dataset")
        absent = ModelInterfaceAbstraction("no-interface")
        config.model_rpcs[0] = msgspec.structs.replace(config.model_rpcs[0], interface_impl=absent)
        found = faults_of(config)
        assert texts_of(found)[:5] == [
            "model_rpcs.train: no interface is registered as 'no-interface'",
            "model_worker.0: no model is registered as 'no-model'",
            "model_worker.0: no backend is registered as 'no-backend'",
            "model_worker.0: no dataset is registered as 'no-held-out'",
            "model_worker.0: no dataset is registered as 'no-dataset'",
        ]
        assert all("tests-" in fault.remedy for fault in found[:5])

    def test_a_name_that_several_workers_use_is_told_once(self) -> None:
        config = sft(data=3)
        for worker in config.model_worker:
            worker.shards[0].model = ModelAbstraction("no-model")
        assert len(faults_of(config)) == 1


class TestDatasets:
    def test_the_workers_of_the_first_call_have_none(self) -> None:
        calls = [call("a", ["prompt"], ["x"]), call("b", ["x"], model=CRITIC)]
        config = config_of(calls, {ACTOR: at(topology(data=3)), CRITIC: at()})
        for worker in config.model_worker[1:]:
            worker.datasets = []
        assert only(config) == (
            "model_worker: a begins with data, and the workers 1-2 of actor@0 have no datasets"
        )

    def test_several_have_the_same_keys(self) -> None:
        others = DatasetAbstraction("tests-answers")
        assert faults_of(config_of([call("a", ["prompt"])], {ACTOR: at()}, [PROMPTS, PROMPTS])) == ()
        config = config_of([call("a", ["prompt"])], {ACTOR: at()}, [PROMPTS, others])
        assert only(config) == (
            "model_worker: datasets have different keys: tests-answers: answer, prompt; tests-prompts: prompt"
        )

    def test_they_have_different_ones(self) -> None:
        config = sft(data=2)
        config.model_worker[1].datasets = [DatasetAbstraction(PROMPTS.type_, {"path": "other"})]
        assert only(config) == "model_worker: the workers of actor@0 have different datasets"

    def test_those_of_workers_that_read_none_are_ignored(self) -> None:
        calls = [call("a", ["prompt"], ["x"]), call("b", ["x"], model=CRITIC)]
        config = config_of(calls, {ACTOR: at(topology(data=2)), CRITIC: at(first=2)})
        assert faults_of(config) == ()
        config.model_worker[2].datasets = [DatasetAbstraction(PROMPTS.type_, {"path": "other"})]
        assert faults_of(config) == ()
        config.model_worker[2].datasets = []
        assert faults_of(config) == ()

    def test_workers_without_the_first_model_need_none(self) -> None:
        calls = [call("a", ["prompt"], ["x"]), call("b", ["x"], model=CRITIC)]
        config = config_of(calls, {ACTOR: at(), CRITIC: at(first=1)})
        config.model_worker[1].datasets = []
        assert faults_of(config) == ()

    def test_the_keys_are_those_of_all_datasets(self) -> None:
        config = sft()
        config.model_worker[0].datasets.append(DatasetAbstraction("no-dataset"))
        assert dataset_keys(config) == {"prompt"}


class TestTheEvaluator:
    @staticmethod
    def evaluated(
        dataset: DatasetAbstraction | None = PROMPTS, role: str = "actor", save_freq_steps: int | None = 5
    ) -> ExperimentConfig:
        return replace(
            ppo(separate=False),
            exp_ctrl=ExperimentSaveEvalControl(save_freq_steps=save_freq_steps),
            auto_eval=True,
            evaluator=AutomaticEvaluator(dataset, role),
        )

    def test_one_of_a_role_that_is_trained_is_right(self) -> None:
        assert faults_of(self.evaluated()) == ()

    @pytest.mark.parametrize("dataset", [None, DatasetAbstraction("no-dataset")], ids=["none", "unknown"])
    def test_it_has_no_dataset(self, dataset: DatasetAbstraction | None) -> None:
        assert only(self.evaluated(dataset)) == "evaluator.dataset: there is none to evaluate on"

    def test_nothing_is_saved_before_the_end(self) -> None:
        found = only(self.evaluated(save_freq_steps=None))
        assert found == "evaluator: models are saved at the end only"

    @pytest.mark.parametrize("role", ["ref", ""])
    def test_its_role_is_not_one_that_is_trained(self, role: str) -> None:
        assert only(self.evaluated(role=role)) == (
            f"evaluator.role: it is {role!r}, and trained are: actor, critic"
        )

    def test_the_only_role_that_is_trained_needs_no_name(self) -> None:
        config = sft()
        config.exp_ctrl.save_freq_epochs = 1
        assert faults_of(replace(config, auto_eval=True, evaluator=AutomaticEvaluator(PROMPTS))) == ()


def test_numbers_of_the_control_are_checked() -> None:
    config = sft()
    config.exp_ctrl.save_freq_steps = 0
    assert only(config) == "exp_ctrl.save_freq_steps: 0 is not a whole number above 0"


def test_faults_of_different_kinds_are_told_in_one_error() -> None:
    config = config_of(
        [
            call("a", ["prompt", "nothing"], kind=TRAIN),
            call("b", ["prompt"], kind=TRAIN),
            call("c", ["prompt"], model=ModelName("ref", 3)),
        ],
        {ACTOR: at(topology(data=2)), CRITIC: at()},
        control=ExperimentSaveEvalControl(total_train_epochs=0),
    )
    config.model_worker[0].shards[1].backend = ModelBackendAbstraction("no-backend")
    config.model_worker[1].datasets = []
    with pytest.raises(SpecError) as caught:
        config.lazy_init()
    assert texts_of(caught.value.faults) == [
        "exp_ctrl.total_train_epochs: 0 is not a whole number above 0",
        "model_worker.0: no backend is registered as 'no-backend'",
        "model_rpcs.a: nothing makes 'nothing': neither a call nor the dataset",
        "model_rpcs.c: no worker has a shard of ref@3",
        "models.critic@0: no call uses it",
        "models.actor: a and b both train it",
        "model_worker: a begins with data, and the workers 1 of actor@0 have no datasets",
    ]
    assert config.resolved is None
    assert all(str(fault) in str(caught.value) for fault in caught.value.faults)


CHANGES: dict[str, Callable[[ExperimentConfig], Any]] = {
    "a worker is lost": lambda config: config.model_worker.pop(),
    "a call is lost": lambda config: config.model_rpcs.pop(0),
    "a call is there twice": lambda config: config.model_rpcs.append(config.model_rpcs[2]),
    "a shard is lost": lambda config: config.model_worker[4].shards.pop(),
    "a shard moves": lambda config: config.model_worker[0].shards.append(config.model_worker[4].shards.pop()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_was_right_is_not_any_more_after_a_change(change: Callable[[ExperimentConfig], Any]) -> None:
    config = ppo(separate=True)
    config.lazy_init()
    change(config)
    if change is not CHANGES["a shard moves"]:
        assert faults_of(config)
    else:
        # A configuration may be changed and is checked again: the shard is found where it is now.
        assert config.lazy_init().workers_of(CRITIC) == [0, 5]


def test_a_call_may_be_checked_again_after_it_was_corrected() -> None:
    config = sft()
    right: MFCDef = config.model_rpcs[0]
    config.model_rpcs[0] = call("train", ["promt"], kind=TRAIN)
    assert faults_of(config)
    config.model_rpcs[0] = right
    assert config.lazy_init().graph.sources == ["train"]


def test_workers_are_as_many_as_the_models_need() -> None:
    workers = model_workers({ACTOR: at(topology(data=2), 1), CRITIC: at(first=2)}, datasets=[PROMPTS])
    assert [[str(each.id) for each in worker.shards] for worker in workers] == [
        [],
        ["actor@0[pipe 0, data 0, tensor 0]"],
        ["actor@0[pipe 0, data 1, tensor 0]", "critic@0[pipe 0, data 0, tensor 0]"],
    ]
    assert model_workers({}) == []
