"""The places of the pieces of a layout in a block of memory, and views of them there."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch

from unirun.weights.blocks import Block
from unirun.weights.layout import Box, Layout
from unirun.weights.memory import geometry, same_bits, writing
from unirun.weights.tensors import Piecewise, dtype_of, local, part_of

ALIGN = 64
"""Bytes. torch copies aligned memory with vector instructions."""

LARGE = 1 << 20
"""Bytes of a tensor from which on it is copied as memory."""

CHUNK = 16 << 20
"""Bytes that one thread copies at a time."""

THREADS = 4
"""Threads that copy at most, if there are so many processors."""


class Packing:
    """The pieces of `layout`, one behind the other; `offsets` are where, in bytes, for each tensor and piece.

    `number` is that which the publisher has given it.
    """

    def __init__(
        self, layout: Layout, number: int, offsets: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        self.layout, self.number = layout, number
        self.size = 0
        self.offsets = dict(offsets) if offsets is not None else self._placed()
        self._views: dict[int, list[torch.Tensor]] = {}

    def _placed(self) -> dict[str, tuple[int, ...]]:
        found = {}
        for name, part in self.layout.items():
            begins = []
            for piece in part.pieces:
                begins.append(self.size)
                size = piece.box.count * dtype_of(part.tensor.dtype).itemsize
                self.size += -(-size // ALIGN) * ALIGN
            found[name] = tuple(begins)
        return found

    def pack(self, tensors: Mapping[str, Piecewise], block: Block) -> None:
        """Copy this rank's pieces of `tensors` into `block`."""
        if block.number not in self._views:
            # A publisher has two or three blocks. Views keep the memory of the others.
            self._views = {n: views for n, views in self._views.items() if len(self._views) < 3}
            self._views[block.number] = [
                self.view(block.memory, name, piece.box)
                for name, part in self.layout.items()
                for piece in part.pieces
            ]
        pieces = [
            part_of(_resolved(tensors[name]), part, piece.box)
            for name, part in self.layout.items()
            for piece in part.pieces
        ]
        if block.device is None:
            copy_all(self._views[block.number], pieces)
        else:
            block.device.copy(self._views[block.number], pieces)
            block.device.finish()

    def changed(self, tensors: Mapping[str, Piecewise], block: Block) -> set[str]:
        """The names of `tensors` of which this rank's pieces differ from those in `block`, in any bit."""
        found = set()
        for name, part in self.layout.items():
            for piece in part.pieces:
                mine = part_of(_resolved(tensors[name]), part, piece.box)
                if not same_bits(mine, self.view(block.memory, name, piece.box)):
                    found.add(name)
                    break
        return found

    def view(self, memory: torch.Tensor, name: str, box: Box) -> torch.Tensor:
        """The elements of `box`, which are in one piece, in the memory of a block."""
        part = self.layout[name]
        dtype = dtype_of(part.tensor.dtype)
        for piece, begin in zip(part.pieces, self.offsets[name], strict=True):
            if piece.box == box or piece.box.meet(box) == box:
                raw = memory.narrow(0, begin, piece.box.count * dtype.itemsize)
                found = raw.view(dtype).view(piece.box.size)
                if piece.box == box:
                    return found
                for axis, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
                    found = found.narrow(axis, start - piece.box.start[axis], size)
                return found
        raise ValueError(f"{box} of {name} is not in one piece")


def _resolved(tensor: Piecewise) -> torch.Tensor:
    """The memory of this rank behind `tensor`, which has the elements themselves, not their conjugates or negatives."""
    return local(tensor).resolve_conj().resolve_neg()


def copy_all(into: Sequence[torch.Tensor], from_: Sequence[torch.Tensor]) -> None:
    """Copy tensors, each into that of the same place: large ones as memory, all others with one call of torch.

    For large memory the C library writes around the caches. A few threads are as fast as the memory is.
    """
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    large: list[tuple[Any, Any]] = []
    for pair in zip(into, from_, strict=True):
        if pair[0].nbytes >= LARGE and all(t.is_cpu and t.is_contiguous() for t in pair):
            target, source = (t.view(-1).view(torch.uint8).numpy() for t in pair)
            large += [
                (target[at : at + CHUNK], source[at : at + CHUNK]) for at in range(0, len(target), CHUNK)
            ]
        else:
            others.append(pair)
    left = iter(large)
    count = min(THREADS, len(os.sched_getaffinity(0)), len(large))
    helpers = [threading.Thread(target=_copy, args=(left,)) for _ in range(count - 1)]
    for helper in helpers:
        helper.start()
    _copy(left)
    for helper in helpers:
        helper.join()
    if others:
        with writing(into):
            torch._foreach_copy_([pair[0] for pair in others], [pair[1] for pair in others])


def _copy(left: Iterator[tuple[Any, Any]]) -> None:
    """Copy what is left, as other threads do; numpy lets them."""
    for target, source in left:
        numpy.copyto(target, source)


def blend(into: Sequence[torch.Tensor], from_: Sequence[torch.Tensor], eta: float) -> None:
    """Make each tensor of floating-point numbers ``eta * from_ + (1 - eta) * into``; copy all others.

    A tensor that is in `into` twice, as tied weights are, is blended once.
    """
    # The tensors are distinct, or the same by two names.
    pairs = {geometry(target): (target, source) for target, source in zip(into, from_, strict=True)}
    with writing(into):
        for target, source in pairs.values():
            if not target.is_floating_point() and not target.is_complex():
                target.copy_(source)
            elif target.dtype.itemsize > 1:
                target.lerp_(source.to(target.device), eta)
            else:
                # There is no arithmetic of float8.
                target.copy_(torch.lerp(target.float(), source.float().to(target.device), eta))
