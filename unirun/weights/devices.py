"""Accelerators as channels of weights use them: `DeviceInterface` is all that they ask of one. What is CUDA's own is
behind it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from unirun.errors import UnirunError
from unirun.wire.reporting import report


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


# CUDA as a `DeviceInterface`: memory with interprocess handles, of which the owner decides when it is freed.
#
# It does not come from torch's allocator: blocks of that are shared with other tensors, have no handle where segments
# are expandable, and stay when a process that has opened them is killed. NVIDIA's ``cuda.bindings`` makes the calls;
# PyTorch for CUDA installs it.
#
# See "Interprocess Communication" in the CUDA C++ Programming Guide. A process opens memory of any device that its own
# one has peer access to, also of one that ``CUDA_VISIBLE_DEVICES`` hides from it.


class CudaDevice:
    """The CUDA device with this number in this process."""

    def __init__(self, number: int) -> None:
        """Raises ImportError without ``cuda.bindings``."""
        self._device = torch.device("cuda", number)
        self._cuda: Any = importlib.import_module("cuda.bindings.runtime")
        self._own: set[int] = set()

    def allocate(self, size: int) -> torch.Tensor:
        """As `DeviceInterface.allocate`."""
        with torch.cuda.device(self._device):
            address = int(self._call(self._cuda.cudaMalloc, max(size, 1)))
        self._own.add(address)
        return self._tensor(address, size)

    def copy(self, into: Sequence[torch.Tensor], from_: Sequence[torch.Tensor]) -> None:
        """As `DeviceInterface.copy`, on torch's current stream."""
        with torch.cuda.device(self._device):
            if into:
                torch._foreach_copy_([*into], [*from_], non_blocking=True)

    def finish(self) -> None:
        """As `DeviceInterface.finish`."""
        try:
            torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError as error:
            raise DeviceError(f"{self._device}: {error}") from error

    def lend(self, memory: torch.Tensor) -> bytes:
        """As `DeviceInterface.lend`: the handle, 64 bytes, and the size, 8."""
        with torch.cuda.device(self._device):
            handle = self._call(self._cuda.cudaIpcGetMemHandle, memory.data_ptr())
        return bytes(handle.reserved) + memory.nbytes.to_bytes(8, "little")

    def borrow(self, handle: bytes) -> torch.Tensor:
        """As `DeviceInterface.borrow`."""
        if len(handle) != 72:
            raise DeviceError(f"a handle of {len(handle)} bytes is none of CUDA")
        there = self._cuda.cudaIpcMemHandle_t()
        there.reserved = handle[:64]
        with torch.cuda.device(self._device):
            flags = self._cuda.cudaIpcMemLazyEnablePeerAccess
            address = int(self._call(self._cuda.cudaIpcOpenMemHandle, there, flags))
        return self._tensor(address, int.from_bytes(handle[64:], "little"))

    def end(self, memory: torch.Tensor) -> None:
        """As `DeviceInterface.end`."""
        address = memory.data_ptr()
        with torch.cuda.device(self._device):
            if address in self._own:
                self._own.discard(address)
                self._call(self._cuda.cudaFree, address)
            else:
                self._call(self._cuda.cudaIpcCloseMemHandle, address)

    def _tensor(self, address: int, size: int) -> torch.Tensor:
        # The form that torch takes without a copy.
        place = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=place), device=self._device)

    def _call(self, function: Any, *arguments: object) -> Any:
        error, *values = function(*arguments)
        if int(error) != 0:
            raise DeviceError(f"{self._device}: {function.__name__} failed: {error.name}")
        return values[0] if values else None


@cache
def cuda_device(number: int) -> DeviceInterface | None:
    """The CUDA device with this number; None without ``cuda.bindings``, which is told once."""
    try:
        return CudaDevice(number)
    except ImportError:
        report("unirun: cuda.bindings is not installed: weights go through the memory of the host")
        return None
