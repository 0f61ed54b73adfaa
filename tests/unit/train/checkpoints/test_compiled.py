"""Checkpoints of compiled models: they have the names of the model, and load whatever is compiled or wrapped then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.waiting import WAIT_TIMEOUT
from unirun.train import unwrap
from unirun.train.checkpoints import CheckpointStrategy, Folder, Manifest
from unirun.train.checkpoints.state import load, plain_state, put_into
from unirun.train.checkpoints.writer import CheckpointWriter

pytestmark = pytest.mark.leaves

NAMES = [
    "0.weight",
    "0.bias",
    "1.weight",
    "1.bias",
    "1.running_mean",
    "1.running_var",
    "1.num_batches_tracked",
]


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plain() -> Any:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def in_parts() -> Any:
    model = plain()
    model[0], model[1] = torch.compile(model[0]), torch.compile(model[1])
    return model


def shared_out(model: Any) -> Any:
    fully_shard(model)
    return model


NESTINGS: dict[str, Callable[[], Any]] = {
    "plain": plain,
    "compiled": lambda: torch.compile(plain()),
    "compiled DDP": lambda: torch.compile(DDP(plain())),
    "DDP of a compiled model": lambda: DDP(torch.compile(plain())),
    "compiled parts": in_parts,
    "compiled DDP of compiled parts": lambda: torch.compile(DDP(in_parts())),
    "compiled FSDP2": lambda: torch.compile(shared_out(plain())),
    "FSDP2 of a compiled model": lambda: shared_out(torch.compile(plain())),
    "FSDP2 of compiled parts": lambda: shared_out(in_parts()),
}


def saved(path: Path, state: Any) -> tuple[Folder, Manifest]:
    folder = Folder(str(path))
    writer = CheckpointWriter(
        folder, CheckpointStrategy(), 0, 1, 1, group=lambda: dist.new_group(backend="gloo")
    )
    writer.save(state, {})
    writer.commit(1).result(WAIT_TIMEOUT)
    writer.close()
    return folder, folder.manifest(1)


def weights(model: Any) -> list[Any]:
    tensors = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.state_dict().values()]
    return [each.tolist() for each in tensors]


@pytest.mark.parametrize("nesting", NESTINGS)
def test_a_state_has_the_names_of_the_model(nesting: str) -> None:
    state = plain_state({"model": NESTINGS[nesting]()})["model"]
    assert list(state) == NAMES
    assert {path: each["version"] for path, each in state._metadata.items()} == {"": 1, "0": 1, "1": 2}


@pytest.mark.parametrize("nesting", NESTINGS)
def test_a_checkpoint_of_it_loads_into_every_other(tmp_path: Path, nesting: str) -> None:
    model = NESTINGS[nesting]()
    folder, manifest = saved(tmp_path, {"model": model})
    for other in NESTINGS.values():
        into = other()
        load(folder, manifest, {"model": into})
        assert weights(into) == weights(model)


@pytest.mark.parametrize("nesting", ["plain", "compiled", "compiled parts"])
def test_each_part_learns_of_which_version_its_state_is(nesting: str) -> None:
    state = NESTINGS[nesting]().state_dict()
    for other in (plain(), in_parts()):
        read = list[int]()
        for norm in (each for each in other.modules() if isinstance(each, nn.BatchNorm1d)):
            norm.register_load_state_dict_pre_hook(lambda *of, read=read: read.append(of[3]["version"]))
        put_into({"model": other}, plain_state({"model": state}))
        assert read == [2]


@pytest.mark.parametrize("shard", [False, True], ids=["whole", "in parts"])
def test_a_state_dict_that_was_saved_with_the_names_of_the_compiled_model_loads_too(
    tmp_path: Path, *, shard: bool
) -> None:
    model = NESTINGS["compiled FSDP2" if shard else "compiled"]()
    folder, manifest = saved(tmp_path, {"model": model.state_dict()})
    assert manifest.sharded == shard
    for name in ("plain", "compiled DDP", "compiled parts", "compiled FSDP2"):
        into = NESTINGS[name]()
        load(folder, manifest, {"model": into})
        assert weights(into) == weights(model)


@pytest.mark.parametrize("nesting", ["compiled", "compiled DDP", "DDP of a compiled model"])
def test_unwrap_gives_the_model_inside_of_all_wrappers(nesting: str) -> None:
    assert type(unwrap(NESTINGS[nesting]())) is nn.Sequential
