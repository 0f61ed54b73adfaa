"""A shard of a model in a worker: which of its tensors have diverged."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from unirun.experiments.model_worker import ModelShard


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
