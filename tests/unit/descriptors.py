"""The invariant that a test leaves no descriptor open."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

import pytest

from tests.waiting import eventually


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    """Descriptors that are open after a test, and were not before, belong to nobody."""
    before = _open()
    yield
    if _open() - before:
        gc.collect(1)  # what is young: a full collection takes long

    def gone() -> bool:
        gc.collect()
        return not _open() - before

    if _open() - before:
        eventually(gone, f"no descriptor is left: {_open() - before}", within=5.0)


def _open() -> set[tuple[int, str]]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return found
