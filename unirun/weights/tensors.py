"""Tensors as layouts: which part of each global tensor a rank has, and views of the memory behind it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from unirun.errors import Fault, UsageError, WeightsError
from unirun.weights.layout import Box, Layout, Part, Piece, Tensor, shared

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Weights = nn.Module | Mapping[str, torch.Tensor]
"""A module, of which the state dict counts (parameters and persistent buffers), or tensors by name."""


def tensors_of(weights: Weights) -> dict[str, torch.Tensor]:
    """The tensors by name, detached; they share the memory of `weights`. Raises `WeightsError` for other values."""
    named: Mapping[str, Any] = weights.state_dict() if isinstance(weights, nn.Module) else weights
    faults = [
        Fault(name, f"a {type(value).__name__} is no tensor", "leave it out")
        for name, value in named.items()
        if not isinstance(value, torch.Tensor)
    ]
    if faults:
        raise WeightsError("weights are tensors by name", faults=faults)
    return {name: value.detach() for name, value in named.items()}


def assigner(weights: Weights) -> Callable[[str, torch.Tensor], None]:
    """What makes a tensor the one of this name in `weights`. Raises `UsageError` for a mapping that cannot change."""
    if isinstance(weights, nn.Module):
        own: dict[str, torch.Tensor] = {}
        own |= weights.named_parameters(remove_duplicate=False)
        own |= weights.named_buffers(remove_duplicate=False)

        def assign(name: str, tensor: torch.Tensor) -> None:
            own[name].data = tensor

        return assign
    if not isinstance(weights, MutableMapping):
        raise UsageError(
            "assign=True changes a module or a dict", f"give one, not a {type(weights).__name__}"
        )
    return weights.__setitem__


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """What this rank has of each tensor. Raises `WeightsError` for a DTensor that is no part of a tensor."""
    faults: list[Fault] = []
    layout: Layout = {}
    for name, tensor in tensors.items():
        about = Tensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if not is_dtensor(tensor):
            whole = about.whole
            layout[name] = Part(about, (Piece(whole, whole.start),) if whole.count else ())
            continue
        from unirun.weights.dtensors import pieces

        try:
            mine = pieces(cast("DTensor", tensor))
        except ValueError as error:
            faults.append(Fault(name, str(error), "redistribute it first"))
            continue
        if mine is not None:
            layout[name] = Part(about, mine)
    if faults:
        raise WeightsError("these tensors have no layout", faults=faults)
    return shared(layout)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. There is none where nobody has imported its module, which takes long."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank behind `tensor`."""
    return cast("DTensor", tensor).to_local() if is_dtensor(tensor) else tensor


def part_of(tensor: torch.Tensor, part: Part, box: Box) -> torch.Tensor:
    """A view of the local `tensor` of which this rank has `part`: the elements of `box`, which are in one piece.

    Raises ValueError when they are not.
    """
    if len(part.pieces) == 1 and part.pieces[0].box == box:
        return tensor
    for piece in part.pieces:
        if piece.box.meet(box) == box:
            for axis, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
                tensor = tensor.narrow(axis, piece.at[axis] + start - piece.box.start[axis], size)
            return tensor
    raise ValueError(f"{box} is not in one piece of {part}")


def dtype_of(name: str) -> torch.dtype:
    """The dtype that torch calls `name`. Raises ValueError for any other."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found
