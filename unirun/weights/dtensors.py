"""DTensors as layouts. Imported when there is one: `torch.distributed.tensor` takes half as long to import as torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def indices_of(tensor: DTensor) -> list[list[int]] | None:
    """The global indices, along each dimension, that this rank has of it; None if it is not in the tensor's mesh.

    Raises ValueError for a partial sum.
    """
    strange = [p for p in tensor.placements if not isinstance(p, Shard | _StridedShard | Replicate)]
    if strange:
        raise ValueError(f"{strange[0]} is no part of a tensor")
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    mesh = tuple(tensor.device_mesh.shape)
    return local_indices(tuple(tensor.shape), mesh, tuple(coordinate), tensor.placements)


def local_indices(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...]
) -> list[list[int]]:
    """The global indices, along each dimension of a tensor of `shape`, that the rank at `coordinate` of `mesh` has.

    As DTensor does it: placements are applied from the left to the right, each to what the one before has left.
    """
    axes = [torch.arange(size) for size in shape]
    for size, number, placement in zip(mesh, coordinate, placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        along = placement.dim
        factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
        one = Shard(0) if factor == 1 else _StridedShard(0, split_factor=factor)
        parts, _ = one._split_tensor(axes[along], size, with_padding=False, contiguous=True)
        axes[along] = parts[number]
    return [axis.tolist() for axis in axes]
