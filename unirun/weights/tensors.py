"""Tensors as layouts: which part of each global tensor a rank has, and views of the memory behind it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from unirun.errors import Fault, UsageError, WeightsError
from unirun.weights.layout import Box, Layout, Part, Piece, Tensor, shared
from unirun.weights.memory import unblendable, unreadable, unwritable

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


# Names of tensors without the part that torch.compile adds.
#
# The module that `torch.compile` returns holds the user's module as ``_orig_mod``, and so do compiled parts of a model:
# ``_orig_mod.layers.0._orig_mod.weight`` is the tensor ``layers.0.weight``. Weights and checkpoints have the latter, so
# that either side may be compiled, as a whole or in parts.

COMPILED = "_orig_mod"
"""The attribute of a compiled module with the module that was compiled."""

T = TypeVar("T")


def original_name(name: str) -> str:
    """`name`, of a tensor or a module, as it is in a model of which nothing is compiled."""
    if COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != COMPILED)


def by_original_name(named: Mapping[str, T]) -> dict[str, T]:
    """The same values in the same order, by `original_name`. Raises `UsageError` when two names become one."""
    found: dict[str, T] = {}
    for name, value in named.items():
        original = original_name(name)
        if original in found:
            raise UsageError(
                f"two tensors are called {original}, one of a compiled module", "rename the other one"
            )
        found[original] = value
    return found


class LocalShard:
    """This rank's part of a larger tensor, where no DTensor says so: tensor parallelism by hand, say.

    ::

        rows = len(w) * ctx.rank  # w is this rank's part of a matrix of which the rows are shared out
        channel.publish({"w": LocalShard(w, shape=(len(w) * ctx.world_size, w.shape[1]), start=(rows, 0))}, version)

    `shape` is that of the whole tensor, in elements; `tensor` is the part that begins at `start` of each dimension. A
    rank that has nothing of a tensor, as the other stages of a pipeline, leaves the name out.
    """

    def __init__(self, tensor: torch.Tensor, *, shape: Sequence[int], start: Sequence[int]) -> None:
        """Raises `UsageError` for a part that is not within the shape."""
        self.tensor, self.shape, self.start = tensor.detach(), tuple(shape), tuple(start)
        ends = [a + n for a, n in zip(self.start, tensor.shape, strict=False)]
        fits = len(self.shape) == len(self.start) == tensor.dim() and min(self.start, default=0) >= 0
        if not fits or any(end > size for end, size in zip(ends, self.shape, strict=True)):
            raise UsageError(
                f"a part {list(tensor.shape)} at {list(self.start)} is not within {list(self.shape)}",
                "shape is that of the whole tensor, start is where the part begins",
            )


Piecewise = torch.Tensor | LocalShard
"""A whole tensor, or this rank's part of one: a DTensor, or a `LocalShard`."""

Weights = nn.Module | Mapping[str, Piecewise]
"""A module, of which the state dict counts (parameters and persistent buffers), or tensors by name."""


def tensors_of(weights: Weights) -> dict[str, Piecewise]:
    """The tensors by `original_name`, detached; they share the memory of `weights`. Raises `WeightsError` for other
    values, and for tensors that have no memory; `UsageError` when two have one name."""
    named = by_original_name(weights.state_dict() if isinstance(weights, nn.Module) else weights)
    faults = [
        Fault(name, f"a {type(value).__name__} is no tensor", "leave it out")
        for name, value in named.items()
        if not isinstance(value, Piecewise)
    ]
    if faults:
        raise WeightsError("weights are tensors by name", faults=faults)
    faults = [fault for name, value in named.items() if (fault := unreadable(name, local(value))) is not None]
    if faults:
        if isinstance(weights, nn.Module):
            faults += [
                Fault(name, "it is on the meta device, too, and in no state dict", COMPUTE)
                for name, buffer in unsaved(weights).items()
                if buffer.is_meta
            ]
        raise WeightsError("these tensors have no elements that could be copied", faults=faults)
    return {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in named.items()}


COMPUTE = "after to_empty(), compute it again"


def unsaved(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of `module`, by `original_name`, that are in no state dict, so that no version has them."""
    saved = module.state_dict().keys()
    return {original_name(name): buffer for name, buffer in module.named_buffers() if name not in saved}


def targets_of(weights: Weights, eta: float = 1.0) -> dict[str, Piecewise]:
    """As `tensors_of`, where all of them can be written, or blended with `eta`. Raises `WeightsError` with every one
    that cannot."""
    tensors = tensors_of(weights)
    mine = {name: local(tensor) for name, tensor in tensors.items()}
    faults = unwritable(mine) + (unblendable(mine) if eta < 1.0 else [])
    if faults:
        raise WeightsError("nothing was received, as these tensors cannot be written", faults=faults)
    return tensors


def assigner(weights: Weights) -> Callable[[str, torch.Tensor], None]:
    """A function that puts a tensor into `weights` under a name. Raises `UsageError` for a mapping that cannot change,
    and `WeightsError` for a module of which the state dict has names that no parameter or buffer has."""
    if isinstance(weights, nn.Module):
        own: dict[str, torch.Tensor] = {}
        own |= weights.named_parameters(remove_duplicate=False)
        own |= weights.named_buffers(remove_duplicate=False)
        own = by_original_name(own)
        strange = [name for name in tensors_of(weights) if name not in own]
        if strange:
            raise WeightsError(
                "assign=True replaces parameters and buffers, and the state dict has other names",
                "receive without assign=True, or into a dict",
                faults=[
                    Fault(name, "the module has no parameter or buffer of this name") for name in strange
                ],
            )

        def assign(name: str, tensor: torch.Tensor) -> None:
            own[name].data = tensor

        return assign
    if not isinstance(weights, MutableMapping):
        raise UsageError(
            "assign=True changes a module or a dict", f"give one, not a {type(weights).__name__}"
        )
    mapping = weights
    keys = {original_name(key): key for key in mapping}

    def put(name: str, tensor: torch.Tensor) -> None:
        mapping[keys[name]] = tensor

    return put


def layout_of(tensors: Mapping[str, Piecewise]) -> Layout:
    """The parts of each tensor that this rank has. Raises `WeightsError` for a DTensor that is no part of a tensor."""
    faults: list[Fault] = []
    layout: Layout = {}
    for name, tensor in tensors.items():
        about = Tensor(tuple(tensor.shape), str(local(tensor).dtype).removeprefix("torch."))
        if not is_dtensor(tensor):
            box = about.whole
            if isinstance(tensor, LocalShard):
                box = Box(tensor.start, tuple(tensor.tensor.shape))
            layout[name] = Part(about, (Piece(box, (0,) * len(box.start)),) if box.count else ())
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


def is_dtensor(tensor: Piecewise) -> bool:
    """Return True if it is a DTensor. There is none where nobody has imported its module, which takes long."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Piecewise) -> torch.Tensor:
    """The memory of this rank behind `tensor`."""
    if isinstance(tensor, LocalShard):
        return tensor.tensor
    if not is_dtensor(tensor):
        return tensor
    mine: torch.Tensor = cast("DTensor", tensor).to_local()
    # The result of a collective that may be under way is a tensor around it.
    wait: Callable[[], torch.Tensor] | None = getattr(mine, "wait", None)
    return wait() if wait is not None else mine


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
