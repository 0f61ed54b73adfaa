"""The same forward passes, steps and generation in several layouts of a model, also with ranks without sequences.

``layouts.py FOLDER 111-ddp 221-fsdp2-tied``: the digits are ranks along data, tensor and pipe. In a folder for each layout,
each data-parallel rank writes what it has found, and one rank the network after all steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

from unirun.errors import TrainingFailed
from unirun.experiments import (
    FinetuneSpec,
    GenerationConfig,
    MicroBatchSpec,
    Model,
    ModelName,
    PipelinableEngine,
    Place,
    SequenceSample,
    topology,
)
from unirun.experiments.models.api import save_whole
from unirun.experiments.models.backends import ShardedBackend, TrainBackend, causal_lm
from unirun.values import show_ranks

SEQUENCES = 7
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def sample(rank: int, ranks: int, count: int = SEQUENCES) -> SequenceSample:
    """This data-parallel rank's part of the first `count` sequences, of 3 to 11 tokens."""
    chance = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 12, (SEQUENCES,), generator=chance).tolist()
    tokens = [torch.randint(1, 64, (length,), generator=chance) for length in lengths]
    whole = SequenceSample.of({"tokens": tokens}, [str(number) for number in range(SEQUENCES)])
    return whole.reorder(range(rank, count, ranks))


def loss(logits: torch.Tensor, part: SequenceSample) -> tuple[torch.Tensor, dict[str, float]]:
    """The cross entropy of all tokens but the first ones, as a sum."""
    pairs = zip(logits.split(part.lengths("tokens")), part.sequences("tokens"), strict=True)
    found = [cross_entropy(out[:-1], tokens[1:], reduction="sum") for out, tokens in pairs]
    most = float(max(part.lengths("tokens"), default=0))
    return torch.stack(found).sum(), {"sequences": float(len(part)), "longest": most}


LONGEST = {"longest": "max"}


def same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    return all(
        map(torch.equal, [row for rows in one for row in rows], [row for rows in other for row in rows])
    )


def refused(engine: PipelinableEngine, place: Place, mine: SequenceSample) -> None:
    """A step whose loss is not finite in one data-parallel rank is an error in all ranks, and changes nothing."""
    last = place.topo.get_dim("data") - 1

    def broken(logits: torch.Tensor, part: SequenceSample) -> tuple[torch.Tensor, dict[str, float]]:
        found, more = loss(logits, part)
        return found * (float("nan") if place.data == last else 1.0), more

    before = {name: tensor.clone() for name, tensor in engine.state()["tensors"].items()}
    ranks = place.topo.matching(data=last, pipe=place.topo.get_dim("pipe") - 1)
    with pytest.raises(TrainingFailed, match="the loss is not finite") as caught:
        engine.train_batch(mine, "tokens", MicroBatchSpec(2), broken, lambda part: float(len(part)))
    where = f"rank{'s' * (len(ranks) > 1)} {show_ranks(ranks)} of actor@0"
    assert where in caught.value.problem, caught.value
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.state()["tensors"].items())


def main(folder: Path, data: int, tensor: int, pipe: int, backend: str, tied: str) -> None:
    """Run it all in one layout, and write the results."""
    torch.set_num_threads(1)
    topo = topology(data=data, tensor=tensor, pipe=pipe)
    mesh = None
    if topo.world_size() > 1:
        grid = torch.arange(topo.world_size()).view(topo.dims)
        mesh = DeviceMesh("cpu", grid, mesh_dim_names=topo.axes)
    if dist.get_rank() >= topo.world_size():
        return
    folder.mkdir(exist_ok=True)
    place = Place(ModelName("actor"), topo, dist.get_rank(), torch.device("cpu"), mesh, seed=3)
    kind = {"ddp": TrainBackend, "fsdp2": ShardedBackend}[backend]
    model = Model(place, causal_lm(place, config={**CONFIG, "tie_word_embeddings": bool(tied)}), None)
    # With SGD and lr=1, a step subtracts exactly the gradient.
    engine = kind(lr=1.0, optimizer="sgd", clip=0.0).initialize(model, FinetuneSpec(1, 8, 8)).running()
    mine, spec = sample(place.data, data), MicroBatchSpec(2)
    outputs = engine.forward(mine, "tokens", spec)
    weight = lambda part: float(part.total("tokens") - len(part))  # noqa: E731 - one line says it
    before = {name: tensor.clone() for name, tensor in engine.state()["tensors"].items()}
    figures = [engine.train_batch(mine, "tokens", spec, loss, weight, LONGEST) for _ in range(2)]
    how = GenerationConfig(greedy=True, max_new_tokens=3)
    made = engine.generate(mine, "tokens", spec, how, stop=0, seed=0)
    at_once = engine.generate(mine, "tokens", MicroBatchSpec(), how, stop=0, seed=0)
    assert at_once is None if made is None else same(at_once.tokens, made.tokens)
    # One sequence: other data-parallel ranks have none.
    single = sample(place.data, data, 1)
    alone = engine.forward(single, "tokens", spec)
    engine.generate(single, "tokens", spec, how, stop=0, seed=0)
    figures.append(engine.train_batch(single, "tokens", spec, loss, weight, LONGEST))
    assert alone is None or alone.shape == (single.total("tokens"), CONFIG["vocab_size"])
    state = engine.state()
    assert any(not torch.equal(before[name], tensor) for name, tensor in state["tensors"].items())
    engine.load_state(state)
    refused(engine, place, mine)
    save_whole(model, folder)
    if outputs is not None and made is not None and place.is_dp_head:
        parts = outputs.split(mine.sizes("tokens"))
        found = {
            each: (part, made.tokens[at][0])
            for at, (each, part) in enumerate(zip(mine.ids, parts, strict=True))
        }
        torch.save((found, figures), folder / f"{place.data}.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    root, *layouts = sys.argv[1:]
    for layout in layouts:
        sizes, chosen, tied = f"{layout}-".split("-")[:3]
        main(Path(root, layout), *map(int, sizes), chosen, tied)
        dist.barrier()
    dist.destroy_process_group()
