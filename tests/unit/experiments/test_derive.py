"""The consequences of a configuration, compared with tables that are written by hand."""

from __future__ import annotations

import pytest

from tests.unit.experiments.sample_configs import (
    ACTOR,
    COPY,
    CRITIC,
    GENERATE,
    REF,
    REWARD,
    TRAIN,
    at,
    call,
    config_of,
    ppo,
    realloc,
)
from unirun.errors import SpecError
from unirun.experiments.config import (
    Resolved,
    WorkerInformation,
    instantiated,
    shared_models,
    sync_param_pairs,
)
from unirun.experiments.graph import Hook, ModelName, OffloadHook, ParamReallocHook, topology


@pytest.fixture
def together() -> Resolved:
    """PPO with one layout for all."""
    return ppo(separate=False).lazy_init()


@pytest.fixture
def separate() -> Resolved:
    """PPO with a layout for each, where another replica of the actor generates."""
    return ppo(separate=True).lazy_init()


def hooks(resolved: Resolved) -> dict[str, tuple[tuple[Hook, ...], tuple[Hook, ...]]]:
    """For each call that has hooks: its pre-hooks and its post-hooks."""
    calls = resolved.graph.calls.items()
    return {n: (c.pre_hooks, c.post_hooks) for n, c in calls if c.pre_hooks or c.post_hooks}


def shown(pairs: tuple[tuple[ModelName, ModelName], ...]) -> list[str]:
    return [f"{source} -> {target}" for source, target in pairs]


class TestTheGraph:
    TABLE = (
        ("actorGen", "rewInf", ("tokens", "mask")),
        ("actorGen", "refInf", ("tokens",)),
        ("actorGen", "criticInf", ("tokens", "mask", "logprobs")),
        ("refInf", "criticInf", ("ref_logprobs",)),
        ("rewInf", "criticInf", ("rewards",)),
        ("actorGen", "actorTrain", ("tokens", "mask", "logprobs")),
        ("criticInf", "actorTrain", ("advantages",)),
        ("actorGen", "criticTrain", ("tokens", "mask")),
        ("criticInf", "criticTrain", ("returns",)),
    )
    LEVELS = (["actorGen"], ["rewInf", "refInf"], ["criticInf"], ["actorTrain", "criticTrain"])

    def test_it_does_not_depend_on_the_layout(self, together: Resolved, separate: Resolved) -> None:
        for resolved in (together, separate):
            assert tuple(resolved.graph.edges) == self.TABLE
            assert tuple(resolved.graph.levels()) == self.LEVELS


class TestOneLayoutForAll:
    def test_topologies(self, together: Resolved) -> None:
        assert together.topologies == dict.fromkeys((ACTOR, CRITIC, REF, REWARD), topology(data=2))

    def test_data_goes_between_these_models(self, together: Resolved) -> None:
        assert shown(together.data_transfer_pairs) == [
            "actor@0 -> reward@0",
            "actor@0 -> ref@0",
            "actor@0 -> critic@0",
            "ref@0 -> critic@0",
            "reward@0 -> critic@0",
            "actor@0 -> actor@0",
            "critic@0 -> actor@0",
            "critic@0 -> critic@0",
        ]

    def test_no_parameters_are_copied(self, together: Resolved) -> None:
        assert together.sync_param_pairs == ()

    def test_all_models_have_parameters(self, together: Resolved) -> None:
        assert together.instantiated == {ACTOR, CRITIC, REF, REWARD}

    def test_each_worker_has_a_shard_of_each_model(self, together: Resolved) -> None:
        assert {str(shard): worker for shard, worker in together.workers.items()} == {
            f"{role}@0[pipe 0, data {rank}, tensor 0]": rank
            for role in ("actor", "critic", "ref", "reward")
            for rank in range(2)
        }
        assert together.workers_of(CRITIC) == [0, 1]

    def test_no_hooks_are_added(self, together: Resolved) -> None:
        assert hooks(together) == {}


class TestALayoutForEach:
    def test_topologies(self, separate: Resolved) -> None:
        assert separate.topologies == {
            ACTOR: topology(data=2, tensor=2),
            COPY: topology(data=2),
            CRITIC: topology(pipe=2),
            REF: topology(),
            REWARD: topology(),
        }
        assert [*separate.topologies] == [ACTOR, COPY, CRITIC, REF, REWARD]

    def test_data_goes_between_these_models(self, separate: Resolved) -> None:
        assert shown(separate.data_transfer_pairs) == [
            "actor@1 -> reward@0",
            "actor@1 -> ref@0",
            "actor@1 -> critic@0",
            "ref@0 -> critic@0",
            "reward@0 -> critic@0",
            "actor@1 -> actor@0",
            "critic@0 -> actor@0",
            "critic@0 -> critic@0",
            "actor@1 -> actor@1",
        ]

    def test_parameters_go_from_the_actor_that_is_trained_to_the_one_that_generates(
        self, separate: Resolved
    ) -> None:
        assert shown(separate.sync_param_pairs) == ["actor@0 -> actor@1"]

    def test_all_but_the_replica_have_parameters_of_their_own(self, separate: Resolved) -> None:
        assert separate.instantiated == {ACTOR, CRITIC, REF, REWARD}

    def test_each_shard_is_in_its_worker(self, separate: Resolved) -> None:
        assert {str(shard): worker for shard, worker in separate.workers.items()} == {
            "actor@0[pipe 0, data 0, tensor 0]": 0,
            "actor@0[pipe 0, data 0, tensor 1]": 1,
            "actor@0[pipe 0, data 1, tensor 0]": 2,
            "actor@0[pipe 0, data 1, tensor 1]": 3,
            "actor@1[pipe 0, data 0, tensor 0]": 4,
            "actor@1[pipe 0, data 1, tensor 0]": 5,
            "critic@0[pipe 0, data 0, tensor 0]": 4,
            "critic@0[pipe 1, data 0, tensor 0]": 5,
            "ref@0[pipe 0, data 0, tensor 0]": 6,
            "reward@0[pipe 0, data 0, tensor 0]": 7,
        }

    def test_the_replica_gets_parameters_first_and_gives_its_memory_back(self, separate: Resolved) -> None:
        # The critic is on its workers too.
        assert hooks(separate) == {"actorGen": ((realloc(ACTOR),), (OffloadHook(),))}

    def test_shards_are_told_whether_they_have_parameters(self) -> None:
        config = ppo(separate=True)
        config.lazy_init()
        assert [
            str(shard.id.model_name)
            for worker in config.model_worker
            for shard in worker.shards
            if not shard.should_instantiate
        ] == ["actor@1", "actor@1"]


class TestCopiesOfParameters:
    def test_a_pair_is_there_once_in_the_order_of_the_calls(self) -> None:
        push = ParamReallocHook(target=REF, eta=0.5)
        calls = [
            call("b", model=COPY, pre_hooks=(realloc(ACTOR),), post_hooks=(OffloadHook(),)),
            call("a", kind=TRAIN, post_hooks=(push,)),
            call("c", model=COPY, pre_hooks=(realloc(ACTOR),)),
        ]
        assert sync_param_pairs(calls) == [(ACTOR, COPY), (ACTOR, REF)]

    def test_a_replica_that_gets_a_moving_average_begins_with_parameters(self) -> None:
        trains = call("train", kind=TRAIN)
        generates = call("generate", model=COPY)
        assert instantiated([trains, generates]) == {ACTOR}
        assert instantiated([trains, generates.hooked(pre=realloc(ACTOR, 0.5))]) == {ACTOR, COPY}
        pushes = trains.hooked(post=ParamReallocHook(target=COPY, eta=0.5))
        assert instantiated([pushes, generates]) == {ACTOR, COPY}

    def test_all_replicas_of_a_role_that_is_not_trained_have_parameters(self) -> None:
        assert instantiated([call("a"), call("b", model=COPY)]) == {ACTOR, COPY}


class TestSharedWorkers:
    def test_a_replica_that_is_alone_on_its_workers_keeps_its_memory(self) -> None:
        calls = [call("generate", ["prompt"], ["x"], COPY, GENERATE), call("train", ["x"], kind=TRAIN)]
        apart = config_of(calls, {ACTOR: at(), COPY: at(first=1)})
        assert shared_models(apart) == set()
        assert hooks(apart.lazy_init()) == {"generate": ((realloc(ACTOR),), ())}
        beside = config_of(calls, {ACTOR: at(), COPY: at(topology(data=2))})
        assert shared_models(beside) == {ACTOR, COPY}
        assert hooks(beside.lazy_init()) == {"generate": ((realloc(ACTOR),), (OffloadHook(),))}

    def test_models_are_sorted(self) -> None:
        assert [*ppo(separate=True).models()] == [ACTOR, COPY, CRITIC, REF, REWARD]


class TestWorkersOfAConfiguration:
    def test_a_worker_is_found_by_its_type_and_number(self) -> None:
        config = ppo(separate=True)
        assert config.resolve_worker_config("model_worker", 3) is config.model_worker[3]
        assert config.resolve_worker_config("master_worker", 0) is config.master_worker[0]

    @pytest.mark.parametrize(
        ("kind", "index", "problem"),
        [
            ("model_worker", 8, "no such worker 8; there are 8"),
            ("model_worker", -1, "no such worker -1; there are 8"),
            ("rollout_worker", 0, "no such worker 0; there are 0"),
            ("model_rpcs", 0, "no such worker 0"),
        ],
    )
    def test_one_that_is_not_there_is_refused(self, kind: str, index: int, problem: str) -> None:
        with pytest.raises(SpecError) as caught:
            ppo(separate=True).resolve_worker_config(kind, index)
        (fault,) = caught.value.faults
        assert (fault.where, fault.problem) == (kind, f"there is {problem}")
        assert fault.remedy.startswith("types: model_worker, master_worker, ")

    def test_each_worker_is_told_which_one_it_is(self) -> None:
        config = ppo(separate=False)
        config.set_worker_information("ppo", "first")
        assert [worker.worker_info for worker in config.model_worker] == [
            WorkerInformation("ppo", "first", "model_worker", number, 2) for number in range(2)
        ]
        assert config.master_worker[0].worker_info == WorkerInformation("ppo", "first", "master_worker", 0, 1)
