"""Families of decoders in layouts of two ranks: each is equal to one rank, or refused.

``families.py FILE llama qwen3``: FILE gets an object with an entry for each family; each has, for each layout, "equal",
"refused: …", "differs: …" or "failed: …". A network has the sizes of `families.small`, and all of it is in float64, so
that no difference is taken for rounding.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from layouts import loss, sample
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh

from unirun.errors import SpecError
from unirun.experiments import (
    FinetuneSpec,
    GenerationConfig,
    MicroBatchSpec,
    Model,
    ModelName,
    Place,
    topology,
)
from unirun.experiments.models.api import save_whole
from unirun.experiments.models.backends import ShardedBackend, TrainBackend, causal_lm
from unirun.experiments.models.families import MAX_PARAMETERS, doubles, small

LAYOUTS = {"tensor": topology(tensor=2), "pipe": topology(pipe=2), "fsdp2": topology(data=2)}

EXPERTS = {
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}

SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": EXPERTS,
    "dots1": EXPERTS,
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
}
"""Settings of families whose defaults make no network."""


ROUNDING = 1e-8
"""Largest relative difference of values that are the same but for the order of sums."""

NARROW = {"hidden_size": 64, "head_dim": 16}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 16,
}
OTHERS = {
    "ffn_dim": 64,
    "intermediate_size_mlp": 32,
    "linear_head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "lru_width": 64,
    "moe_num_experts": 16,
    "n_routed_experts": 16,
    "num_experts": 16,
    "num_local_experts": 16,
    "unpadded_vocab_size": 64,
}
"""Sizes that a small network has at most, where its family can have them."""


def config_of(kind: str) -> dict[str, Any]:
    """A small configuration without dropout, with the narrowest layers that its family can have; the default one where
    none can be made."""
    for sizes in (NARROW | LATENT | OTHERS, NARROW | LATENT, NARROW | OTHERS, NARROW, {}):
        try:
            default = transformers.AutoConfig.for_model(kind, **SETTINGS.get(kind, {}))
            found = small(default).to_dict()
            found |= {name: min(found[name], size) for name, size in sizes.items() if found.get(name)}
            found |= {
                name: 0.0 for name, value in found.items() if "drop" in name and isinstance(value, float)
            }
            # torch's product of all experts at once has no float64.
            found |= {"model_type": kind, "experts_implementation": "eager"}
            network = transformers.AutoConfig.for_model(**found)
            with torch.device("meta"):
                made = transformers.AutoModelForCausalLM.from_config(network)
            if sum(parameter.numel() for parameter in made.parameters()) < MAX_PARAMETERS:
                transformers.AutoModelForCausalLM.from_config(network)(torch.zeros(1, 3, dtype=torch.long))
                return found
        except Exception:  # noqa: BLE001 - causal_lm refuses it and says why
            continue
    return {"model_type": kind, **SETTINGS.get(kind, {})}


def differ(ours: torch.Tensor, theirs: torch.Tensor, scale: torch.Tensor) -> str:
    """By how much of `scale` they differ, if it is more than the rounding of float64."""
    most, largest = float((ours - theirs).abs().max()), float(scale.abs().max())
    rounding = ROUNDING * largest + 1e-14 * float(theirs.abs().max())
    return f"differ by {most / largest if largest else most:.1e}" if not most <= rounding else ""


class Found:
    """The results of a model in one layout, as far as this rank knows them."""

    def __init__(self, place: Place, backend: TrainBackend, config: dict[str, Any], folder: Path) -> None:
        weights = folder / "weights.safetensors"
        more = {"weights": str(weights)} if weights.exists() else {}
        stage = causal_lm(place, config=config, dtype="float64", **more)
        if not weights.exists():
            # What is zero or one in a new network hides differences.
            chance = torch.Generator().manual_seed(5)
            with torch.no_grad():
                for parameter in stage.parameters():
                    parameter += 0.1 * torch.randn(parameter.shape, generator=chance)
            # Tied parameters are saved twice.
            apart = {name: value.clone() for name, value in stage.named(stage.state_dict()).items()}
            save_file(apart, weights)
        self.before: dict[str, torch.Tensor] = load_file(weights)
        model = Model(place, stage, None)
        engine = backend.initialize(model, FinetuneSpec(1, 8, 8)).running()
        mine, spec = sample(place.data, place.topo.get_dim("data")), MicroBatchSpec(2)
        self.outputs: dict[str, torch.Tensor] = {}
        self.generated: dict[str, list[int]] = {}
        output = engine.forward(mine, "tokens", spec)
        if output is not None:
            self.outputs = dict(zip(mine.ids, output.split(mine.sizes("tokens")), strict=True))
        how = GenerationConfig(greedy=True, max_new_tokens=3)
        made = engine.generate(mine, "tokens", MicroBatchSpec(), how, stop=0, seed=0)
        if made is not None:
            self.generated = {
                each: rows[0].tolist() for each, rows in zip(mine.ids, made.tokens, strict=True)
            }
        # With SGD and lr=1 a step subtracts the gradient, here one that is clipped.
        self.figures = engine.train_batch(
            mine, "tokens", spec, loss, lambda part: float(part.total("tokens"))
        )
        save_whole(model, folder)
        if place.topo.world_size() > 1:
            dist.barrier()
        self.network: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")

    def difference(self, one: Found) -> str:
        """The first difference from the results of `one` rank; empty if there is none."""
        for name, value in self.outputs.items():
            if why := differ(value, one.outputs[name], one.outputs[name]):
                return f"outputs of {name} {why}"
        if self.network.keys() != one.network.keys():
            return f"parameters have other names: {sorted(self.network.keys() ^ one.network.keys())[:3]}"
        for name, value in self.network.items():
            if why := differ(value, one.network[name], one.network[name] - one.before[name]):
                return f"gradients of {name} {why}"
        for name in ("loss", "grad_norm"):
            ours, theirs = self.figures[name], one.figures[name]
            if not abs(ours - theirs) <= ROUNDING * abs(theirs):
                return f"{name}: {ours} and {theirs}"
        for each, tokens in self.generated.items():
            if tokens != one.generated[each]:
                return f"generated of {each}: {tokens} and {one.generated[each]}"
        return ""


def tried(make: Callable[[], Found]) -> Found | str:
    """The results of a layout, or the state of one that cannot run."""
    try:
        return make()
    except SpecError as error:
        return f"refused: {error.faults[0]}"
    except Exception as error:  # noqa: BLE001 - the walk tells it
        return f"failed: {type(error).__name__}: {error}"


def states(kind: str, meshes: dict[str, DeviceMesh]) -> dict[str, str]:
    """The state of a family in each layout."""
    config, rank, name, cpu = config_of(kind), dist.get_rank(), ModelName("actor"), torch.device("cpu")
    given: list[Any] = [None, None]
    if rank == 0:
        folder = Path(tempfile.mkdtemp())
        alone = Place(name, topology(), 0, cpu, seed=3)
        given = [folder, tried(lambda: Found(alone, TrainBackend(1.0, "sgd"), config, folder))]
    dist.broadcast_object_list(given)
    folder, one = given
    if isinstance(one, str):
        return dict.fromkeys(LAYOUTS, one)
    found: dict[str, str] = {}
    for layout, topo in LAYOUTS.items():
        backend = (ShardedBackend if layout == "fsdp2" else TrainBackend)(1.0, "sgd")
        place = Place(name, topo, rank, cpu, meshes[layout], seed=3)
        ours = tried(lambda place=place, backend=backend: Found(place, backend, config, folder))  # type: ignore[misc]
        if isinstance(ours, str):
            state = ours
        else:
            why = ours.difference(one)
            state = f"differs: {why}" if why else "equal"
        each: list[Any] = [None, None]
        dist.all_gather_object(each, state)
        found[layout] = next((some for some in each if some != "equal"), "equal")
    shutil.rmtree(folder, ignore_errors=True)
    return found


def main(file: Path, kinds: list[str]) -> None:
    """Walk these families."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    meshes = {
        layout: DeviceMesh("cpu", torch.arange(2).view(topo.dims), mesh_dim_names=topo.axes)
        for layout, topo in LAYOUTS.items()
    }
    found = {}
    for kind in kinds:
        begin = time.monotonic()
        found[kind] = states(kind, meshes)
        if dist.get_rank() == 0:
            print(f"{kind} [{time.monotonic() - begin:.1f} s] {found[kind]}", flush=True)
            file.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    with doubles():
        main(Path(sys.argv[1]), sys.argv[2:])
    dist.destroy_process_group()
