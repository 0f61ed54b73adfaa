"""The places of the pieces of a layout in a block of memory, and views of them there."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy
import torch

from unirun.errors import UnirunError
from unirun.roles.transport.frames import offsets
from unirun.weights.tensors import Box, Layout, Piecewise, dtype_of, geometry, local, part_of, writing
from unirun.wire.reporting import report

# `DeviceInterface`: all that channels of weights ask of an accelerator. What is CUDA's own is behind it.


class DeviceError(UnirunError):
    """The accelerator has no memory left, or cannot open that of another process. Weights go another way then."""


class DeviceInterface(Protocol):
    """One accelerator, as one process uses it.

    Copies are queued. The order in which a version goes from one process to the other is: `copy`, `finish` and `lend`
    in the one, `borrow`, `copy`, `finish` and `end` in the other, then `end` in the first. Memory is not written while
    another process has it.
    """

    def allocate(self, size: int) -> torch.Tensor:
        """Memory of `size` bytes that can be lent. Raises `DeviceError`."""

    def copy(self, into: Sequence[torch.Tensor], from_: Sequence[torch.Tensor]) -> None:
        """Begin to copy tensors, each into that of the same place. Either may be on the host."""

    def finish(self) -> None:
        """Wait until everything that was begun is done. Raises `DeviceError`."""

    def lend(self, memory: torch.Tensor) -> bytes:
        """A handle with which other processes of this host open memory that was allocated here."""

    def borrow(self, handle: bytes) -> torch.Tensor:
        """The memory of another process. Raises `DeviceError` when it cannot be reached from here."""

    def end(self, memory: torch.Tensor) -> None:
        """Give memory back that was allocated or borrowed. Nobody else has borrowed what was allocated."""


# Shared memory for versions: it stays mapped, and is written again when nobody reads it any more.
#
# A memfd has no name, so the kernel frees it with the last process that has it, however that ends. Pages that exist are
# written several times as fast as new ones, so blocks are kept.

PAGE = 1 << 12
"""Bytes. Memory is had in pages."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Block:
    """A memfd of `size` bytes, mapped as the bytes `memory`. `readers` are those that may read it now.

    When there is no shared memory, it is ordinary memory, and `handle` is None; so it is for memory of a `device`.
    """

    def __init__(self, number: int, size: int, device: DeviceInterface | None = None) -> None:
        """Raises `DeviceError`."""
        self.number, self.size, self.device = number, size, device
        self.readers: set[str] = set()
        self.handle: int | None = None
        self.lent = b""
        """With which other processes open the memory of the device."""
        self.memory: torch.Tensor
        if device is not None:
            self.memory = device.allocate(size)
            return
        try:
            self.handle, self.memory = _shared(size)
        except OSError as error:
            report(
                f"unirun: there is no shared memory for {size} bytes of weights ({error.strerror}): "
                "they are sent over sockets, which takes longer"
            )
            self.handle, self.memory = None, torch.empty(size, dtype=torch.uint8)

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last mapping. Memory of a device is freed now."""
        if self.device is not None:
            self.device.end(self.memory)
        if self.handle is not None:
            os.close(self.handle)


def _shared(size: int) -> tuple[int, torch.Tensor]:
    """A sealed memfd, and its memory. Raises OSError."""
    handle = os.memfd_create("unirun-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(handle, 0o600)
        # Reserved now: a page that cannot be had later would be a SIGBUS.
        os.posix_fallocate(handle, 0, size)
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, SEALS)
        return handle, torch.from_file(f"/proc/self/fd/{handle}", shared=True, size=size, dtype=torch.uint8)
    except BaseException:
        os.close(handle)
        raise


class Blocks:
    """The blocks of one process, of which `spare` are kept though nobody needs them. Not thread-safe."""

    def __init__(self, spare: int = 0) -> None:
        self._spare = spare
        self._blocks: list[Block] = []
        self._number = 0

    def take(self, size: int, reader: str, device: DeviceInterface | None = None) -> Block:
        """A block of at least `size` bytes, of which `reader` is the only reader. Raises `DeviceError`."""
        free = [block for block in self._blocks if not block.readers and block.device is device]
        fitting = (block for block in free if size <= block.size <= 2 * size + PAGE)
        chosen = min(fitting, key=lambda block: block.size, default=None)
        others = [block for block in free if block is not chosen]
        # Of another size, or needed for a while as a reader was slow. The newest ones are kept.
        for block in others[: len(others) - self._spare] if len(others) > self._spare else ():
            self._blocks.remove(block)
            block.close()
        if chosen is None:
            self._number += 1
            chosen = Block(self._number, max(size, 1), device)
            self._blocks.append(chosen)
        chosen.readers.add(reader)
        return chosen

    def find(self, number: int) -> Block | None:
        """The block with this number; None if there is none any more."""
        return next((block for block in self._blocks if block.number == number), None)

    def close(self) -> None:
        """Give all memory back that nobody else has mapped."""
        while self._blocks:
            block = self._blocks.pop()
            # Memory of a device that somebody reads ends with this process.
            if block.device is None or not block.readers:
                block.close()


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
        begins, self.size = offsets(
            [
                piece.box.count * dtype_of(part.tensor.dtype).itemsize
                for part in self.layout.values()
                for piece in part.pieces
            ]
        )
        left = iter(begins)
        return {name: tuple(next(left) for _ in part.pieces) for name, part in self.layout.items()}

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
