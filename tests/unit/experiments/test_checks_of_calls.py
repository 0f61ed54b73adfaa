"""Faults of what calls ask of their models and interfaces, and of models that their backends cannot have."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.experiments.sample_configs import (
    ACTOR,
    BACKEND,
    COPY,
    CRITIC,
    EVALUATE,
    GENERATE,
    INFERENCE,
    NETWORK,
    PROMPTS,
    TRAIN,
    at,
    call,
    config_of,
    faults_of,
    realloc,
    texts_of,
)
from unirun.experiments.config import (
    Allocation,
    ExperimentSaveEvalControl,
    ModelAbstraction,
    ModelBackendAbstraction,
    register_interface,
)
from unirun.experiments.experiment import ExperimentConfig
from unirun.experiments.graph import (
    MFCDef,
    MicroBatchSpec,
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    OffloadHook,
    ParamReallocHook,
    ProcessTopology,
    topology,
)
from unirun.experiments.models.api import ModelInterface


class Scoring(ModelInterface):
    """An interface for one type of call."""

    def inference(self, *args: Any) -> None:
        """Nothing."""


class Better(Scoring):
    """One that inherits its method."""


def scoring() -> Scoring:
    """A function that makes one."""
    return Scoring()


register_interface("tests-scoring", Scoring)
register_interface("tests-better", Better)
register_interface("tests-made", scoring)
register_interface("tests-slow", "tests.nowhere:Slow")

NULL, NO_BACKEND = ModelAbstraction("null"), ModelBackendAbstraction("null")
LM, DDP = ModelAbstraction("causal_lm"), ModelBackendAbstraction("ddp")


def of(*calls: MFCDef, **models: Allocation) -> ExperimentConfig:
    """An experiment with these calls; the actor is as usual, if no other is given."""
    return config_of(calls, {ACTOR: at(), **{ModelName(role): each for role, each in models.items()}})


def only(config: ExperimentConfig) -> str:
    """The only fault."""
    (fault,) = texts_of(faults_of(config))
    return fault


class TestNames:
    @pytest.mark.parametrize("name", ["../../x", "ac/tor", "", ".", "a..b", "a b", "-a"])
    def test_a_role_that_is_no_part_of_a_path_is_told_once(self, name: str) -> None:
        role = ModelName(name)
        config = config_of(
            [call("a", ["prompt"], model=role), call("b", ["prompt"], model=role)], {role: at()}
        )
        assert only(config) == f"models: {name!r} is no name for a role"

    @pytest.mark.parametrize("name", ["reward_model", "_x", "actor.2", "a-b", "Ref"])
    def test_other_names_may_be_given(self, name: str) -> None:
        role = ModelName(name)
        assert faults_of(config_of([call(name, ["prompt"], model=role)], {role: at()})) == ()

    @pytest.mark.parametrize("name", ["../../x", "a/b", ""])
    def test_a_name_of_a_call_with_special_characters_is_a_fault(self, name: str) -> None:
        assert only(of(call(name, ["prompt"]))) == f"model_rpcs: {name!r} is no name for a call"

    @pytest.mark.parametrize("name", ["actorGen", "a", "ref-2", "v1.5"])
    def test_an_ordinary_name_of_a_call_has_no_fault(self, name: str) -> None:
        role = ModelName(name)
        assert faults_of(config_of([call(name, ["prompt"], model=role)], {role: at()})) == ()


class TestValuesOfAnotherType:
    @pytest.mark.parametrize(
        ("axes", "sizes"),
        [
            (("data",), (2,)),
            (("pipe", "data", "model"), (1, 2, 1)),
            (("pipe", "data", "tensor"), (1, 2)),
            (("pipe", "data", "data", "tensor"), (1, 1, 1, 1)),
        ],
    )
    def test_a_topology_with_other_axes(self, axes: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        topo = ProcessTopology(axes, sizes)
        assert only(config_of([call("a", ["prompt"])], {ACTOR: at(topo)})) == (
            f"models.actor@0: its topology has the axes {axes!r} and sizes {sizes!r}"
        )

    def test_the_axes_may_have_another_order(self) -> None:
        topo = topology(data=2, order=("tensor", "data", "pipe"))
        assert faults_of(config_of([call("a", ["prompt"])], {ACTOR: at(topo)})) == ()

    def test_a_type_of_call_that_is_a_text(self) -> None:
        wrong = replace(call("a", ["prompt"]), interface_type="generate")
        assert only(of(wrong)) == (
            "model_rpcs.a: interface_type is 'generate', which is no ModelInterfaceType"
        )

    def test_the_name_of_a_model_may_be_a_text_as_in_realhf(self) -> None:
        assert replace(call("a", ["prompt"]), model_name="actor").model_name == ACTOR
        wrong = replace(call("a", ["prompt"]), model_name=None)
        (fault,) = faults_of(of(wrong))
        assert (
            str(fault) == "model_rpcs.a: model_name is None, which is no ModelName; write ModelName('actor')"
        )


class Ported(ModelInterface):
    """One as ReaLHF's guide has it."""

    def train_step(self, model: Any, data: Any) -> dict[str, float]:  # type: ignore[override]
        """Nothing."""
        return {}

    def evaluate(self, model: Any, data: Any) -> dict[str, float]:
        """Nothing."""
        return {}


class TestTypesOfCalls:
    def test_a_method_that_takes_other_arguments_is_told_before_anything_starts(self) -> None:
        register_interface("tests-ported", Ported)
        ported = {"interface_impl": ModelInterfaceAbstraction("tests-ported")}
        (fault,) = faults_of(of(replace(call("a", ["prompt"], kind=TRAIN), **ported)))
        assert str(fault) == (
            "model_rpcs.a: interface 'tests-ported': train_step() is called with model, sample, spec: too many "
            "positional arguments; write def train_step(self, model, sample, spec)"
        )
        assert faults_of(of(replace(call("a", ["prompt"], kind=EVALUATE), **ported))) == ()

    @pytest.mark.parametrize("kind", [TRAIN, EVALUATE])
    def test_one_that_makes_no_data_has_no_output_keys(self, kind: ModelInterfaceType) -> None:
        found = only(of(call("a", ["prompt"], ["x"], kind=kind)))
        assert found == f"model_rpcs.a: it has output_keys, and {kind.value} makes no data"

    @pytest.mark.parametrize("kind", [GENERATE, TRAIN, EVALUATE])
    @pytest.mark.parametrize("name", ["tests-scoring", "tests-better"])
    def test_an_interface_does_not_define_its_method(self, name: str, kind: ModelInterfaceType) -> None:
        wrong = replace(call("a", ["prompt"], kind=kind), interface_impl=ModelInterfaceAbstraction(name))
        assert only(of(wrong)) == f"model_rpcs.a: interface {name!r} does not define {kind.value}()"
        assert faults_of(of(replace(wrong, interface_type=INFERENCE))) == ()

    @pytest.mark.parametrize("name", ["tests-made", "tests-slow"])
    def test_nothing_is_said_of_a_function_or_of_what_is_not_imported(self, name: str) -> None:
        unknown = replace(
            call("a", ["prompt"], kind=GENERATE), interface_impl=ModelInterfaceAbstraction(name)
        )
        assert faults_of(of(unknown)) == ()


class TestModelsWithoutANetwork:
    def test_the_backend_is_null_and_the_model_is_a_network(self) -> None:
        config = config_of([call("a", ["prompt"])], {ACTOR: Allocation(LM, NO_BACKEND, topology())})
        assert only(config) == "models.actor@0: its backend 'null' cannot run its model 'causal_lm'"

    @pytest.mark.parametrize("backend", ["ddp", "fsdp2", "inference"])
    def test_the_model_is_null_and_the_backend_runs_networks(self, backend: str) -> None:
        allocation = Allocation(NULL, ModelBackendAbstraction(backend), topology())
        assert only(config_of([call("a", ["prompt"])], {ACTOR: allocation})) == (
            f"models.actor@0: its model 'null' has no network for its backend {backend!r}"
        )

    @pytest.mark.parametrize(
        ("model", "backend"),
        [(NULL, NO_BACKEND), (NETWORK, NO_BACKEND), (NULL, BACKEND), (LM, DDP), (LM, BACKEND)],
    )
    def test_other_pairs_are_right(self, model: ModelAbstraction, backend: ModelBackendAbstraction) -> None:
        config = config_of([call("a", ["prompt"])], {ACTOR: Allocation(model, backend, topology())})
        assert faults_of(config) == ()

    @pytest.mark.parametrize(
        "hook",
        [OffloadHook(), ParamReallocHook(source=CRITIC), ParamReallocHook(target=CRITIC)],
        ids=["offload", "source", "target"],
    )
    def test_a_hook_needs_parameters(self, hook: Any) -> None:
        calls = [call("a", ["prompt"], post_hooks=(hook,)), call("b", ["prompt"], model=CRITIC)]
        empty = Allocation(NULL, NO_BACKEND, topology(), 1)
        assert only(config_of(calls, {ACTOR: empty, CRITIC: at()})) == (
            f"model_rpcs.a: its {type(hook).__name__} needs parameters of actor@0, whose backend 'null' has none"
        )

    def test_the_other_model_of_a_hook_has_none(self) -> None:
        calls = [call("a", ["prompt"], pre_hooks=(realloc(CRITIC),))]
        empty = Allocation(NULL, NO_BACKEND, topology(), 1)
        assert "needs parameters of critic@0" in only(config_of(calls, {ACTOR: at(), CRITIC: empty}))

    def test_a_hook_that_is_added_counts(self) -> None:
        calls = [call("a", ["prompt"], ["x"], COPY), call("b", ["x"], kind=TRAIN)]
        config = config_of(calls, {ACTOR: at(), COPY: Allocation(NULL, NO_BACKEND, topology(), 1)})
        assert only(config).startswith("model_rpcs.a: its ParamReallocHook needs parameters of actor@1")


class TestPasses:
    @pytest.mark.parametrize(
        ("n_seqs", "least", "right"), [(8, 2.0, True), (7, 2.0, False), (4, 1.0, True), (2, 0.5, True)]
    )
    def test_each_micro_batch_of_a_rank_can_have_as_many_ids_as_are_asked_for(
        self, n_seqs: int, least: float, right: bool
    ) -> None:
        split: dict[str, Any] = {"mb_spec": MicroBatchSpec(n_mbs=2), "min_n_seqs_per_pass": least}
        config = config_of([call("a", ["prompt"], n_seqs=n_seqs, **split)], {ACTOR: at(topology(data=2))})
        told = (
            "model_rpcs.a: n_seqs is 7, and 2 data-parallel ranks with 2 micro-batches of 2 at least "
            "(min_n_seqs_per_pass) need 8"
        )
        assert texts_of(faults_of(config)) == ([] if right else [told])

    def test_a_number_below_0(self) -> None:
        assert (
            only(of(call("a", ["prompt"], min_n_seqs_per_pass=-1.0)))
            == "model_rpcs.a: min_n_seqs_per_pass=-1.0"
        )


class TestHeldOutData:
    @pytest.mark.parametrize(
        "freq", [{"eval_freq_epochs": 1}, {"eval_freq_steps": 2}, {"eval_freq_secs": 3.0}]
    )
    def test_there_is_none_to_evaluate_on(self, freq: dict[str, Any]) -> None:
        control = ExperimentSaveEvalControl(**freq)
        calls = [call("train", ["prompt"], kind=TRAIN)]
        config = config_of(calls, {ACTOR: at()}, control=control)
        assert only(config) == "exp_ctrl: an eval_freq_… is set, and no shard has an eval_dataset"
        held_out = Allocation(NETWORK, BACKEND, topology(), 0, PROMPTS)
        assert faults_of(config_of(calls, {ACTOR: held_out}, control=control)) == ()
