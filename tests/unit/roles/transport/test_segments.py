"""Large buffers in shared memory: written once, mapped once, given back."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch

from unirun.errors import FrameError
from unirun.roles.transport.sockets import KEEP, MANY, SegmentPool, map_segment


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    """One that is closed at the end."""
    pool = SegmentPool()
    yield pool
    pool.close()


def buffer(size: int, value: int = 1) -> memoryview:
    """Something to send."""
    return memoryview(bytearray([value]) * size)


def files() -> int:
    """The number of open descriptors."""
    return len(os.listdir("/proc/self/fd"))


def test_a_segment_is_mapped_as_it_was_written(pool: SegmentPool) -> None:
    parts = [buffer(1000, 1), buffer(0), buffer(1, 2), buffer(100_000, 3)]
    segment = pool.write(parts)
    released: list[bool] = []
    views = map_segment(
        os.dup(segment.handle), [part.nbytes for part in parts], lambda: released.append(True)
    )
    assert [bytes(view) for view in views] == [bytes(part) for part in parts]
    assert released == []
    del views
    assert released == [True]


def test_a_tensor_over_a_part_keeps_all_of_it(pool: SegmentPool) -> None:
    segment = pool.write([buffer(4000), buffer(4000)])
    released: list[bool] = []
    views = map_segment(os.dup(segment.handle), [4000, 4000], lambda: released.append(True))
    tensor = torch.frombuffer(views[1], dtype=torch.uint8)
    del views
    assert released == []
    assert int(tensor.sum()) == 4000
    del tensor
    assert released == [True]


def test_the_receiver_may_write_and_nobody_else_sees_it(pool: SegmentPool) -> None:
    segment = pool.write([buffer(5000, 7)])
    first = map_segment(os.dup(segment.handle), [5000], lambda: None)
    second = map_segment(os.dup(segment.handle), [5000], lambda: None)
    first[0][:] = bytes(5000)
    assert bytes(second[0]) == bytes([7]) * 5000


def test_a_mapping_takes_no_descriptor(pool: SegmentPool) -> None:
    segment = pool.write([buffer(5000)])
    before = files()
    kept = [map_segment(os.dup(segment.handle), [5000], lambda: None) for _ in range(50)]
    assert files() == before
    assert len(kept) == 50


def test_a_released_segment_is_reused(pool: SegmentPool) -> None:
    before = files()
    for value in range(1, 100):
        segment = pool.write([buffer(10_000 - value, value)])
        (view,) = map_segment(os.dup(segment.handle), [10_000 - value], lambda: None)
        assert bytes(view) == bytes([value]) * (10_000 - value)
        pool.release(segment.number)
    assert files() == before + 1


def test_the_smallest_free_segment_that_fits_is_reused(pool: SegmentPool) -> None:
    large, small = pool.write([buffer(100_000)]), pool.write([buffer(10_000)])
    pool.release(large.number)
    pool.release(small.number)
    assert pool.write([buffer(9_000)]).handle == small.handle
    assert pool.write([buffer(9_000)]).handle == large.handle


def test_more_is_made_where_what_is_free_is_too_small(pool: SegmentPool) -> None:
    small = pool.write([buffer(100)])
    pool.release(small.number)
    large = pool.write([buffer(100_000, 5)])
    (view,) = map_segment(os.dup(large.handle), [100_000], lambda: None)
    assert bytes(view) == bytes([5]) * 100_000


def test_a_segment_in_use_is_not_written_again(pool: SegmentPool) -> None:
    first = pool.write([buffer(5000, 1)])
    (view,) = map_segment(os.dup(first.handle), [5000], lambda: None)
    for value in range(2, 6):
        pool.write([buffer(5000, value)])
    assert bytes(view) == bytes([1]) * 5000


def test_what_receivers_keep_for_long_takes_no_descriptor(pool: SegmentPool) -> None:
    before = files()
    segments = [pool.write([buffer(100)]) for _ in range(3 * MANY)]
    assert files() <= before + MANY
    for segment in segments:
        pool.release(segment.number)
    assert files() <= before + MANY
    for segment in segments:
        with pytest.raises(FrameError, match="never lent"):
            pool.release(segment.number)


def test_no_more_than_so_much_is_kept_for_later(pool: SegmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unirun.roles.transport.sockets.KEEP", 1 << 20)
    assert KEEP > 1 << 20
    before = files()
    segments = [pool.write([buffer(1 << 19)]) for _ in range(4)]
    for segment in segments:
        pool.release(segment.number)
    assert files() == before + 2


@pytest.mark.parametrize(("module", "call"), [(os, "pwrite"), (os, "ftruncate"), (fcntl, "fcntl")])
@pytest.mark.parametrize("used", [False, True])
def test_a_segment_that_cannot_be_written_is_closed(
    pool: SegmentPool, monkeypatch: pytest.MonkeyPatch, module: ModuleType, call: str, used: bool
) -> None:
    if used:
        pool.release(pool.write([buffer(1 << 20)]).number)
    before = files()

    def fails(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(module, call, fails)
        for _ in range(3):
            # One that was there is written without the other calls.
            with contextlib.suppress(OSError):
                pool.release(pool.write([buffer(1 << 20)]).number)
    assert files() <= before
    pool.release(pool.write([buffer(1 << 20)]).number)


def test_what_was_never_lent_cannot_come_back(pool: SegmentPool) -> None:
    segment = pool.write([buffer(100)])
    for number in (segment.number + 1, 0):
        with pytest.raises(FrameError, match=f"segment {number} was given back and never lent"):
            pool.release(number)
    pool.release(segment.number)
    with pytest.raises(FrameError):
        pool.release(segment.number)


def test_a_descriptor_of_too_little_is_refused_and_closed(pool: SegmentPool) -> None:
    handle = pool.write([buffer(100)]).handle
    before = files()
    with pytest.raises(FrameError, match="holds less than"):
        map_segment(os.dup(handle), [200], lambda: None)
    with pytest.raises(FrameError):
        map_segment(os.dup(handle), [], lambda: None)
    with pytest.raises(FrameError):
        map_segment(os.dup(handle), [1 << 62, 1 << 62], lambda: None)
    assert files() == before


def test_nobody_can_change_the_size_of_what_was_sent_not_even_when_it_is_used_again(
    pool: SegmentPool,
) -> None:
    for _ in range(2):
        segment = pool.write([buffer(10_000)])
        (view,) = map_segment(os.dup(segment.handle), [10_000], lambda: None)
        for size in (0, 9_999, 20_000):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.handle, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(segment.handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert sum(view) == 10_000
        pool.release(segment.number)


@pytest.mark.parametrize("seals", [None, 0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE])
def test_a_segment_that_is_not_sealed_is_refused(tmp_path: Path, seals: int | None) -> None:
    before = files()
    if seals is None:
        path = tmp_path / "file"
        path.write_bytes(bytes(100))
        handle = os.open(path, os.O_RDONLY)
    else:
        handle = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.write(handle, bytes(100))
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(FrameError, match="could be shrunk"):
        map_segment(handle, [100], lambda: None)
    assert files() == before


def test_what_is_mapped_outlives_the_pool() -> None:
    pool = SegmentPool()
    segment = pool.write([buffer(5000, 9)])
    (view,) = map_segment(os.dup(segment.handle), [5000], lambda: None)
    pool.close()
    assert bytes(view) == bytes([9]) * 5000
