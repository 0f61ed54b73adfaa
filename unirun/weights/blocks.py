"""Shared memory for versions: memfds that stay mapped, and are written again when nobody reads them any more.

A memfd has no name, so the kernel frees it with the last process that has it, however that ends. Pages that exist are
written several times as fast as new ones, so blocks are kept.
"""

from __future__ import annotations

import fcntl
import os

import torch

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Block:
    """A memfd of `size` bytes, mapped as the bytes `memory`. `readers` are those that may read it now."""

    def __init__(self, number: int, size: int) -> None:
        """Raises OSError if there is no memory."""
        self.number, self.size = number, size
        self.readers: set[str] = set()
        self.handle = os.memfd_create("unirun-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self.handle, 0o600)
            # Reserved now: a page that cannot be had later would be a SIGBUS.
            os.posix_fallocate(self.handle, 0, size)
            fcntl.fcntl(self.handle, fcntl.F_ADD_SEALS, SEALS)
            path = f"/proc/self/fd/{self.handle}"
            self.memory: torch.Tensor = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        except BaseException:
            os.close(self.handle)
            raise

    def close(self) -> None:
        """Close the descriptor. The memory is freed with the last mapping."""
        os.close(self.handle)


class Blocks:
    """The blocks of one publisher. Not thread-safe."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._number = 0

    def take(self, size: int, keep: Block | None) -> Block:
        """A block of at least `size` bytes that nobody reads, and which is not `keep`. Raises OSError if there is no
        memory."""
        free = [block for block in self._blocks if not block.readers and block is not keep]
        chosen = min((b for b in free if b.size >= size), key=lambda block: block.size, default=None)
        for block in free:
            # Too small, or needed for a while as a reader was slow.
            if block is not chosen:
                self._blocks.remove(block)
                block.close()
        if chosen is None:
            self._number += 1
            chosen = Block(self._number, max(size, 1))
            self._blocks.append(chosen)
        return chosen

    def find(self, number: int) -> Block | None:
        """The block with this number; None if there is none any more."""
        return next((block for block in self._blocks if block.number == number), None)

    def close(self) -> None:
        """Give all memory back that nobody else has mapped."""
        while self._blocks:
            self._blocks.pop().close()
