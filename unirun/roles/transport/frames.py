"""The frames of the socket transport, as bytes.

::

    kind(1) flags(1) nothing(2) buffers(4) head(4) tag(8)
    length of each buffer, 8 each | segment(8), if SHARED | head | buffers

`head` is the length of the head. With the flag `SHARED` the buffers are not in the stream: the descriptor of the
memory that holds them, one behind the other at multiples of `ALIGN`, comes with the frame.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from unirun.errors import FrameError

_HEADER = struct.Struct("<BBxxIIQ")

REQUEST, REPLY, RELEASE = 1, 2, 3
"""`RELEASE`: the receiver needs the segment `tag` no more."""

SHARED = 1
ALIGN = 64
INLINE = 1 << 18
"""Buffers of more bytes than this in all go through shared memory."""

MAX_HEAD = 1 << 31
MAX_BUFFERS = 1 << 24
_START = 1 << 18


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. `sizes` are the lengths of its buffers; `inline` holds them, unless it is shared."""

    kind: int
    tag: int
    head: bytes
    sizes: tuple[int, ...]
    inline: tuple[memoryview, ...]
    segment: int | None = None


def encode_header(kind: int, tag: int, head: int, sizes: list[int], segment: int | None = None) -> bytes:
    """What stands before the head of a frame."""
    shared = segment is not None
    lengths = [*sizes, segment] if segment is not None else sizes
    return _HEADER.pack(kind, SHARED if shared else 0, len(sizes), head, tag) + struct.pack(
        f"<{len(lengths)}Q", *lengths
    )


def offsets(sizes: tuple[int, ...] | list[int]) -> tuple[list[int], int]:
    """Where buffers of these sizes lie in a segment, and the size of the whole."""
    found, end = [], 0
    for size in sizes:
        found.append(end)
        end += -(-size // ALIGN) * ALIGN
    return found, end


class FrameParser:
    """Finds the frames in a stream of bytes, which are received into `space` and told with `received`."""

    def __init__(self) -> None:
        self._buffer = bytearray(_START)
        self._begin = self._end = 0

    def space(self) -> memoryview:
        """Where the next bytes belong."""
        return memoryview(self._buffer)[self._end :]

    def received(self, count: int) -> Iterator[Frame]:
        """`count` bytes have come. Raises `FrameError` for bytes that are no frame."""
        self._end += count
        while (need := self._needed()) <= self._end - self._begin:
            yield self._take()
        if self._begin == self._end:
            self._begin = self._end = 0
            if len(self._buffer) > _START:
                self._buffer = bytearray(_START)
        elif self._end == len(self._buffer) or (self._begin and self._begin + need > len(self._buffer)):
            # Room for the frame that has begun. A frame that says it is large gets it as it comes.
            left = self._end - self._begin
            fresh = bytearray(max(min(need, 16 * left), _START))
            fresh[:left] = memoryview(self._buffer)[self._begin : self._end]
            self._buffer, self._begin, self._end = fresh, 0, left

    def _needed(self) -> int:
        """Bytes of the frame at the front, as far as they are known."""
        have = self._end - self._begin
        if have < _HEADER.size:
            return _HEADER.size
        kind, flags, buffers, head, _ = _HEADER.unpack_from(self._buffer, self._begin)
        if (
            kind not in (REQUEST, REPLY, RELEASE)
            or flags & ~SHARED
            or head > MAX_HEAD
            or buffers > MAX_BUFFERS
        ):
            raise FrameError(
                f"a frame of kind {kind} with flags {flags}, {buffers} buffers and a head of {head} bytes"
            )
        shared = bool(flags & SHARED)
        lengths = buffers + shared
        need = _HEADER.size + 8 * lengths
        if shared or have < need:
            return int(need + head)
        inline = sum(struct.unpack_from(f"<{buffers}Q", self._buffer, self._begin + _HEADER.size))
        if inline > INLINE:
            raise FrameError(f"a frame with {inline} bytes of buffers in the stream")
        return int(need + head + inline)

    def _take(self) -> Frame:
        kind, flags, buffers, head, tag = _HEADER.unpack_from(self._buffer, self._begin)
        shared = bool(flags & SHARED)
        at = self._begin + _HEADER.size
        lengths = struct.unpack_from(f"<{buffers + shared}Q", self._buffer, at)
        at += 8 * (buffers + shared)
        view = memoryview(self._buffer)
        text = bytes(view[at : at + head])
        at += head
        inline = []
        if not shared:
            for size in lengths:
                inline.append(memoryview(bytearray(view[at : at + size])))
                at += size
        self._begin = at
        segment = lengths[-1] if shared else None
        return Frame(kind, tag, text, lengths[:buffers], tuple(inline), segment)
