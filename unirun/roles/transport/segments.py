"""Large buffers through shared memory: one copy by the sender, none by the receiver.

A sender writes into a memfd and passes the descriptor; the receiver maps it copy-on-write, so what it changes stays
its own. When the last tensor over the mapping is gone, the receiver says so with its next frame, and the sender uses
the memory again: pages that exist already are written four times as fast as new ones.

The size of a memfd that was sent is sealed: touching a mapping beyond the end of its file is a SIGBUS, so
nobody who has the descriptor may shrink it. A receiver maps nothing that is not sealed.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unirun.errors import FrameError
from unirun.roles.transport.frames import offsets

KEEP = 1 << 28
"""Bytes of free segments that one connection keeps for later."""

MANY = 64
"""Segments that are lent, and free ones, from which on no more are kept: each takes a descriptor."""


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Its content is not sealed, as it is used again."""


@dataclass(eq=False)
class Segment:
    """A piece of shared memory of `size` bytes; 0 as long as it is new."""

    number: int
    handle: int
    size: int


class SegmentPool:
    """The segments of one sender. Not thread-safe."""

    def __init__(self) -> None:
        self._free: list[Segment] = []
        self._lent: dict[int, Segment] = {}
        self._given: set[int] = set()
        self._number = 0

    def write(self, buffers: Sequence[memoryview]) -> Segment:
        """A segment that holds `buffers`. Raises OSError when there is no memory."""
        places, total = offsets([buffer.nbytes for buffer in buffers])
        segment = self._take(total)
        try:
            for place, buffer in zip(places, buffers, strict=True):
                _write(segment.handle, buffer.cast("B"), place)
            if segment.size == 0:
                os.ftruncate(segment.handle, total)
                fcntl.fcntl(segment.handle, fcntl.F_ADD_SEALS, SEALS)
                segment.size = total
        except OSError:
            os.close(segment.handle)
            raise
        self._lent[segment.number] = segment
        if len(self._lent) > MANY:
            # What the receiver keeps for long is its own from now on, and gone with its mapping.
            longest = next(iter(self._lent))
            os.close(self._lent.pop(longest).handle)
            self._given.add(longest)
        return segment

    def _take(self, size: int) -> Segment:
        fitting = [s for s in self._free if size <= s.size]
        self._number += 1
        if fitting:
            best = min(fitting, key=lambda s: s.size)
            self._free.remove(best)
            return Segment(self._number, best.handle, best.size)
        return Segment(self._number, os.memfd_create("unirun", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), 0)

    def release(self, number: int) -> None:
        """The receiver needs it no more. Raises `FrameError` for one that was not lent."""
        if number in self._given:
            self._given.remove(number)
            return
        segment = self._lent.pop(number, None)
        if segment is None:
            raise FrameError(f"segment {number} was given back and never lent")
        if segment.size + sum(s.size for s in self._free) > KEEP or len(self._free) >= MANY:
            os.close(segment.handle)
        else:
            self._free.append(segment)

    def close(self) -> None:
        """Close all; receivers keep what they have mapped."""
        for segment in (*self._free, *self._lent.values()):
            os.close(segment.handle)
        self._free.clear()
        self._lent.clear()


def _write(handle: int, buffer: memoryview, place: int) -> None:
    while buffer.nbytes:
        count = os.pwrite(handle, buffer, place)
        buffer, place = buffer[count:], place + count


def _is_sealed(handle: int) -> bool:
    """Whether nobody can shrink the file behind `handle` any more. Only memory files can be sealed."""
    try:
        return bool(fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def map_segment(handle: int, sizes: Sequence[int], released: Callable[[], None]) -> tuple[memoryview, ...]:
    """The buffers in the segment behind `handle`, which is closed. `released` is called when the last is gone.

    Raises `FrameError` when its size can be changed, or is less than that of the buffers.
    """
    places, total = offsets(list(sizes))
    try:
        if not _is_sealed(handle):
            raise FrameError("a segment could be shrunk while it is mapped")
        if os.fstat(handle).st_size < total or not total:
            raise FrameError(f"a segment holds less than {total} bytes")
        # Copy-on-write. Python's own mmap would keep a descriptor for each mapping.
        path = f"/proc/self/fd/{handle}"
        memory: Any = torch.from_file(path, shared=False, size=total, dtype=torch.uint8).numpy()
    except RuntimeError as error:
        raise FrameError(f"a segment of {total} bytes cannot be mapped: {error}") from error
    finally:
        os.close(handle)
    weakref.finalize(memory, released).atexit = False
    view = memoryview(memory)
    return tuple(view[place : place + size] for place, size in zip(places, sizes, strict=True))
