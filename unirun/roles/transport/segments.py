"""Large buffers through shared memory: one copy by the sender, none by the receiver.

A sender writes into a memfd and passes its descriptor. The receiver maps it copy-on-write, so the sender does not see
its changes. When the last tensor over the mapping is freed, the receiver releases the segment with its next frame, and
the sender uses the memory again: existing pages are written four times as fast as new ones.

The size of a memfd is sealed before it is sent, and a receiver maps only sealed ones: reading a mapping beyond the end
of a file that was shrunk raises SIGBUS.
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
"""Bytes of free segments that one connection keeps for reuse."""

MANY = 64
"""Free segments, and segments in use, that are kept at most, as each takes a descriptor."""


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""The content is not sealed, as the memory is used again."""


@dataclass(eq=False)
class Segment:
    """A memfd of `size` bytes; 0 until it was written for the first time."""

    number: int
    handle: int
    size: int


class SegmentPool:
    """The segments of one sender. Not thread-safe."""

    def __init__(self) -> None:
        self._free: list[Segment] = []
        self._lent: dict[int, Segment] = {}
        self._given: set[int] = set()
        self._loans: dict[int, Callable[[], None]] = {}
        self._number = 0

    def write(self, buffers: Sequence[memoryview]) -> Segment:
        """Write `buffers` into a segment and return it. Raises OSError if there is no memory."""
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
            # The receiver has the oldest one for long: give it up, so that its memory is freed with the mapping.
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

    def lend(self, handle: int, size: int, released: Callable[[], None]) -> Segment:
        """Somebody else's memory as a segment; `released` is called at its release, or by `close`."""
        self._number += 1
        self._loans[self._number] = released
        return Segment(self._number, handle, size)

    def release(self, number: int) -> None:
        """The receiver does not need it any more. Raises `FrameError` for a segment that is not in use."""
        if (released := self._loans.pop(number, None)) is not None:
            released()
            return
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
        """Close all segments. Mappings of receivers stay."""
        while self._loans:
            self._loans.popitem()[1]()
        for segment in (*self._free, *self._lent.values()):
            os.close(segment.handle)
        self._free.clear()
        self._lent.clear()


def _write(handle: int, buffer: memoryview, place: int) -> None:
    while buffer.nbytes:
        count = os.pwrite(handle, buffer, place)
        buffer, place = buffer[count:], place + count


def _is_sealed(handle: int) -> bool:
    """Return True if the file behind `handle` is sealed against shrinking. Only a memfd can be."""
    try:
        return bool(fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def map_segment(handle: int, sizes: Sequence[int], released: Callable[[], None]) -> tuple[memoryview, ...]:
    """Map the segment behind `handle`, and close that. Returns the buffers; `released` is called when the last is
    freed.

    Raises `FrameError` if the segment is not sealed or is smaller than the buffers.
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
