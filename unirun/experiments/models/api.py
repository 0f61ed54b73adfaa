"""The parts of a call: a `Model`, the `ModelBackend` that has prepared it, and the `ModelInterface` that uses it."""

from __future__ import annotations

import functools
import json
import math
import struct
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save
from torch.distributed.device_mesh import DeviceMesh

from unirun.atomic import writing
from unirun.errors import CheckpointDamaged, UsageError
from unirun.experiments.graph import MicroBatchSpec, ModelName, ProcessTopology
from unirun.experiments.sample import SequenceSample
from unirun.values import Value


@dataclass(frozen=True)
class Place:
    """The place of one shard of a model: its coordinates, its device, and the mesh of all of the model's
    ranks, whose dimensions are the axes of `topo`. Without torch.distributed there is no mesh, and one
    rank."""

    name: ModelName
    topo: ProcessTopology
    rank: int
    device: torch.device
    mesh: DeviceMesh | None = None
    seed: int = 0

    @property
    def pipe(self) -> int:
        """Its stage."""
        return self.topo.coordinates(self.rank)["pipe"]

    @property
    def data(self) -> int:
        """Its data-parallel rank."""
        return self.topo.coordinates(self.rank)["data"]

    @property
    def tensor(self) -> int:
        """Its tensor-parallel rank."""
        return self.topo.coordinates(self.rank)["tensor"]

    @property
    def last_stage(self) -> bool:
        """True if outputs of the network are here."""
        return self.pipe == self.topo.get_dim("pipe") - 1

    @property
    def is_dp_head(self) -> bool:
        """True if the metrics of this rank are used: it is tensor-parallel rank 0 of the last pipeline stage."""
        return self.last_stage and self.tensor == 0

    def group(self, axis: str) -> Any:
        """The process group along this axis; None if the axis has size 1."""
        if self.mesh is None or self.topo.get_dim(axis) == 1:
            return None
        return self.mesh.get_group(axis)


class FinetuneSpec(Value):
    """The amount of training that a model gets, for schedules of the learning rate."""

    total_train_epochs: int
    dataset_size: int
    train_batch_size: int

    @property
    def total_train_steps(self) -> int:
        """Steps in all; what does not fill a batch at the end of an epoch is left out."""
        return self.total_train_epochs * (self.dataset_size // self.train_batch_size)


class GenerationConfig(Value):
    """The settings of generation: `n` for each prompt, of `max_new_tokens` at most, ending with a stop token.
    Without `greedy`, tokens are drawn with `temperature` from the `top_p` mass and the `top_k` likeliest ones
    (0: from all). Raises `UsageError` for others."""

    n: int = 1
    max_new_tokens: int = 64
    min_new_tokens: int = 0
    greedy: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.n < 1 or self.temperature < 0.0 or not 0.0 < self.top_p <= 1.0 or self.top_k < 0:
            raise UsageError(
                f"n={self.n}, temperature={self.temperature}, top_p={self.top_p}, top_k={self.top_k}",
                "n is 1 or more, temperature 0 or more, top_p above 0 and at most 1, top_k 0 (from all) or more",
            )


class Generated(Value, gc=True):
    """Sequences of one data-parallel rank: for each prompt its `n` continuations, the logarithms of the probabilities
    with which their tokens were drawn, and whether each has ended by itself."""

    tokens: list[list[torch.Tensor]]
    logprobs: list[list[torch.Tensor]]
    ended: list[list[bool]]

    def after(self, prompts: SequenceSample, key: str = "packed_prompts") -> SequenceSample:
        """The `prompts` with their continuations, `n` sequences for each id: ``packed_input_ids``, ``prompt_mask``,
        which is true for tokens of the prompt, and ``packed_logprobs``, which are 0 for these."""
        tokens, masks, logprobs = [], [], []
        for prompt, answers, chances in zip(prompts.sequences(key), self.tokens, self.logprobs, strict=True):
            tokens.append([torch.cat([prompt, answer]) for answer in answers])
            masks.append([torch.arange(len(each)) < len(prompt) for each in tokens[-1]])
            logprobs.append([torch.cat([torch.zeros(len(prompt)), chance]) for chance in chances])
        data = {"packed_input_ids": tokens, "prompt_mask": masks, "packed_logprobs": logprobs}
        return SequenceSample.of(data, prompts.ids)


Loss = Callable[[torch.Tensor, SequenceSample], tuple[torch.Tensor, Mapping[str, torch.Tensor | float]]]
"""Takes the outputs of a micro-batch, packed like its tokens, and the micro-batch, both on the model's device. Returns
the loss as a sum, and sums to log."""

Weight = Callable[[SequenceSample], float]
"""The weight of a micro-batch, such as its number of tokens. The sum of losses is divided by the sum of weights."""


class PipelinableEngine(Protocol):
    """A network that is ready to run, in whatever layout. All ranks of its model call the same methods in the same
    order, each with the sequences of its data-parallel rank. `key` is the key of a sample's tokens."""

    def train_batch(
        self,
        sample: SequenceSample,
        key: str,
        spec: MicroBatchSpec,
        loss: Loss,
        weight: Weight,
        reductions: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, float]:
        """One step of the optimizer. The loss is summed over all data-parallel ranks and divided by the sum of weights.

        Returns the values that `loss` logs, ``loss`` itself, ``grad_norm`` and ``lr``; the same on all ranks.
        A value that micro-batches log is added up over all of them and divided by the sum of weights, which
        gives a mean, unless `reductions` names ``sum``, ``max`` or ``min`` for it.
        """

    def forward(self, sample: SequenceSample, key: str, spec: MicroBatchSpec) -> torch.Tensor | None:
        """The outputs for each token, packed in the order of `sample`, on the CPU. None except on the last stage."""

    def generate(
        self,
        sample: SequenceSample,
        key: str,
        spec: MicroBatchSpec,
        how: GenerationConfig,
        *,
        seed: int,
        stop: int | Collection[int] | None = None,
        stop_strings: Sequence[str] = (),
        tokenizer: Any = None,
    ) -> Generated | None:
        """Continue each sequence. None except on the last stage. As many are continued at the same time as the largest
        micro-batch has; as soon as one has ended, the next one begins. Each has random numbers of its own, so equal
        seeds give equal sequences, whatever the micro-batches are. A sequence ends with any of the tokens `stop`, by
        default those of the network's generation config, or with a token that completes any of `stop_strings` in the
        text of the `tokenizer`."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its parameters and buffers by the names of the whole network; parts are DTensors."""

    def state(self) -> dict[str, Any]:
        """The part of a checkpoint that this rank has to give: its shards of the parameters and of the
        optimizer's state. On the CPU the result shares memory with them."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, of the same rank in the same layout."""

    def offload(self, *, keep: bool) -> None:
        """Free the device memory of the parameters. With `keep`, they go to host memory; otherwise they are dropped."""

    def fetch(self) -> None:
        """Undo `offload`. What was not kept has no values yet."""


@dataclass
class Model:
    """A network, its tokenizer, and how often it was trained (`version`). `module` is the part of the network that this
    rank has, `engine` what the backend makes of it."""

    place: Place
    module: torch.nn.Module
    tokenizer: Any
    engine: PipelinableEngine | None = None
    version: int = 0

    @property
    def name(self) -> ModelName:
        """Its name."""
        return self.place.name

    @property
    def device(self) -> torch.device:
        """The device that it runs on."""
        return self.place.device

    def running(self) -> PipelinableEngine:
        """The engine, which is there once the backend has initialized the model."""
        assert self.engine is not None, "the backend has not initialized this model"
        return self.engine


class ModelBackend:
    """Prepares models. Registered with `register_backend`."""

    def initialize(self, model: Model, spec: FinetuneSpec) -> Model:
        """Give `model` its engine. All ranks of the model call it."""
        raise NotImplementedError

    def save(self, model: Model, path: Path) -> None:
        """Write what this rank needs to go on: one file for each rank, in the directory `path`."""
        with writing(path / f"{model.place.rank:05}.pt", lasting=True) as file:
            torch.save({"version": model.version, "state": model.running().state()}, file)

    def load(self, model: Model, path: Path) -> None:
        """Go on from what `save` wrote. Raises `CheckpointDamaged`."""
        file = path / f"{model.place.rank:05}.pt"
        # A file of torch has its directory at the end.
        if not zipfile.is_zipfile(file):
            raise CheckpointDamaged(f"{file} cannot be read: it is missing, or was cut")
        found = torch.load(file, map_location="cpu", weights_only=True)
        model.version = found["version"]
        model.running().load_state(found["state"])

    def destroy(self, model: Model) -> None:
        """Give back all that the model has."""
        model.engine = None


class ModelInterface:
    """The operations of an algorithm on a model. Register it with `register_interface`, and define the
    methods that the algorithm needs.

    Each method is called in all ranks of the model, with the sequences of its data-parallel rank. All tensor-parallel
    ranks of the last stage must return the same sample. Metrics are taken from ranks with `Place.is_dp_head`: the mean
    over data-parallel ranks, weighted by samples, unless `reductions` says ``sum``, ``max`` or ``min`` for a name.
    """

    reductions: ClassVar[Mapping[str, str]] = {}

    def generate(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> SequenceSample | None:
        """New sequences."""
        raise NotImplementedError(f"{type(self).__name__} has no generate()")

    def inference(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> SequenceSample | None:
        """More data of these sequences."""
        raise NotImplementedError(f"{type(self).__name__} has no inference()")

    def train_step(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> dict[str, float]:
        """Train on these sequences. Returns metrics, which are then reduced over all data-parallel ranks."""
        raise NotImplementedError(f"{type(self).__name__} has no train_step()")

    def accepts(self, trajectories: SequenceSample) -> bool:
        """False for the trajectories of one prompt that are not worth a train step, as they are all alike: in an
        asynchronous trial others take their place. It is called as they arrive, beside other calls."""
        return True

    def evaluate(self, model: Model, sample: SequenceSample) -> dict[str, float]:
        """Sums over data that is held out, ``count`` among them; the master adds those of all ranks that speak, and
        divides by the count, unless `reductions` says otherwise. Nothing by default."""
        return {}

    def save(self, model: Model, path: Path) -> None:
        """Write the model for others to use. All ranks call it. By default one rank writes a directory that
        transformers reads."""

        save_whole(model, path)


# A model as others read it: a directory of transformers, whose tensors are whole and in one file.

FILE = "model.safetensors"

HEAD, SCORE = "lm_head.weight", "score.weight"
"""The last layer of a network, and its name in the directory of a critic (`Portable.describe`)."""


def saved_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors that `save_whole` has written to the directory `path`, or those of this file."""
    found = load_file(path / FILE if path.is_dir() else path)
    return {HEAD if name == SCORE else name: tensor for name, tensor in found.items()}


@runtime_checkable
class Portable(Protocol):
    """A network that can write a description of itself, with which other programs make it again."""

    def describe(self, path: Path) -> Mapping[str, str]:
        """Write it to the directory `path`. Returns the names of tensors that have another one there."""


@torch.no_grad()
def load_whole(model: Model, path: Path) -> None:
    """Give a model that is whole in this process the tensors in the directory `path`."""
    saved = saved_tensors(path)
    for name, tensor in model.running().tensors().items():
        tensor.copy_(saved[name])


@torch.no_grad()
def save_whole(model: Model, path: Path) -> None:
    """Write the tensors of all stages, by their names in the whole network, to the directory `path`, with the network's
    configuration and the tokenizer if they are of transformers. All ranks of the model call it; the first one of the
    last stage writes. It gathers one tensor after the other, so no rank has more than one in whole besides its own. A
    model without a network has none."""
    if model.engine is None:
        return
    place, own = model.place, model.running().tensors()
    stages = _by_stage(place, {name: (tuple(t.shape), t.dtype) for name, t in own.items()})
    whole = {name: about for some in stages for name, about in some.items()}
    if not (place.is_dp_head and place.data == 0):
        for _ in _gathered(place, own, stages):
            pass
        return
    renamed = model.module.describe(path) if isinstance(model.module, Portable) else {}
    header, places = _layout({renamed.get(name, name): about for name, about in whole.items()})
    with writing(path / FILE, private=False, lasting=True) as file:
        file.write(header)
        for name, tensor in _gathered(place, own, stages):
            file.seek(places[renamed.get(name, name)])
            file.write(_bytes_of(tensor).numpy().data)
    if hasattr(model.tokenizer, "save_pretrained"):
        model.tokenizer.save_pretrained(path)


_About = tuple[tuple[int, ...], torch.dtype]
"""The shape and the type of a tensor."""


def _by_stage(place: Place, own: dict[str, _About]) -> list[dict[str, _About]]:
    """The tensors of each stage. One that several stages have, as tied embeddings, is that of the last of them."""
    group = place.group("pipe")
    if group is None:
        return [own]
    stages: list[Any] = [None] * place.topo.get_dim("pipe")
    dist.all_gather_object(stages, own, group=group)
    later: set[str] = set()
    for number in reversed(range(len(stages))):
        stages[number] = {name: about for name, about in stages[number].items() if name not in later}
        later |= stages[number].keys()
    return stages


def _gathered(
    place: Place, own: Mapping[str, torch.Tensor], stages: Sequence[Mapping[str, _About]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor in whole, on the CPU: in the first rank of the last stage all of them, in others those of their own
    stage. All ranks have to walk through them."""
    # DTensor takes long to import.
    from torch.distributed.tensor import DTensor

    group, last = place.group("pipe"), len(stages) - 1
    first = place.data == place.tensor == 0
    for stage, some in enumerate(stages):
        for name, (shape, dtype) in some.items():
            if stage == place.pipe:
                tensor = own[name]
                full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
                if first and stage != last:
                    dist.send(_bytes_of(full), group=group, group_dst=last)
            elif first and place.pipe == last:
                full = torch.empty(shape, dtype=dtype)
                dist.recv(_bytes_of(full), group=group, group_src=stage)
            else:
                continue
            yield name, full


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor; they are its own memory, if it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _layout(tensors: Mapping[str, _About]) -> tuple[bytes, dict[str, int]]:
    """The header of a file of safetensors, and the place of each tensor in that file."""
    # Those with larger elements come first, so that each begins at a multiple of the size of its elements.
    order = sorted(tensors.items(), key=lambda each: (-each[1][1].itemsize, each[0]))
    about: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in order:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        about[name] = {"dtype": _name_of(dtype), "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(about).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + about[name]["data_offsets"][0] for name in tensors}


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    """The name that a type has in files of safetensors."""
    file = save({"": torch.empty(0, dtype=dtype)})
    name: str = json.loads(file[8:])[""]["dtype"]
    return name
