"""A shard of a model in a worker: which of its tensors have diverged, and the mesh that it is in."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.unit.experiments.sample_configs import ACTOR, CRITIC
from unirun.experiments.graph import topology
from unirun.experiments.model_worker import ModelShard, ModelWorkerProcess


def shard_of(tensors: dict[str, torch.Tensor]) -> ModelShard:
    """A shard of a model with these parameters and buffers."""
    model: Any = SimpleNamespace(engine=SimpleNamespace(tensors=lambda: tensors))
    about: Any = None
    backend: Any = None
    return ModelShard(about, model, backend)


def test_parameters_and_buffers_that_have_diverged_are_named() -> None:
    tensors = {"weight": torch.ones(3), "mean": torch.zeros(2), "steps": torch.tensor(3)}
    shard = shard_of(tensors)
    shard.begins()
    assert shard.not_finite() == []
    tensors["weight"][1], tensors["mean"][0] = math.nan, math.inf
    assert shard.not_finite() == ["weight", "mean"]


def test_a_buffer_that_was_not_finite_at_the_beginning_is_meant_to_be_so() -> None:
    tensors = {"weight": torch.ones(3), "mask": torch.full((2, 2), -math.inf).triu(1)}
    shard = shard_of(tensors)
    shard.begins()
    assert shard.not_finite() == []
    tensors["weight"][0] = math.nan
    assert shard.not_finite() == ["weight"]


def test_a_model_without_an_engine_has_none() -> None:
    shard = shard_of({})
    shard.model.engine = None
    shard.begins()
    assert shard.not_finite() == []


def test_a_model_has_one_mesh_for_as_long_as_the_process_group_lives() -> None:
    worker: Any = object.__new__(ModelWorkerProcess)
    worker._meshes, worker._meshes_of, worker._device = {}, None, torch.device("cpu")
    worker._resolved = SimpleNamespace(workers_of=lambda name: [0, 1])
    made: list[Any] = []
    for _ in range(2):
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        try:
            meshes = [worker._mesh(name, topology(data=2)) for name in (ACTOR, CRITIC)]
            assert all(worker._mesh(name, topology(data=2)) is mesh for name, mesh in worker._meshes.items())
            assert [mesh.get_group("data").size() for mesh in meshes] == [2, 2]
            made += meshes
        finally:
            dist.destroy_process_group()
    assert len({*map(id, made)}) == 4
