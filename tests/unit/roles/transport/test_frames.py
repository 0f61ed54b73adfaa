"""Frames in a stream of bytes, however it is cut, and whatever else may come."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from unirun.errors import FrameError
from unirun.roles.transport.frames import (
    ALIGN,
    INLINE,
    MAX_BUFFERS,
    MAX_HEAD,
    MAX_INLINE,
    RELEASE,
    REPLY,
    REQUEST,
    SHARED,
    SMALL,
    Frame,
    FrameParser,
    encode_header,
    offsets,
    stream_of,
)

NUMBERS = st.integers(0, (1 << 64) - 1)


def parse(chunks: Iterable[bytes], most: int = INLINE) -> list[Frame]:
    """The frames in these chunks, each received as it comes or, where there is less room, in parts."""
    parser, found = FrameParser(most), list[Frame]()
    for chunk in chunks:
        left = memoryview(chunk)
        while left:
            space = parser.space()
            assert len(space), "there is always room"
            part = left[: len(space)]
            space[: len(part)] = part
            found += parser.received(len(part))
            left = left[len(part) :]
    return found


def bytes_of(frame: Frame) -> bytes:
    """A frame as it is sent."""
    header = encode_header(frame.kind, frame.tag, len(frame.head), list(frame.sizes), frame.segment)
    if sum(map(len, frame.inline)) > INLINE:
        return b"".join(stream_of(header + frame.head, frame.inline))
    return b"".join((header, frame.head, *frame.inline))


def inline_frame(kind: int, tag: int, head: bytes, buffers: list[bytes]) -> Frame:
    """A frame with its buffers."""
    sizes = tuple(len(buffer) for buffer in buffers)
    return Frame(kind, tag, head, sizes, tuple(memoryview(bytearray(buffer)) for buffer in buffers))


INLINE_FRAMES = st.builds(
    inline_frame,
    st.sampled_from([REQUEST, REPLY]),
    NUMBERS,
    st.binary(max_size=300),
    st.lists(st.binary(max_size=300), max_size=5),
)
SHARED_FRAMES = st.builds(
    lambda tag, head, sizes, segment: Frame(REQUEST, tag, head, tuple(sizes), (), segment),
    NUMBERS,
    st.binary(max_size=300),
    st.lists(NUMBERS, max_size=5),
    NUMBERS,
)
FRAMES = st.lists(
    INLINE_FRAMES | SHARED_FRAMES | st.builds(lambda tag: Frame(RELEASE, tag, b"", (), ()), NUMBERS)
)


@given(FRAMES, st.data())
def test_frames_are_the_same_however_the_stream_is_cut(frames: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(map(bytes_of, frames))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert parse(chunks) == frames


@pytest.mark.parametrize("sizes", [[0], [1, 0, 1], [INLINE], [INLINE // 2, INLINE // 2], [1] * 3000])
def test_frames_of_extreme_sizes(sizes: list[int]) -> None:
    frame = inline_frame(REPLY, 7, b"h" * 1_000_000, [bytes(size) for size in sizes])
    small = inline_frame(REQUEST, 8, b"", [])
    stream = bytes_of(small) + bytes_of(frame) + bytes_of(small)
    assert parse([stream]) == [small, frame, small]
    assert parse([stream[:20], stream[20:500_000], stream[500_000:]]) == [small, frame, small]


SIZES = st.lists(
    st.sampled_from([0, 1, 63, 64, 65, SMALL - 1, SMALL, INLINE, INLINE + 1, 1 << 20]), min_size=1, max_size=4
)


@examples(40)
@given(st.lists(SIZES, min_size=1, max_size=3), st.data())
def test_frames_with_large_buffers_are_the_same_however_the_stream_is_cut(
    frames: list[list[int]], data: st.DataObject
) -> None:
    sent = [
        inline_frame(REQUEST, tag, b"head", [bytes([tag + n + 1]) * size for n, size in enumerate(sizes)])
        for tag, sizes in enumerate(frames)
    ]
    stream = b"".join(map(bytes_of, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert parse(chunks, MAX_INLINE) == sent


def test_large_buffers_are_received_where_they_stay() -> None:
    frame = inline_frame(REQUEST, 1, b"head", [bytes(1 << 20), b"x" * 100, bytes(1 << 20)])
    stream, parser = bytes_of(frame), FrameParser(MAX_INLINE)
    parser.space()[:100] = stream[:100]
    assert list(parser.received(100)) == []
    rest = parser.space()
    assert len(rest) == len(stream) - 100, "all that is missing goes to its final place"
    rest[:] = stream[100:]
    (found,) = parser.received(len(rest))
    assert found == frame
    assert found.inline[0].obj is rest.obj


def received(parser: FrameParser, *sizes: int, filled: bytes = b"x") -> Frame:
    """A frame with large buffers."""
    stream = bytes_of(inline_frame(REQUEST, 1, b"", [filled * size for size in sizes]))
    parser.space()[:64] = stream[:64]
    assert list(parser.received(64)) == []
    parser.space()[:] = stream[64:]
    (found,) = parser.received(len(stream) - 64)
    return found


def address(frame: Frame) -> int:
    """The address of its first buffer."""
    return torch.frombuffer(frame.inline[0], dtype=torch.uint8).data_ptr()


def test_memory_that_nobody_uses_any_more_is_used_again() -> None:
    parser = FrameParser(MAX_INLINE)
    first = received(parser, 1 << 20, 1 << 20)
    one, part = address(first), first.inline[1][5:9]
    second = received(parser, 1 << 21, filled=b"y")
    other = address(second)
    assert other != one
    del first
    third = received(parser, 1 << 21, filled=b"z")
    assert address(third) not in (one, other), "a part of it is in use"
    assert bytes(part) == b"xxxx"
    assert bytes(second.inline[0][:4]) == b"yyyy"
    known = address(third)
    del third
    fourth = received(parser, (1 << 21) - 300, filled=b"w")
    assert address(fourth) == known
    assert bytes(fourth.inline[0][:4]) + bytes(fourth.inline[0][-4:]) == b"w" * 8


def test_a_tensor_over_received_memory_keeps_it() -> None:
    parser = FrameParser(MAX_INLINE)
    tensors = [
        torch.frombuffer(received(parser, 1 << 20, filled=bytes([n])).inline[0], dtype=torch.uint8)
        for n in range(5)
    ]
    assert [tensor.unique().tolist() for tensor in tensors] == [[0], [1], [2], [3], [4]]


def test_memory_that_is_too_large_is_not_kept() -> None:
    parser = FrameParser(MAX_INLINE)
    received(parser, 1 << 23)
    received(parser, 1 << 20)
    assert [array.nbytes for array in parser.spare._arrays] == [1 << 20]


def test_large_buffers_are_sent_from_where_they_are() -> None:
    large, small = memoryview(bytearray(1 << 20)), memoryview(b"x" * 100)
    pieces = list(stream_of(b"begin", [small, large, small, small]))
    assert [len(piece) for piece in pieces] == [5 + 128, 1 << 20, 256]
    assert isinstance(pieces[1], memoryview)
    assert pieces[1].obj is large.obj


def test_a_frame_for_which_there_is_no_memory_is_refused() -> None:
    with pytest.raises(FrameError, match="there is no memory for a frame of"):
        parse([encode_header(REQUEST, 1, 0, [MAX_INLINE])], MAX_INLINE)
    with pytest.raises(FrameError, match="bytes of buffers in the stream"):
        parse([encode_header(REQUEST, 1, 0, [MAX_INLINE, 1])], MAX_INLINE)


def test_the_room_for_a_large_head_is_given_back() -> None:
    parser = FrameParser()
    usual, head = len(parser.space()), b"x" * (4 << 20)
    left = memoryview(bytes_of(inline_frame(REQUEST, 1, head, [])))
    found = list[Frame]()
    while left:
        space = parser.space()
        part = left[: len(space)]
        space[: len(part)] = part
        found += parser.received(len(part))
        left = left[len(part) :]
    assert [frame.head for frame in found] == [head]
    assert len(parser.space()) == usual


def test_more_buffers_than_two_bytes_can_count() -> None:
    frame = Frame(REQUEST, 1, b"head", tuple(range(70_000)), (), 5)
    assert parse([bytes_of(frame)]) == [frame]


def test_what_is_received_next_does_not_change_what_came() -> None:
    first, second = (
        inline_frame(REQUEST, 1, b"first", [b"aaaa"]),
        inline_frame(REQUEST, 2, b"other", [b"bbbb"]),
    )
    parser, found = FrameParser(), list[Frame]()
    for frame in (first, second):
        data = bytes_of(frame)
        parser.space()[: len(data)] = data
        found += parser.received(len(data))
    assert found == [first, second]
    found[0].inline[0][:] = b"zzzz"
    assert bytes(found[1].inline[0]) == b"bbbb"


@examples(300)
@given(st.lists(st.binary(max_size=100), max_size=5))
def test_noise_is_a_frame_error_at_worst(chunks: list[bytes]) -> None:
    with contextlib.suppress(FrameError):
        parse(chunks)


@examples(300)
@given(FRAMES.filter(bool), st.data())
def test_a_stream_with_errors_is_a_frame_error_at_worst(frames: list[Frame], data: st.DataObject) -> None:
    stream = bytearray(b"".join(map(bytes_of, frames)))
    for _ in range(data.draw(st.integers(1, 3))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FrameError):
        parse([bytes(stream)])


@pytest.mark.parametrize(
    "header",
    [
        encode_header(0, 1, 0, []),
        encode_header(5, 1, 0, []),
        bytes([REQUEST, SHARED | 2]) + encode_header(REQUEST, 1, 0, [])[2:],
        encode_header(REQUEST, 1, MAX_HEAD + 1, []),
        encode_header(REQUEST, 1, 0, [INLINE, 1]),
        encode_header(REQUEST, 1, 0, [1 << 63, 1 << 63]),
        encode_header(REQUEST, 1, 0, [])[:4] + (MAX_BUFFERS + 1).to_bytes(4, "little") + bytes(12),
    ],
    ids=["kind-0", "kind-5", "flags", "head", "inline", "overflow", "buffers"],
)
def test_what_no_frame_begins_with_is_told_at_once(header: bytes) -> None:
    with pytest.raises(FrameError, match="a frame "):
        parse([header])


@given(st.lists(st.integers(0, 10_000), max_size=50))
def test_buffers_in_a_segment_are_aligned_and_apart(sizes: list[int]) -> None:
    places, total = offsets(sizes)
    assert all(place % ALIGN == 0 for place in places)
    ends = [place + size for place, size in zip(places, sizes, strict=True)]
    assert all(end <= place for end, place in zip(ends, places[1:], strict=False))
    assert total >= max(ends, default=0)
