"""Families of decoders: how a small network of each is made, and which are refused in which layout."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from unirun.experiments import Place
from unirun.experiments.models.families import HEADS, LAYERS, cuts, doubles, partial_names, refusal, small
from unirun.experiments.models.stage import Stage

from .test_stage import CONFIG, place


def build(whole: nn.Module, stage: int, stages: int) -> Stage:
    where = place(pipe=stages)
    return Stage(whole, Place(where.name, where.topo, stage, where.device))


def config(kind: str = "llama", **more: Any) -> Any:
    return AutoConfig.for_model(**{**CONFIG, "model_type": kind, **more})


def why(kind: str, layout: str = "", *, critic: bool = False, **more: Any) -> str:
    return refusal(config(kind, **more), build, layout, critic=critic)


class TestASmallNetwork:
    def test_it_has_few_layers_and_heads_of_the_same_width(self) -> None:
        found = small(AutoConfig.for_model("llama"))
        assert (found.num_hidden_layers, found.num_attention_heads, found.head_dim) == (LAYERS, HEADS, 128)
        assert found.hidden_size == HEADS * 128

    def test_it_has_each_kind_of_layer(self) -> None:
        found = small(AutoConfig.for_model("gemma3_text"))
        assert {*found.layer_types} == {"full_attention", "sliding_attention"}
        assert len(found.layer_types) == found.num_hidden_layers == LAYERS

    @pytest.mark.parametrize(("groups", "expected"), [(32, 4), (8, 2), (1, 1)])
    def test_heads_share_keys_and_values_as_before(self, groups: int, expected: int) -> None:
        found = small(AutoConfig.for_model("llama", num_attention_heads=32, num_key_value_heads=groups))
        assert found.num_key_value_heads == expected

    def test_settings_that_are_no_sizes_stay(self) -> None:
        found = small(config("granite", residual_multiplier=0.3, tie_word_embeddings=True))
        assert (found.residual_multiplier, found.tie_word_embeddings) == (0.3, True)


class TestKindsOfParameters:
    @pytest.mark.parametrize(
        ("kind", "expected"),
        [("llama", set()), ("qwen3", {"self_attn.q_norm.weight", "self_attn.k_norm.weight"})],
    )
    def test_what_is_whole_in_a_module_that_is_cut_has_partial_gradients(
        self, kind: str, expected: set[str]
    ) -> None:
        network: Any = AutoModelForCausalLM.from_config(config(kind))  # type: ignore[no-untyped-call]
        assert partial_names(network.model.layers[0]) == expected

    def test_experts_and_fused_projections_are_left_whole(self) -> None:
        mixture: Any = AutoModelForCausalLM.from_config(config("mixtral"))  # type: ignore[no-untyped-call]
        assert {*cuts(mixture.model.layers[0])} == {"self_attn"}
        fused: Any = AutoModelForCausalLM.from_config(config("phi3", pad_token_id=0))  # type: ignore[no-untyped-call]
        assert not cuts(fused.model.layers[0])


class TestRefusing:
    @pytest.mark.parametrize("layout", ["", "pipe", "tensor"])
    @pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral"])
    def test_these_run_in_each_layout(self, kind: str, layout: str) -> None:
        assert not why(kind, layout)

    @pytest.mark.parametrize(
        ("kind", "layout", "told"),
        [
            ("gpt2", "", "GPT2LMHeadModel is not built as Llama is"),
            ("mamba", "", "MambaForCausalLM is not built as Llama is"),
            ("mixtral", "", "in training it draws random numbers: they differ"),
            ("phi", "pipe", "in 2 stages it has other outputs"),
            ("phi3", "tensor", "no linear layers are as the plan has them .*self_attn.qkv_proj"),
            ("olmo2", "tensor", "self_attn .with k_norm.weight, q_norm.weight.: "),
        ],
    )
    def test_others_are_told_why_not(self, kind: str, layout: str, told: str) -> None:
        noise: dict[str, Any] = {"router_jitter_noise": 0.5} if kind == "mixtral" else {}
        found = why(kind, layout, pad_token_id=0, **noise)
        assert re.search(told, found), found

    def test_dropout_would_differ_between_tensor_parallel_ranks(self) -> None:
        assert "attention_dropout is 0.5, and each rank draws for its own heads" in why(
            "llama", "tensor", attention_dropout=0.5
        )
        assert not why("llama", "pipe", attention_dropout=0.5)

    def test_one_thread_computes_them_and_others_are_there_again_after_it(self) -> None:
        seen = set()

        def noted(whole: nn.Module, stage: int, stages: int) -> Stage:
            seen.add(torch.get_num_threads())
            return build(whole, stage, stages)

        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            assert not refusal(config(), noted, "", critic=False)
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(before)
        assert seen == {1}

    def test_a_critic_has_no_logits_that_are_changed(self) -> None:
        assert "changes its logits after the last layer" in why("gemma2")
        assert not why("gemma2", critic=True)


class Beside(nn.Module):
    """A feed-forward network with something else beside its linear layers, or before them."""

    def __init__(self, mlp: Any, place: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn, self.place = mlp.act_fn, place
        self.scale = nn.Parameter(torch.ones(mlp.gate_proj.in_features))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        before = value * self.scale if self.place == "before" else value
        inside = self.act_fn(self.gate_proj(before)) * self.up_proj(before)
        if self.place == "shift":
            # What is added to both of two exponents changes nothing: the gradient is rounding.
            both = torch.stack([inside, 2.0 * inside]) + self.scale.sum()
            inside = inside * both.softmax(0)[0]
        if self.place == "sum":
            inside = inside / inside.pow(2).mean(-1, keepdim=True).add(1.0).sqrt()
        if self.place == "gate":
            # A gate of one value is the same for all parts, so outputs do add up.
            inside = inside * (value * self.scale).mean(-1, keepdim=True)
        found: torch.Tensor = self.down_proj(inside)
        return found * self.scale if self.place == "after" else found


class OddConfig(LlamaConfig):  # type: ignore[no-untyped-call]
    """The configuration of an unknown family."""

    model_type = "odd"
    place: str = ""


class Odd(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """Llama, with `Beside`."""

    config_class = OddConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Beside(layer.mlp, config.place)


AutoConfig.register("odd", OddConfig)
AutoModelForCausalLM.register(OddConfig, Odd)


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("before", "the gradients of scale, which is partial, do not add up"),
        ("after", "scale is used after the linear layers that are cut"),
        ("gate", "its inputs are also used beside the linear layers that are cut"),
        ("sum", "the outputs of its parts do not add up"),
    ],
)
def test_a_parameter_of_which_the_plan_knows_nothing_is_not_left_to_chance(where: str, told: str) -> None:
    settings: dict[str, Any] = {name: value for name, value in CONFIG.items() if name != "model_type"}
    found = OddConfig(**settings, place=where)
    assert not refusal(found, build, "", critic=False)
    assert told in refusal(found, build, "tensor", critic=False)


def test_a_gradient_that_is_zero_but_for_rounding_is_no_difference() -> None:
    settings: dict[str, Any] = {name: value for name, value in CONFIG.items() if name != "model_type"}
    assert not refusal(OddConfig(**settings, place="shift"), build, "tensor", critic=False)


class TestDoubles:
    def test_networks_that_ask_for_float32_compute_in_float64(self) -> None:
        with doubles():
            found = [
                torch.zeros(1),
                torch.zeros(1, dtype=torch.float32),
                torch.zeros(1).to(torch.float32),
                torch.zeros(1, dtype=torch.float16).float(),
                torch.zeros(1).softmax(-1, dtype=torch.float32),
                torch.arange(2, dtype=torch.int64).to(dtype=torch.float),
            ]
        assert {each.dtype for each in found} == {torch.float64}

    def test_others_stay_as_they_are(self) -> None:
        with doubles():
            assert torch.zeros(1).to(torch.bfloat16).dtype is torch.bfloat16

    def test_they_end_with_the_block(self) -> None:
        with pytest.raises(ValueError, match="an error"), doubles():
            raise ValueError("an error")
        assert torch.zeros(1, dtype=torch.float32).dtype is torch.zeros(1).dtype is torch.float32
