"""The frames of the socket transport, as bytes.

::

    kind(1) flags(1) nothing(2) buffers(4) head(4) tag(8)
    length of each buffer, 8 each | segment(8), if SHARED | head | buffers

`head` is the length of the head. Buffers of more than `INLINE` bytes in all are one behind the other at multiples of
`ALIGN`: with the flag `SHARED` in memory whose descriptor comes with the frame, else in the stream, from which they are
read into their final place.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from unirun.errors import FrameError

# Memory for what is received again and again, as weights are: that of earlier ones, when nobody uses it any more.
#
# New pages take longer to get than to fill.


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
            import torch

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


_HEADER = struct.Struct("<BBxxIIQ")

REQUEST, REPLY, RELEASE, OPEN = 1, 2, 3, 4
"""`RELEASE`: the receiver does not need the segment `tag` any more. `OPEN`: the first frame of a connection; its head
is the name of the handler that the requests are for."""

_KINDS = (REQUEST, REPLY, RELEASE, OPEN)

SHARED = 1
ALIGN = 64
INLINE = 1 << 18
"""Bytes of all buffers up to which they are read with other frames."""

MAX_INLINE = 1 << 46
SMALL = 1 << 16
"""Bytes of a buffer from which it is written by itself."""

MAX_HEAD = 1 << 31
MAX_BUFFERS = 1 << 24
_START = 1 << 18


@dataclass(slots=True)
class Frame:
    """One frame. `sizes` are the lengths of its buffers; `inline` holds them, unless it is shared."""

    kind: int
    tag: int
    head: bytes
    sizes: tuple[int, ...] = ()
    inline: tuple[memoryview, ...] = ()
    segment: int | None = None


def encode_header(kind: int, tag: int, head: int, sizes: list[int], segment: int | None = None) -> bytes:
    """The bytes before the head of a frame."""
    if not sizes and segment is None:
        return _HEADER.pack(kind, 0, 0, head, tag)
    shared = segment is not None
    lengths = [*sizes, segment] if segment is not None else sizes
    return _HEADER.pack(kind, SHARED if shared else 0, len(sizes), head, tag) + struct.pack(
        f"<{len(lengths)}Q", *lengths
    )


def offsets(sizes: tuple[int, ...] | list[int]) -> tuple[list[int], int]:
    """The offsets of buffers of these sizes in a segment, and the size of the segment."""
    found, end = [], 0
    for size in sizes:
        found.append(end)
        end += -(-size // ALIGN) * ALIGN
    return found, end


class FrameParser:
    """Parses a stream of bytes, which are read into `space` and announced with `received`. A frame has at most `most`
    bytes of buffers in the stream."""

    def __init__(self, most: int = INLINE) -> None:
        self._give_room(_START)
        self._begin = self._end = 0
        self._most = most
        # A frame with large buffers that has begun, and the part of its memory that is not read yet.
        self._large: Frame | None = None
        self._rest = memoryview(b"")
        self.spare = SpareMemory()

    def _give_room(self, size: int) -> None:
        self._view = memoryview(bytearray(size))

    def space(self) -> memoryview:
        """The memory into which the next bytes are read."""
        return self._rest if self._large is not None else self._view[self._end :]

    def received(self, count: int) -> Iterator[Frame]:
        """Parse `count` more bytes in `space`. Raises `FrameError` for malformed frames."""
        if self._large is not None:
            self._rest = self._rest[count:]
            if not self._rest.nbytes:
                whole, self._large = self._large, None
                self._rest = memoryview(b"")
                yield whole
            return
        self._end += count
        need = _HEADER.size
        while (have := self._end - self._begin) >= _HEADER.size:
            kind, flags, buffers, head, tag = _HEADER.unpack_from(self._view, self._begin)
            need = self._needed(have, kind, flags, buffers, head)
            if have < need:
                break
            begin, self._begin = self._begin, self._begin + need
            if flags or buffers:
                frame = self._frame(begin + _HEADER.size, kind, flags, buffers, head, tag)
                if not self._rest.nbytes:
                    yield frame
                else:
                    self._large = frame
            else:
                # Most frames have no buffers.
                yield Frame(kind, tag, bytes(self._view[self._begin - head : self._begin]))
            need = _HEADER.size
        if self._begin == self._end:
            self._begin = self._end = 0
            if len(self._view) > _START:
                self._give_room(_START)
        elif self._end == len(self._view) or (self._begin and self._begin + need > len(self._view)):
            # Make room for the frame that has begun. For a large one the room grows as its bytes arrive.
            started = self._view[self._begin : self._end]
            self._give_room(max(min(need, 16 * len(started)), _START))
            self._view[: len(started)] = started
            self._begin, self._end = 0, len(started)

    def _needed(self, have: int, kind: int, flags: int, buffers: int, head: int) -> int:
        """The size of the first frame in bytes, as far as it is known."""
        if kind not in _KINDS or flags & ~SHARED or head > MAX_HEAD or buffers > MAX_BUFFERS:
            raise FrameError(
                f"a frame of kind {kind} with flags {flags}, {buffers} buffers and a head of {head} bytes"
            )
        need = _HEADER.size + 8 * (buffers + flags)
        if flags or not buffers or have < need:
            return need + head
        inline = sum(struct.unpack_from(f"<{buffers}Q", self._view, self._begin + _HEADER.size))
        if inline > self._most:
            raise FrameError(f"a frame with {inline} bytes of buffers in the stream")
        return int(need + head + (inline if inline <= INLINE else 0))

    def _frame(self, at: int, kind: int, flags: int, buffers: int, head: int, tag: int) -> Frame:
        """The frame whose header ends at `at`."""
        lengths = struct.unpack_from(f"<{buffers + flags}Q", self._view, at)
        at += 8 * len(lengths)
        text = bytes(self._view[at : at + head])
        at += head
        if flags:
            return Frame(kind, tag, text, lengths[:-1], (), lengths[-1])
        if sum(lengths) > INLINE:
            return Frame(kind, tag, text, lengths, self._begin_large(lengths))
        inline = []
        for size in lengths:
            inline.append(memoryview(bytearray(self._view[at : at + size])))
            at += size
        return Frame(kind, tag, text, lengths, tuple(inline))

    def _begin_large(self, sizes: tuple[int, ...]) -> tuple[memoryview, ...]:
        """The memory of large buffers, with what has come of them; what has not is read into `_rest`."""
        places, total = offsets(sizes)
        try:
            memory = memoryview(self.spare.take(total))
        except (MemoryError, RuntimeError) as error:
            raise FrameError(f"there is no memory for a frame of {total} bytes") from error
        count = min(self._end - self._begin, total)
        memory[:count] = self._view[self._begin : self._begin + count]
        self._begin += count
        self._rest = memory[count:]
        return tuple(memory[place : place + size] for place, size in zip(places, sizes, strict=True))


def stream_of(begin: bytes, buffers: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    """The buffers to write for a frame that begins with `begin` and has large buffers; only small ones are copied."""
    small: list[bytes | memoryview] = [begin]
    for buffer in buffers:
        padding = bytes(-buffer.nbytes % ALIGN)
        if buffer.nbytes < SMALL:
            small += (buffer, padding)
        else:
            yield b"".join(small)
            yield buffer.cast("B")
            small = [padding]
    yield b"".join(small)
