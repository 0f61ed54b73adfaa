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
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from unirun.errors import Fault, SpecError
from unirun.experiments.graph import ModelName, ProcessTopology, topology
from unirun.experiments.models.api import HEAD, SCORE, Place
from unirun.experiments.models.families import cuts, first_line, partial_names, refusal


class Stage(nn.Module):
    """The part of a network that one rank has. Its inputs are tokens on the first stage, hidden states on others. Its
    outputs are hidden states; on the last stage logits, or, of a critic, one value for each token."""

    def __init__(self, whole: nn.Module, place: Place) -> None:
        """`whole` is a causal language model, all of it, on the CPU."""
        super().__init__()
        body: Any = _body(whole)
        config: Any = copy.deepcopy(whole.config)
        stages, stage = place.topo.get_dim("pipe"), place.pipe
        count = config.num_hidden_layers
        self.begin = count * stage // stages
        end = count * (stage + 1) // stages
        self.first, self.last = stage == 0, stage == stages - 1
        self.hidden, self.dtype = int(config.hidden_size), next(whole.parameters()).dtype
        layers = list(body.layers)[self.begin : end]
        for number, layer in enumerate(layers):
            # Each stage has a cache of its own layers.
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    module.layer_idx = number
        config.num_hidden_layers = len(layers)
        if stages > 1 and getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[self.begin : end]
        body.config = config
        body.layers = nn.ModuleList(layers)
        head: Any = whole.lm_head
        # The configuration may say that weights are tied where they are not.
        self._ties = head.weight is body.embed_tokens.weight
        if not self.first:
            body.embed_tokens = None
        if not self.last:
            body.norm = nn.Identity()
        self.body = body
        self.head: Any = head if self.last else None
        self.config: Any = config
        self._settings, self._generation = whole.config, getattr(whole, "generation_config", None)
        self._class = type(whole).__name__
        self._cache_name = (
            "cache" if "cache" in inspect.signature(type(body).forward).parameters else "past_key_values"
        )
        self.stops = _stops(whole)
        self._partial: set[str] = set()
        if place.topo.get_dim("tensor") > 1:
            self._cut(place)

    def _cut(self, place: Place) -> None:
        assert place.mesh is not None
        mesh = place.mesh["tensor"]
        for number, layer in enumerate(self.body.layers):
            if faults := [*_uneven(f"models.{place.name}", layer, mesh.size())]:
                raise SpecError(faults)
            # By name, as FSDP2 puts other parameters in their places.
            self._partial |= {f"body.layers.{number}.{name}" for name in partial_names(layer)}
            for name, cut in cuts(layer).items():
                module: Any = getattr(layer, name)
                styles: dict[str, ParallelStyle] = {
                    each: RowwiseParallel() if dim else ColwiseParallel() for each, dim in cut.items()
                }
                parallelize_module(module, mesh, styles)
        # Embeddings are not cut, so neither is a last layer with the same weights.
        if isinstance(self.head, nn.Linear) and self.head.out_features > 1 and not self._ties:
            parallelize_module(self.head, mesh, ColwiseParallel(output_layouts=Replicate()))

    def partial(self) -> list[nn.Parameter]:
        """The parameters of which each tensor-parallel rank has a partial gradient, in the same order on all ranks."""
        return [parameter for name, parameter in self.named_parameters() if name in self._partial]

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
        if not self._ties or self.first == self.last:
            return None
        found: nn.Parameter = self.body.embed_tokens.weight if self.first else self.head.weight
        return found

    def describe(self, path: Path) -> dict[str, str]:
        """Write the configuration of the whole network to this directory, as transformers reads it: a critic is a
        sequence classifier with one label, if the family has one. Returns the names of tensors that differ there."""
        settings: Any = copy.deepcopy(self._settings)
        critic = getattr(self.head, "out_features", 0) == 1
        scorer = _scorer(settings) if critic else ""
        settings.architectures = [scorer or self._class]
        settings.save_pretrained(path)
        if self._generation is not None:
            # Not by its save_pretrained, which refuses settings that models on the Hub have.
            self._generation.to_json_file(path / "generation_config.json")
        return {HEAD: SCORE} if scorer else {}

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


def _scorer(settings: Any) -> str:
    """The class of transformers that gives one value by a last layer `SCORE`, and of which these are the settings then;
    empty if the family has none."""
    from transformers import AutoModelForSequenceClassification

    one = copy.deepcopy(settings)
    one.num_labels = 1
    try:
        with torch.device("meta"):
            found = AutoModelForSequenceClassification.from_config(one)  # type: ignore[no-untyped-call]
    except ValueError:
        return ""
    if not {SCORE, "model.embed_tokens.weight"} <= found.state_dict().keys():
        return ""
    settings.num_labels = 1
    return type(found).__name__


def _body(whole: nn.Module) -> Any:
    body = getattr(whole, "model", None)
    if not all(hasattr(body, name) for name in ("layers", "embed_tokens")) or not hasattr(whole, "lm_head"):
        raise SpecError(
            [
                Fault(
                    "model",
                    f"{type(whole).__name__} is not built as Llama is",
                    "give a decoder with model.layers, model.embed_tokens and lm_head",
                )
            ]
        )
    return body


def _stops(whole: Any) -> tuple[int, ...]:
    """The tokens that end sequences: one, several as of Llama 3, or none."""
    found = getattr(getattr(whole, "generation_config", None), "eos_token_id", None)
    if found is None:
        found = getattr(whole.config, "eos_token_id", None)
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def _uneven(where: str, layer: nn.Module, tensor: int) -> Iterator[Fault]:
    """Faults of linear layers that do not give tensor-parallel ranks equal parts of whole heads."""
    for name, cut in cuts(layer).items():
        module: Any = getattr(layer, name)
        unit = getattr(module, "head_dim", 1)
        for each, dim in cut.items():
            size = getattr(module, each).weight.shape[dim]
            if size % (unit * tensor):
                problem = f"{name}.{each} has {size} elements in units of {unit}, and tensor is {tensor}"
                yield Fault(where, problem, f"tensor has to divide {size // unit}")


def _size_faults(where: str, topo: ProcessTopology, config: Any) -> Iterator[Fault]:
    """Sizes that do not fit the layout."""
    tensor, stages, layers = topo.get_dim("tensor"), topo.get_dim("pipe"), config.num_hidden_layers
    heads = config.num_attention_heads
    for what, size in (
        ("attention heads", heads),
        ("key-value heads", getattr(config, "num_key_value_heads", None) or heads),
        ("elements in its intermediate layers", getattr(config, "intermediate_size", 0)),
    ):
        if isinstance(size, int) and size % tensor:
            yield Fault(
                where, f"it has {size} {what}, and tensor is {tensor}", f"tensor has to divide {size}"
            )
    if layers < stages:
        yield Fault(where, f"it has {layers} layers, and pipe is {stages}", "a stage has one layer at least")


def _built(whole: nn.Module, stage: int, stages: int) -> Stage:
    return Stage(whole, Place(ModelName("small"), topology(pipe=stages), stage, torch.device("cpu")))


def network_faults(where: str, topo: ProcessTopology, arguments: Mapping[str, Any]) -> list[Fault]:
    """The reasons why a `causal_lm` with these `arguments` cannot have this layout: its sizes, or a family
    whose parts compute something else than the whole (`families`). Nothing of its size is made. Raises
    `SpecError` when its configuration cannot be read."""
    config = configuration(where, arguments.get("config"), arguments.get("path", ""))
    critic, family = bool(arguments.get("critic")), config.model_type
    if why := refusal(config, _built, "", critic=critic):
        remedy = "use a network of another family; docs/experiments.md lists them"
        return [Fault(where, f"the family {family} cannot run: {why}", remedy)]
    if faults := [*_size_faults(where, topo, config)]:
        return faults
    return [
        Fault(
            where, f"the family {family} cannot run with {axis}={topo.get_dim(axis)}: {why}", f"use {axis}=1"
        )
        for axis in ("pipe", "tensor")
        if topo.get_dim(axis) > 1 and (why := refusal(config, _built, axis, critic=critic))
    ]


def configuration(where: str, config: Mapping[str, Any] | None, path: str) -> Any:
    """The configuration of the network at `path`, or with the settings `config`. Raises `SpecError`."""
    settings = dict(config or {})
    try:
        from transformers import AutoConfig
    except ImportError as error:
        problem = f"its network is one of transformers, which cannot be imported: {first_line(error)}"
        raise SpecError([Fault(where, problem, "pip install transformers")]) from error
    try:
        if path:
            return AutoConfig.from_pretrained(path)
        return AutoConfig.for_model(settings.pop("model_type", "llama"), **settings)
    except Exception as error:
        # Whatever transformers raises for a name, a file or a setting that is wrong.
        problem = f"transformers does not read its configuration: {first_line(error)}"
        raise SpecError([Fault(where, problem, "correct its path or its config")]) from error
