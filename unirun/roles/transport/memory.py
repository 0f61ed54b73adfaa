"""Memory for what is received again and again, as weights are: that of earlier ones, when nobody uses it any more.

New pages take longer to get than to fill.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


class SpareMemory:
    """The memory that was given out last and the one before. Not thread-safe."""

    def __init__(self) -> None:
        self._arrays: list[Any] = []

    def take(self, size: int) -> Any:
        """A numpy array of `size` bytes, which are not zeroed. It is free again with its last view.

        Raises MemoryError or RuntimeError.
        """
        free = [array for array in self._arrays if sys.getrefcount(array) == _UNUSED]
        fitting = (array for array in free if size <= array.nbytes <= 2 * size)
        chosen: Any = min(fitting, key=lambda array: array.nbytes, default=None)
        if chosen is None:
            chosen = torch.empty(size, dtype=torch.uint8).numpy()
        used = [array for array in self._arrays if not any(array is each for each in free)]
        self._arrays = [*used[-1:], chosen]
        return chosen[:size]


def _references() -> int:
    arrays: list[Any] = [object()]
    (found,) = [sys.getrefcount(array) for array in arrays]
    return found


_UNUSED = _references()
"""The value of `sys.getrefcount` for an array that is in a list alone, in a loop over it."""
