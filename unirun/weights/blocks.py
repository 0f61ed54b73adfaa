"""Shared memory for versions: it stays mapped, and is written again when nobody reads it any more.

A memfd has no name, so the kernel frees it with the last process that has it, however that ends. Pages that exist are
written several times as fast as new ones, so blocks are kept.
"""

from __future__ import annotations

import fcntl
import os

import torch

from unirun.weights.devices.protocol import Device
from unirun.wire.reporting import report

PAGE = 1 << 12
"""Bytes. Memory is had in pages."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Block:
    """A memfd of `size` bytes, mapped as the bytes `memory`. `readers` are those that may read it now.

    When there is no shared memory, it is ordinary memory, and `handle` is None; so it is for memory of a `device`.
    """

    def __init__(self, number: int, size: int, device: Device | None = None) -> None:
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

    def take(self, size: int, reader: str, device: Device | None = None) -> Block:
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
