"""Tensors that are cut over meshes, without processes: what each rank would have."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from unirun.weights.dtensors import local_indices
from unirun.weights.tensors import Layout, Part, Tensor, pieces_of


@dataclass(frozen=True)
class Sharding:
    """The division of a tensor over a mesh."""

    mesh: tuple[int, ...]
    placements: tuple[Any, ...]

    @property
    def coordinates(self) -> list[tuple[int, ...]]:
        """Of all ranks, in order."""
        return [*itertools.product(*(range(size) for size in self.mesh))]

    def indices(self, tensor: torch.Tensor, coordinate: tuple[int, ...]) -> list[list[int]]:
        """The global indices of a rank."""
        return local_indices(tuple(tensor.shape), self.mesh, coordinate, self.placements)

    def local(self, tensor: torch.Tensor, coordinate: tuple[int, ...]) -> torch.Tensor:
        """The tensor of a rank, in memory of its own."""
        for axis, indices in enumerate(self.indices(tensor, coordinate)):
            tensor = tensor.index_select(axis, torch.tensor(indices, dtype=torch.long))
        return tensor.clone()

    def part(self, tensor: torch.Tensor, coordinate: tuple[int, ...]) -> Part:
        """The same as part of a layout."""
        about = Tensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        return Part(about, pieces_of(self.indices(tensor, coordinate)))

    def layouts(self, tensors: Mapping[str, torch.Tensor]) -> list[Layout]:
        """Of all ranks."""
        return [{n: self.part(t, at) for n, t in tensors.items()} for at in self.coordinates]


@st.composite
def shardings(draw: st.DrawFn, dimensions: int = 2) -> Sharding:
    """Meshes of up to 4 × 4 ranks, and placements of tensors with so many dimensions."""
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    along = st.integers(0, dimensions - 1)
    placement = st.one_of(
        st.builds(Shard, along),
        st.just(Replicate()),
        st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), along, st.integers(1, 3)),
    )
    return Sharding(mesh, tuple(draw(placement) for _ in mesh))
