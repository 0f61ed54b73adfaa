"""Tests of this floor start no process, but for those that are marked ``starts_processes``: `make quick` leaves them out."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest


@pytest.fixture(autouse=True)
def no_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that is not marked cannot start a process."""
    if request.node.get_closest_marker("starts_processes") is not None:
        return

    def refuse(*_: Any, **__: Any) -> NoReturn:
        pytest.fail("a test that starts a process is marked starts_processes")

    starts: tuple[tuple[Any, str], ...] = ((os, "fork"), (os, "posix_spawn"), (subprocess.Popen, "__init__"))
    for place, name in starts:
        monkeypatch.setattr(place, name, refuse)


@pytest.fixture
def no_descriptors_are_left() -> Iterator[None]:
    """A test closes what it opens, though maybe by the collector: what is left after that is a number that nobody
    knows any more, or an object that lives on. For tests of code that opens descriptors."""
    before = descriptors()
    yield
    left = descriptors().items() - before.items()
    # First what is young: after thousands of tests a full collection takes two seconds.
    for generation in (1, 2):
        if left:
            gc.collect(generation)
            left = descriptors().items() - before.items()
    assert not left, f"descriptors are left open: {sorted(left)}"


def descriptors() -> dict[str, str]:
    """The descriptors of this process, and what each of them is."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[path.name] = os.readlink(path)
    return found
