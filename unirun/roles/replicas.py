"""The state of replicas: a rank that comes gets that of another one.

It is sent by broadcasts over gloo, which need no more than the group that is formed anyway. The paths of weights need a
channel, declared roles and a publisher that has attached. A point-to-point transfer is not in torch's flight recorder,
so a wait that gloo forgets would not be found.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from unirun.errors import UsageError
from unirun.roles.nested import mapped
from unirun.roles.process_groups import c10d, dist

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Outline:
    """A tensor of a state that is sent."""

    shape: torch.Size
    dtype: torch.dtype


def newer(version: int, state: Callable[[], Any]) -> tuple[int, Any] | None:
    """The greatest version that a rank has, and its state, if it is greater than `version`, which this rank has; else
    None. All ranks of the default group call it. Only the rank that sends its state calls `state`, for a copy.

    Raises `UsageError` without a default group.
    """
    if not dist.is_initialized():
        raise UsageError(
            "a state is taken from another rank in the process group, and there is none",
            "call init_process_group before",
        )
    world = c10d._get_default_group()
    serves_cpu = CPU in world._device_types
    group = world if serves_cpu else dist.new_group(backend="gloo")
    every = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(every, torch.tensor([version]), group=group)
    versions = [int(each) for each in every]
    newest = max(versions)
    found = _shared(versions.index(newest), state, group) if min(versions) < newest else None
    if not serves_cpu:
        dist.destroy_process_group(group)
    return (newest, found) if version < newest else None


def _shared(source: int, state: Callable[[], Any], group: Any) -> Any:
    """The state of the rank `source`, in all ranks."""
    tensors: list[torch.Tensor] = []

    def outlined(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            return Outline(leaf.shape, leaf.dtype)
        return leaf

    def empty(leaf: Any) -> Any:
        if isinstance(leaf, Outline):
            tensors.append(torch.empty(leaf.shape, dtype=leaf.dtype))
            return tensors[-1]
        return leaf

    sends = dist.get_rank() == source
    own = state() if sends else None
    told = [mapped(outlined, own)]
    dist.broadcast_object_list(told, source, group, CPU)
    found = own if sends else mapped(empty, told[0])
    for tensor in tensors:
        # As bytes, since gloo does not know all types.
        dist.broadcast(tensor.view(-1).view(torch.uint8), source, group)
    return found


def in_memory(state: Any) -> Any:
    """A copy of a state, of its tensors in the memory of the host. Raises `UsageError` for sharded tensors."""
    return mapped(_in_memory, state)


def _in_memory(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return copy.deepcopy(leaf)
    if hasattr(leaf, "placements"):
        raise UsageError(
            "the state has a sharded tensor, of which no other rank has this part",
            "save a checkpoint of it in files, and load that",
        )
    return leaf.detach().to("cpu", copy=True).contiguous()
