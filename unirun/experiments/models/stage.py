"""A part of a causal language model of transformers: the layers of one stage, cut by tensor parallelism.

The network is transformers' own, with the layers of other stages taken out, so that any decoder whose modules are named
as Llama's (Qwen, Mistral, …) works.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from unirun.errors import Fault, SpecError, UsageError
from unirun.experiments.models.api import Place
from unirun.reporting import report

PLAN: Mapping[str, type[ColwiseParallel] | type[RowwiseParallel]] = {
    "self_attn.q_proj": ColwiseParallel,
    "self_attn.k_proj": ColwiseParallel,
    "self_attn.v_proj": ColwiseParallel,
    "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}
"""How each layer is cut over tensor-parallel ranks (Shoeybi et al. 2019, Megatron-LM)."""


SCALES: Mapping[str, float] = {"logit_scale": 1.0, "logits_scaling": 1.0, "final_logit_softcapping": 0.0}
"""What some networks do with their logits, by its name in the configuration, with the value that changes nothing."""


class Stage(nn.Module):
    """The part of a network that one rank has. Its inputs are tokens on the first stage, hidden states on others. Its
    outputs are hidden states; on the last stage logits, or, of a critic, one value for each token."""

    def __init__(self, whole: nn.Module, place: Place) -> None:
        """`whole` is a causal language model, all of it, on the CPU."""
        super().__init__()
        body: Any = _body(whole)
        config: Any = copy.deepcopy(whole.config)
        stages, stage = place.topo.get_dim("pipe"), place.pipe
        _check(place, config)
        count = config.num_hidden_layers
        self.begin = count * stage // stages
        end = count * (stage + 1) // stages
        self.first, self.last = stage == 0, stage == stages - 1
        self.hidden, self.dtype = int(config.hidden_size), next(whole.parameters()).dtype
        layers = list(body.layers)[self.begin : end]
        for number, layer in enumerate(layers):
            # Each stage has a cache of its own layers.
            layer.self_attn.layer_idx = number
        config.num_hidden_layers = len(layers)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[self.begin : end]
        body.config = config
        body.layers = nn.ModuleList(layers)
        if not self.first:
            body.embed_tokens = None
        if not self.last:
            body.norm = nn.Identity()
        self.body = body
        self.head: Any = whole.lm_head if self.last else None
        self.config: Any = config
        self._cache_name = (
            "cache" if "cache" in inspect.signature(type(body).forward).parameters else "past_key_values"
        )
        if place.topo.get_dim("tensor") > 1:
            self._cut(place)

    def _cut(self, place: Place) -> None:
        assert place.mesh is not None
        mesh = place.mesh["tensor"]
        for layer in self.body.layers:
            parallelize_module(layer, mesh, {name: style() for name, style in PLAN.items()})
        # Embeddings are not cut, so neither is a last layer with the same weights.
        if (
            isinstance(self.head, nn.Linear)
            and self.head.out_features > 1
            and not self.config.tie_word_embeddings
        ):
            parallelize_module(self.head, mesh, ColwiseParallel(output_layouts=Replicate()))

    def forward(
        self,
        value: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        cache: Any = None,
    ) -> torch.Tensor:
        """Tokens ``[batch, length]`` or hidden states ``[batch, length, hidden]`` through these layers. With a `cache`,
        the outputs of the last stage are those of the last position, ``[batch, 1, …]``."""
        more = {self._cache_name: cache, "use_cache": True} if cache is not None else {"use_cache": False}
        given = {"input_ids": value} if self.first else {"inputs_embeds": value}
        found = self.body(**given, attention_mask=attention_mask, position_ids=positions, **more)
        hidden: torch.Tensor = found.last_hidden_state
        if self.head is None:
            return hidden
        output: torch.Tensor = self.head(hidden if cache is None else hidden[:, -1:])
        return output

    @property
    def tied(self) -> nn.Parameter | None:
        """The embeddings, if the last layer of another stage has the same weights, and those on that stage."""
        if not self.config.tie_word_embeddings or self.first == self.last:
            return None
        found: nn.Parameter = self.body.embed_tokens.weight if self.first else self.head.weight
        return found

    def named(self, names: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors by the names that they have in the whole network."""
        return {self.name(name): tensor for name, tensor in names.items()}

    def name(self, name: str) -> str:
        """The name of a parameter in the whole network."""
        name = re.sub(r"^head\.", "lm_head.", re.sub(r"^body\.", "model.", name))
        return re.sub(r"^model\.layers\.(\d+)\.", lambda m: f"model.layers.{int(m[1]) + self.begin}.", name)


@contextlib.contextmanager
def whole(stage: Stage) -> Iterator[None]:
    """All parameters are gathered once in the block, and not in each forward pass: data-parallel ranks may make
    different numbers of them. Nothing changes without FSDP2."""
    if not isinstance(stage, FSDPModule):
        yield
        return
    layers: list[Any] = [*stage.body.layers]
    for layer in layers:
        layer.set_reshard_after_forward(False)
    for module in (stage, *layers):
        module.unshard()
    try:
        yield
    finally:
        for layer in layers:
            layer.set_reshard_after_forward(True)
        for module in (*layers, stage):
            module.reshard()


def _body(whole: nn.Module) -> Any:
    body = getattr(whole, "model", None)
    if body is None or not hasattr(body, "layers") or not hasattr(body, "embed_tokens"):
        raise SpecError(
            [
                Fault(
                    "model",
                    f"{type(whole).__name__} is not built as Llama is",
                    "give a decoder with model.layers",
                )
            ]
        )
    return body


def _check(place: Place, config: Any) -> None:
    """Raises `SpecError` when the network cannot be cut in this way."""
    faults = []
    tensor, stages = place.topo.get_dim("tensor"), place.topo.get_dim("pipe")
    heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    for what, size in (
        ("attention heads", heads[0]),
        ("key-value heads", heads[1]),
        ("elements in its intermediate layers", config.intermediate_size),
    ):
        if size % tensor:
            faults.append(
                Fault(
                    f"models.{place.name}",
                    f"it has {size} {what}, and tensor is {tensor}",
                    f"tensor has to divide {size}",
                )
            )
    for name, neutral in SCALES.items():
        if getattr(config, name, None) not in (None, neutral):
            faults.append(
                Fault(
                    f"models.{place.name}",
                    f"its logits are changed after the last layer ({name} is {getattr(config, name)})",
                    "give a network without that",
                )
            )
    if config.num_hidden_layers < stages:
        faults.append(
            Fault(
                f"models.{place.name}",
                f"it has {config.num_hidden_layers} layers, and pipe is {stages}",
                "a stage has one layer at least",
            )
        )
    if faults:
        raise SpecError(faults)


def causal_lm(
    place: Place,
    *,
    config: Mapping[str, Any] | None = None,
    path: str = "",
    dtype: str = "float32",
    critic: bool = False,
    weights: str = "",
) -> Stage:
    """The part of a causal language model: of a `path` or name that transformers knows, or a new one with this
    `config`, which names its ``model_type``. The last layer of a `critic` gives one value instead of logits.

    The parameters of a new one follow from the seed of the place alone, so they are the same in each layout. `weights`
    is a file that `ModelInterface.save` has written: its tensors take the place of those with the same names and
    shapes.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    whole: Any

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(place.seed)
        kind = getattr(torch, dtype)
        if path:
            whole = AutoModelForCausalLM.from_pretrained(path, dtype=kind)
        else:
            settings = dict(config or {})
            whole = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                AutoConfig.for_model(settings.pop("model_type", "llama"), **settings), dtype=kind
            )
        if critic:
            whole.lm_head = nn.Linear(whole.config.hidden_size, 1, bias=False, dtype=kind)
            nn.init.normal_(whole.lm_head.weight, std=1.0 / (whole.config.hidden_size + 1))
            whole.config.tie_word_embeddings = False
        if weights:
            own = whole.state_dict()
            saved = torch.load(weights, map_location="cpu", weights_only=True)
            fitting = {n: t for n, t in saved.items() if n in own and own[n].shape == t.shape}
            # A critic has a last layer of its own.
            others = sorted(own.keys() - fitting.keys() - ({"lm_head.weight"} if critic else set()))
            if not fitting:
                raise UsageError(
                    f"no tensor of {weights} has a name and a shape of {place.name}",
                    "give a model.pt of this network",
                )
            if others:
                report(f"unirun: {place.name}: {weights} has no tensors that fit {', '.join(others[:5])}")
            whole.load_state_dict(fitting, strict=False)
    return Stage(whole, place)
