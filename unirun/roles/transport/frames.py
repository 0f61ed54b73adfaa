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
"""`RELEASE`: the receiver does not need the segment `tag` any more."""

_KINDS = (REQUEST, REPLY, RELEASE)

SHARED = 1
ALIGN = 64
INLINE = 1 << 18
"""Bytes of all buffers up to which they are in the stream; above, they are in shared memory."""

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
    """Parses a stream of bytes, which are read into `space` and announced with `received`."""

    def __init__(self) -> None:
        self._give_room(_START)
        self._begin = self._end = 0

    def _give_room(self, size: int) -> None:
        self._view = memoryview(bytearray(size))

    def space(self) -> memoryview:
        """The memory into which the next bytes are read."""
        return self._view[self._end :]

    def received(self, count: int) -> Iterator[Frame]:
        """Parse `count` more bytes in `space`. Raises `FrameError` for malformed frames."""
        self._end += count
        need = _HEADER.size
        while (have := self._end - self._begin) >= _HEADER.size:
            kind, flags, buffers, head, tag = _HEADER.unpack_from(self._view, self._begin)
            need = self._needed(have, kind, flags, buffers, head)
            if have < need:
                break
            begin, self._begin = self._begin, self._begin + need
            if flags or buffers:
                yield self._frame(begin + _HEADER.size, kind, flags, buffers, head, tag)
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
        if inline > INLINE:
            raise FrameError(f"a frame with {inline} bytes of buffers in the stream")
        return int(need + head + inline)

    def _frame(self, at: int, kind: int, flags: int, buffers: int, head: int, tag: int) -> Frame:
        """The frame whose header ends at `at`."""
        lengths = struct.unpack_from(f"<{buffers + flags}Q", self._view, at)
        at += 8 * len(lengths)
        text = bytes(self._view[at : at + head])
        at += head
        if flags:
            return Frame(kind, tag, text, lengths[:-1], (), lengths[-1])
        inline = []
        for size in lengths:
            inline.append(memoryview(bytearray(self._view[at : at + size])))
            at += size
        return Frame(kind, tag, text, lengths, tuple(inline))
