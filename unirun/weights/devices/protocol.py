"""`Device`: all that channels of weights ask of an accelerator. What is CUDA's own is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from unirun.errors import UnirunError


class DeviceError(UnirunError):
    """The accelerator has no memory left, or cannot open that of another process. Weights go another way then."""


class Device(Protocol):
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
