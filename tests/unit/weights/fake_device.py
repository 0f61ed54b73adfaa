"""A fake GPU in the memory of the CPU, which notices every misuse of memory that processes share."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from unirun.weights.devices import DeviceError

GARBAGE = 0xA5
"""The content of memory that nothing has been written to."""


class MemoryMisuse(AssertionError):
    """Something that would be undefined on a device."""


@dataclass(eq=False)
class Region:
    """Memory that the process `owner` has allocated."""

    owner: int
    memory: torch.Tensor
    borrowers: list[int] = field(default_factory=list)
    writing: int = 0
    freed: bool = False


class FakeMachine:
    """Devices of several processes, which have memory of `room` bytes and can or cannot reach each other."""

    def __init__(self, room: int = 1 << 30, *, reaches: bool = True) -> None:
        self.room, self.reaches = room, reaches
        self.regions: list[Region] = []
        self.lock = threading.RLock()

    def process(self, number: int) -> FakeDevice:
        """The device as this process uses it."""
        return FakeDevice(self, number)

    @property
    def used(self) -> int:
        """Bytes that are allocated."""
        return sum(region.memory.nbytes for region in self.regions if not region.freed)

    @property
    def borrowed(self) -> int:
        """The number of borrowers."""
        return sum(len(region.borrowers) for region in self.regions)


class FakeDevice:
    """A `Device`. Copies are done in `finish`, so that what is read before has garbage in it."""

    def __init__(self, machine: FakeMachine, process: int) -> None:
        self._machine, self._process = machine, process
        self._queue: list[tuple[torch.Tensor, torch.Tensor]] = []

    def allocate(self, size: int) -> torch.Tensor:
        """As `Device.allocate`."""
        with self._machine.lock:
            if self._machine.used + size > self._machine.room:
                raise DeviceError(f"no room for {size} bytes")
            memory = torch.full((size,), GARBAGE, dtype=torch.uint8)
            self._machine.regions.append(Region(self._process, memory))
            return memory

    def copy(self, into: Sequence[torch.Tensor], from_: Sequence[torch.Tensor]) -> None:
        """As `Device.copy`."""
        with self._machine.lock:
            for target, source in zip(into, from_, strict=True):
                read, written = self._region(source), self._region(target)
                if written is not None:
                    if written.owner != self._process:
                        raise MemoryMisuse("memory of another process is written to")
                    if written.borrowers:
                        raise MemoryMisuse("memory is written to while others have borrowed it")
                    written.writing += 1
                if read is not None and read.writing and read.owner != self._process:
                    raise MemoryMisuse("memory is read before it is written")
                self._queue.append((target, source))

    def finish(self) -> None:
        """As `Device.finish`."""
        with self._machine.lock:
            queue, self._queue = self._queue, []
            for target, source in queue:
                self._region(source)
                target.copy_(source)
                written = self._region(target)
                if written is not None:
                    written.writing -= 1

    def lend(self, memory: torch.Tensor) -> bytes:
        """As `Device.lend`."""
        with self._machine.lock:
            region = self._region(memory)
            if region is None or region.owner != self._process:
                raise MemoryMisuse("memory is lent that is not its own")
            if region.writing:
                raise MemoryMisuse("memory is lent before it is written")
            return str(self._machine.regions.index(region)).encode()

    def borrow(self, handle: bytes) -> torch.Tensor:
        """As `Device.borrow`."""
        with self._machine.lock:
            if not self._machine.reaches:
                raise DeviceError("there is no way to the other device")
            if not handle.isdigit() or int(handle) >= len(self._machine.regions):
                raise DeviceError(f"{handle!r} is no handle")
            region = self._machine.regions[int(handle)]
            if region.owner == self._process:
                raise MemoryMisuse("a process opens its own handle")
            if region.freed:
                raise MemoryMisuse("a handle of freed memory is opened")
            region.borrowers.append(self._process)
            return region.memory

    def end(self, memory: torch.Tensor) -> None:
        """As `Device.end`."""
        with self._machine.lock:
            region = self._region(memory)
            if region is None:
                raise MemoryMisuse("memory is given back that is of no device")
            if any(self._region(tensor) is region for pair in self._queue for tensor in pair):
                raise MemoryMisuse("memory is given back while it is used")
            if region.owner == self._process:
                if region.borrowers:
                    raise MemoryMisuse("memory is freed while others have borrowed it")
                region.freed = True
            elif self._process not in region.borrowers:
                raise MemoryMisuse("memory is given back twice")
            else:
                region.borrowers.remove(self._process)

    def _region(self, tensor: torch.Tensor) -> Region | None:
        """The region that a tensor is in. Raises `Misuse` when this process may not use it."""
        for region in self._machine.regions:
            if region.memory.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                if region.freed:
                    raise MemoryMisuse("memory is used that was freed")
                if region.owner != self._process and self._process not in region.borrowers:
                    raise MemoryMisuse("memory of another process is used that is not borrowed")
                return region
        return None
